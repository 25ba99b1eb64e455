"""kvcat's attention inside unmodified transformers models, registered under the name "kvcat"."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvcat.attention.biased import attend_biased
from kvcat.attention.carried import carried_by
from kvcat.attention.compact import attend_compact, attend_ragged
from kvcat.attention.fast import attend_twice, attend_within
from kvcat.attention.gates import Gate, layer_number
from kvcat.attention.reference import reachable
from kvcat.errors import InputError
from kvcat.types import Float, Tensor

NAME = "kvcat"


@dataclass(eq=False)
class Recorder:
    """Collects what attention sees; handed to a model as the keyword ``kv_recorder``.

    Args:
        query_start: position from which on queries are kept.
        queries, keys, values: by layer index, after rotation; keys and values include those of a cache.
        scales: factor on q.k by layer index.
    """

    query_start: int = 0
    queries: dict[int, Float[Tensor, "batch heads queries head_dim"]] = field(default_factory=dict)
    keys: dict[int, Float[Tensor, "batch kv_heads tokens key_dim"]] = field(default_factory=dict)
    values: dict[int, Float[Tensor, "batch kv_heads tokens value_dim"]] = field(default_factory=dict)
    scales: dict[int, float] = field(default_factory=dict)

    def record(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Float[Tensor, "batch kv_heads keys head_dim"], Float[Tensor, "batch kv_heads keys value_dim"]]:
        """Keeps one layer's tensors, the queries as a copy of the part asked for.

        Returns:
            The keys and values that the layer attends to; here those it was given.
        """
        wanted = query[:, :, self.query_start :]
        self.queries[layer_idx] = wanted.clone() if self.query_start else wanted
        self.keys[layer_idx], self.values[layer_idx], self.scales[layer_idx] = key, value, scale
        return key, value


def kvcat_attention(
    module: nn.Module,
    query: Float[Tensor, "rows heads queries head_dim"],
    key: Float[Tensor, "rows kv_heads keys key_dim"],
    value: Float[Tensor, "rows kv_heads keys value_dim"],
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    kv_gate: Gate | None = None,
    kv_recorder: Recorder | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "rows queries heads value_dim"], None]:
    """SDPA attention as transformers does it, with three additions that stay silent unless asked for.

    - ``kv_gate``: the first rows attend densely, the last rows over the gate's slots (as many rows as the gate has);
      or, where the gate has a ``prefix_len``, see ``attend_twice``.
    - keys of a compact cache that carry the log-bias of their slots, or slots that differ in number from head to head.
    - ``kv_recorder``: sees queries, keys and values after rotation, and says what is attended to.

    Args:
        module: the attention module that calls.
        query, key, value: after rotation and the cache's update.
        attention_mask: boolean or additive (rows or 1, 1, queries, keys); None is causal, the queries being the last of
            the keys (``kvcat_mask``).
        dropout: probability that an attention weight is dropped.
        scaling: factor on q.k; None is head_dim ** -0.5.
        kv_gate: one group's gate of this pass.
        kv_recorder: where to keep what attention sees.
        kwargs: whatever the model hands to its attention.

    Raises:
        InputError: a gate or log-bias meets attention that this function cannot honour.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if kv_recorder is not None:
        key, value = kv_recorder.record(layer_number(module), query, key, value, scale)
    carried = carried_by(key)
    if carried is not None:
        _refuse_unsupported(module, kwargs)
        if carried.slots is not None:
            out = attend_ragged(query, key, value, carried.slots, carried.rows, attention_mask, scale=scale)
        else:
            out = attend_compact(query, key, value, carried.log_bias, attention_mask, scale=scale, dropout=dropout)
        return out.transpose(1, 2).contiguous(), None
    if kv_gate is None:
        if attention_mask is None and 1 < query.shape[2] < key.shape[2] and _is_causal(module, kwargs):
            if not _unusual(kwargs):
                out = attend_biased(query, key, value, scale=scale, dropout=dropout)
                return out.transpose(1, 2).contiguous(), None
            attention_mask = reachable(query.shape[2], key.shape[2], device=query.device)[None, None]
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    _refuse_unsupported(module, kwargs)
    keep = kv_gate.keep_for(module, query, key, scale, kwargs.get("sliding_window"))
    if kv_gate.prefix_len is not None:
        out = attend_twice(
            query, key, value, keep, kv_gate.prefix_len,
            scale=scale, window=kwargs.get("sliding_window"), coupling=kv_gate.coupling, dropout=dropout,
        )  # fmt: skip
        return out.transpose(1, 2).contiguous(), None
    num_dense = query.shape[0] - keep.shape[0]
    dense_mask, masked_mask = attention_mask, attention_mask
    if attention_mask is not None and attention_mask.shape[0] > 1:
        dense_mask, masked_mask = attention_mask[:num_dense], attention_mask[num_dense:]
    dense, _ = sdpa_attention_forward(
        module, query[:num_dense], key[:num_dense], value[:num_dense], dense_mask,
        dropout=dropout, scaling=scaling, **kwargs,
    )  # fmt: skip
    masked = attend_within(
        query[num_dense:], key[num_dense:], value[num_dense:], keep, None, _reach(masked_mask), masked_mask is None,
        scale=scale, coupling=kv_gate.coupling, keep_self=kv_gate.keep_self, dropout=dropout,
    )  # fmt: skip
    return torch.cat([dense, masked.transpose(1, 2)]), None


