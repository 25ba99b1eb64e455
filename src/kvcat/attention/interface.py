"""kvcat's attention inside unmodified transformers models, registered under the name "kvcat"."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvcat.attention.fast import attend, attend_ragged, attend_twice
from kvcat.attention.gates import Carried, SlotGate, carried_by, layer_number
from kvcat.attention.reference import reachable
from kvcat.errors import InputError
from kvcat.types import Bool, Float, Int, Tensor

NAME = "kvcat"


@dataclass(eq=False)
class Recorder:
    """Collects what attention sees; handed to a model as the keyword ``kv_recorder``.

    Args:
        query_start: position from which on queries are kept.
        query_positions: positions whose queries are kept in place of these, ascending; None: all from there on.
        queries, keys, values: by layer, after rotation; keys and values include those of a cache.
        scales: factor on q.k by layer.
    """

    query_start: int = 0
    query_positions: Int[Tensor, " kept"] | None = None
    queries: dict[int, Float[Tensor, "batch heads queries head_dim"]] = field(default_factory=dict)
    keys: dict[int, Float[Tensor, "batch kv_heads tokens key_dim"]] = field(default_factory=dict)
    values: dict[int, Float[Tensor, "batch kv_heads tokens value_dim"]] = field(default_factory=dict)
    scales: dict[int, float] = field(default_factory=dict)

    def record(self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Keep one layer's tensors; return the keys and values to attend to, here those it was given."""
        if self.query_positions is not None:
            self.queries[layer_idx] = query[:, :, self.query_positions]
        else:
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
    kv_gate: SlotGate | None = None,
    kv_recorder: Recorder | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "rows queries heads value_dim"], None]:
    """SDPA attention as transformers does it, with three additions, each off by default.

    - ``kv_gate``: the first rows attend densely, the last ones over the gate's slots; with a
      ``prefix_len`` see ``attend_twice``.
    - Keys of a compact cache that carry a log-bias or slots (``Carried``).
    - ``kv_recorder``: sees queries, keys and values after rotation, and returns what to attend to.

    The ``attention_mask`` is (rows or 1, 1, queries, keys); None is causal, the queries being the last of
    the keys (``kvcat_mask``). ``scaling`` is the factor on q.k; None is head_dim ** -0.5.

    Raises:
        InputError: a gate or a compact cache meets attention that this function cannot honour.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if kv_recorder is not None:
        key, value = kv_recorder.record(layer_number(module), query, key, value, scale)
    carried = carried_by(key)
    if carried is not None or kv_gate is not None:
        _refuse_unsupported(module, kwargs)
    if carried is not None:
        out = _behind_slots(query, key, value, carried, attention_mask, scale, dropout)
        return out.transpose(1, 2).contiguous(), None
    if kv_gate is None:
        if attention_mask is None and 1 < query.shape[2] < key.shape[2] and _is_causal(module, kwargs):
            if not _unusual(kwargs):
                return attend(query, key, value, scale=scale, dropout=dropout).transpose(1, 2).contiguous(), None
            attention_mask = reachable(query.shape[2], key.shape[2], device=query.device)[None, None]
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    window = kwargs.get("sliding_window")
    keep = kv_gate.keep_for(module, query, key, scale, window)
    options = {"scale": scale, "coupling": kv_gate.coupling, "dropout": dropout}
    if kv_gate.prefix_len is not None:
        out = attend_twice(query, key, value, keep, kv_gate.prefix_len, window=window, **options)
        return out.transpose(1, 2).contiguous(), None
    num_dense = query.shape[0] - keep.shape[0]
    dense_mask = masked_mask = attention_mask
    if attention_mask is not None and attention_mask.shape[0] > 1:
        dense_mask, masked_mask = attention_mask[:num_dense], attention_mask[num_dense:]
    dense, _ = sdpa_attention_forward(
        module, query[:num_dense], key[:num_dense], value[:num_dense], dense_mask,
        dropout=dropout, scaling=scaling, **kwargs,
    )  # fmt: skip
    reach = _reach(masked_mask)
    masked = attend(query[num_dense:], key[num_dense:], value[num_dense:], keep, reach=reach, **options)
    return torch.cat([dense, masked.transpose(1, 2)]), None


def _behind_slots(
    query: Tensor, key: Tensor, value: Tensor, carried: Carried, mask: Tensor | None, scale: float, dropout: float
) -> Float[Tensor, "rows heads queries value_dim"]:
    """Attention over slots, which every query sees, and over the tokens behind them."""
    num_slots = 0 if carried.log_bias is None else carried.log_bias.shape[-1]
    reach = _reach(mask)
    if reach is not None:  # its last columns are the new tokens; those before stand for the slots, however many
        reach = reach[..., reach.shape[-1] - (key.shape[2] - num_slots) :]
    if carried.slots is not None and carried.rows is not None:
        return attend_ragged(query, key, value, carried.slots, carried.rows, reach, scale=scale)
    reach = None if reach is None else pad(reach, (num_slots, 0), value=True)
    return attend(query, key, value, None, carried.log_bias, scale=scale, reach=reach, dropout=dropout)


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
    """Transformers' mask for SDPA; None where the queries are the last keys and nothing else is hidden.

    transformers makes a real mask for several queries behind a cache, which ``kvcat_attention`` does not
    need. Of a static cache, whose keys end in empty slots, transformers at times returns None; it gets a
    real mask here. The arguments are transformers' own; ``attention_mask`` is 0 for padding, by position.
    """
    stop = kv_offset + kv_length
    padding = None if attention_mask is None else attention_mask[:, kv_offset:stop]
    if (
        allow_is_causal_skip
        and not torch.compiler.is_compiling()
        and not isinstance(q_offset, Tensor)
        and q_offset + q_length == stop
        and (local_size is None or kv_length < local_size)
        and (padding is None or (padding.shape[-1] == kv_length and bool(padding.all())))
    ):
        return None
    return sdpa_mask(
        q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,  # type: ignore[arg-type]
        attention_mask=attention_mask, local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip and q_length in (1, kv_length), **kwargs,
    )  # fmt: skip


def enable(model: PreTrainedModel) -> None:
    """Switch a transformers model to kvcat's attention; a second call does nothing.

    The choice lives in memory only: a saved model's config.json does not name it.

    Raises:
        InputError: the model does not use transformers' attention interface, or caps its scores.
    """
    if model.config._attn_implementation == NAME:
        return
    kind = type(model).__name__
    if not type(model)._can_set_attn_implementation():
        raise InputError(f"{kind} is not supported: it does not use transformers' attention interface")
    cap = getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    if cap:
        raise InputError(f"{kind} is not supported: its attention scores are soft-capped at {cap}")
    model.set_attn_implementation(NAME)


def _reach(mask: Tensor | None) -> Bool[Tensor, "rows queries keys"] | None:
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        raise InputError(f"a gate or a compact cache needs a boolean attention mask, not {mask.dtype}")
    return mask[:, 0]


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