def kvcat_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """Transformers' mask for SDPA, and None wherever the queries are the last of the keys and nothing else is hidden.

    transformers makes a real mask for several queries behind a cache. ``kvcat_attention`` needs none: it takes None for
    causal queries at the end of the keys. Of a static cache, whose keys end in empty slots, transformers says None at
    times as well; those get a real one.

    Args:
        q_length: number of queries.
        kv_length: number of keys.
        q_offset: position of the first query.
        kv_offset: position of the first key.
        attention_mask: 1 for tokens, 0 for padding, by position; None: no padding.
        local_size: tokens that a query sees at most; None: no limit.
        allow_is_causal_skip: whether the mask is plainly causal.
        kwargs: whatever else transformers hands to its mask function.
    """
    stop = kv_offset + kv_length
    if (
        allow_is_causal_skip
        and not torch.compiler.is_compiling()
        and not isinstance(q_offset, Tensor)
        and q_offset + q_length == stop
        and (local_size is None or kv_length < local_size)
        and (attention_mask is None or _is_whole(attention_mask, kv_offset, stop))
    ):
        return None
    return sdpa_mask(
        q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,  # type: ignore[arg-type]
        attention_mask=attention_mask, local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip and q_length in (1, kv_length), **kwargs,
    )  # fmt: skip


def _is_whole(padding: Tensor, start: int, stop: int) -> bool:
    return padding.shape[-1] >= stop and bool(padding[:, start:stop].all())


def enable(model: PreTrainedModel) -> None:
    """Switches a transformers model to kvcat's attention; does nothing where that is done already.

    The choice lives in memory only: a saved model's config.json does not know of it.

    Args:
        model: an unmodified transformers model.

    Raises:
        InputError: the model does not use transformers' attention interface, or softens its scores with a cap.
    """
    if model.config._attn_implementation == NAME:
        return
    kind = type(model).__name__
    if not type(model)._can_set_attn_implementation():
        raise InputError(f"{kind} is not supported: it does not use transformers' attention interface")
    text = model.config.get_text_config(decoder=True)
    if getattr(text, "attn_logit_softcapping", None):
        raise InputError(
            f"{kind} is not supported: its attention scores are soft-capped at {text.attn_logit_softcapping}"
        )
    model.set_attn_implementation(NAME)


def scaling_of(module: nn.Module) -> float:
    """The factor on q.k of a layer's attention module: its own ``scaling``, or head_dim ** -0.5.

    Raises:
        InputError: the module states neither.
    """
    if (scaling := getattr(module, "scaling", None)) is not None:
        return float(scaling)
    head_dim = getattr(module, "head_dim", None) or getattr(module, "head_size", None)
    if head_dim is None:
        raise InputError(f"{type(module).__name__} states no scaling and no head_dim")
    return float(head_dim) ** -0.5


def _reach(mask: Tensor | None) -> Tensor | None:
    if mask is None:
        return None
    allowed = mask if mask.dtype == torch.bool else mask > 0.5 * torch.finfo(mask.dtype).min
    return allowed[:, 0]


def _refuse_unsupported(module: nn.Module, kwargs: dict[str, Any]) -> None:
    for name in _unusual(kwargs):
        raise InputError(f"{type(module).__name__} is not supported: its attention uses {name}")
    if not _is_causal(module, kwargs):
        raise InputError(f"{type(module).__name__} is not supported: its attention is not causal")


def _unusual(kwargs: dict[str, Any]) -> list[str]:
    return [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]


def _is_causal(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    stated = kwargs.get("is_causal")
    return getattr(module, "is_causal", True) if stated is None else stated


AttentionInterface.register(NAME, kvcat_attention)
AttentionMaskInterface.register(NAME, kvcat_mask)
