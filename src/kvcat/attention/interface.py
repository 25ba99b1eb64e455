"""kvcat's attention inside unmodified transformers models, registered under the name "kvcat".

Beside queries, keys and values two things reach it. A gate (``SlotGate``) says which slots the masked rows of a batch
see; a decoder layer gets it as a keyword. What the keys of a compact cache carry (``Carried``) is an attribute of the
tensor: transformers hands the keys of a cache's update on to its attention function as they are, so no channel, no mask
and no argument of the model is needed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvcat.attention.fast import SlotsByHead, attend, attend_ragged, attend_twice
from kvcat.errors import InputError
from kvcat.types import Bool, Float, Int, Tensor

NAME = "kvcat"

KVRecord = Callable[[int, Tensor, Tensor, Tensor, float], None]
"""Gets the layer's number, queries, keys and values after rotation (those of a cache included), and the scale."""


class SlotGate:
    """The gate of a group of layers in one forward pass; a decoder layer gets it as the keyword ``kv_gate``.

    A plain class: FSDP2 copies the dataclasses among a layer's arguments, and a copy would lose the decision.

    Args:
        keep: 1 for slots that the masked rows see, 0 for the others; carries the policy's gradient. None: decided in
            the attention of the group's first layer.
        prefix_len: tokens before the suffix that runs again, in rows ``[sequence, its suffix again]``; ``keep`` is then
            of the prefix. None: whole rows are masked.
        detach_prefix: no gradient of the suffix that runs again reaches the prefix's keys and values.
        decide: makes ``keep`` of queries and keys of all rows after rotation, the scale and the sliding window; called
            once, without gradient, so that a layer that runs again finds the gate that the later layers used.
    """

    def __init__(
        self,
        keep: Float[Tensor, "batch slots"] | None,
        prefix_len: int | None = None,
        detach_prefix: bool = False,
        decide: Callable[[Tensor, Tensor, float, int | None], Tensor] | None = None,
    ):
        self.keep, self.prefix_len, self.detach_prefix, self.decide = (
            keep,
            prefix_len,
            detach_prefix,
            decide,
        )

    def keep_for(
        self, queries: Tensor, keys: Tensor, scale: float, window: int | None
    ) -> Float[Tensor, "batch slots"]:
        """The slots that the masked rows see in this layer."""
        if self.keep is None:
            with torch.no_grad():
                self.keep = self.decide(queries.detach(), keys.detach(), scale, window)  # type: ignore[misc]
        return self.keep


@dataclass
class Carried:
    """What only kvcat's attention function adds to the keys: a log-bias, or slots that the keys do not hold.

    Args:
        log_bias: nats added to the scores of the first keys; the keys after them get none.
        slots: slots before all keys, where heads hold different numbers of them.
        rows: with ``slots``, the example that each row of the batch goes on from.
        taken: whether attention has read it.
    """

    log_bias: Float[Tensor, "rows kv_heads slots"] | None = None
    slots: SlotsByHead | None = None
    rows: Int[Tensor, " batch"] | None = None
    taken: bool = False


def attach(keys: Float[Tensor, "rows kv_heads keys head_dim"], carried: Carried) -> Tensor:
    """The same keys, carrying it."""
    keys.kv_carried = carried  # type: ignore[attr-defined]
    return keys


def carried_by(keys: Float[Tensor, "rows kv_heads keys head_dim"]) -> Carried | None:
    """What the keys carry, marked as taken; None where they carry nothing."""
    carried = getattr(keys, "kv_carried", None)
    if carried is not None:
        carried.taken = True
    return carried


def kvcat_attention(
    module: nn.Module,
    query: Float[Tensor, "rows heads queries head_dim"],
    key: Float[Tensor, "rows kv_heads keys key_dim"],
    value: Float[Tensor, "rows kv_heads keys value_dim"],
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    kv_gate: SlotGate | None = None,
    kv_record: KVRecord | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "rows queries heads value_dim"], None]:
    """SDPA attention as transformers does it, with three additions, each off by default.

    - ``kv_gate``: the first rows attend densely, the last ones over the gate's slots; with a ``prefix_len`` see
      ``attend_twice``. Refuses attention that cannot honour it; likewise with
    - keys of a compact cache that carry a log-bias or slots (``Carried``).
    - ``kv_record``: is shown queries, keys and values.

    The ``attention_mask`` is (rows or 1, 1, queries, keys); None is causal, the queries being the last of the keys
    (``kvcat_mask``). ``scaling`` is the factor on q.k; None is head_dim ** -0.5.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if kv_record is not None:
        kv_record(int(module.layer_idx), query, key, value, scale)  # type: ignore[arg-type]
    stock = {"dropout": dropout, "scaling": scaling, **kwargs}
    carried = carried_by(key)
    if (
        carried is None
        and kv_gate is None
        and (
            attention_mask is not None
            or not 1 < query.shape[2] < key.shape[2]
            or not _is_causal(module, kwargs)
        )
    ):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **stock)
    _refuse_unsupported(module, stock)
    if carried is not None:
        out = _behind_slots(query, key, value, carried, attention_mask, scale)
    elif kv_gate is not None:
        return _gated(module, query, key, value, attention_mask, scale, kv_gate, stock), None
    else:
        out = attend(query, key, value, scale=scale)
    return out.transpose(1, 2).contiguous(), None


def _gated(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, gate: SlotGate,
    stock: dict[str, Any],
) -> Float[Tensor, "rows queries heads value_dim"]:  # fmt: skip
    """The dense rows and the masked ones, or sequences and their suffixes run again."""
    window = stock.get("sliding_window")
    keep = gate.keep_for(query, key, scale, window)
    if gate.prefix_len is not None:
        out = attend_twice(
            query,
            key,
            value,
            keep,
            gate.prefix_len,
            scale=scale,
            window=window,
            detach_prefix=gate.detach_prefix,
        )
        return out.transpose(1, 2).contiguous()
    (dense_q, q), (dense_k, k), (dense_v, v) = (
        x.tensor_split([len(x) - len(keep)]) for x in (query, key, value)
    )
    dense_mask = mask
    if mask is not None and len(mask) > 1:
        dense_mask, mask = mask.tensor_split([len(mask) - len(keep)])
    dense, _ = sdpa_attention_forward(module, dense_q, dense_k, dense_v, dense_mask, **stock)
    masked = attend(q, k, v, keep, reach=_reach(mask), scale=scale)
    return torch.cat([dense, masked.transpose(1, 2)])


def _behind_slots(
    query: Tensor, key: Tensor, value: Tensor, carried: Carried, mask: Tensor | None, scale: float
) -> Float[Tensor, "rows heads queries value_dim"]:
    """Attention over slots, which every query sees, and over the tokens behind them."""
    num_slots = 0 if carried.log_bias is None else carried.log_bias.shape[-1]
    reach = _reach(mask)
    if (
        reach is not None
    ):  # its last columns are the new tokens; those before stand for the slots, however many
        reach = reach[..., reach.shape[-1] - (key.shape[2] - num_slots) :]
    if carried.slots is not None and carried.rows is not None:
        return attend_ragged(query, key, value, carried.slots, carried.rows, reach, scale=scale)
    reach = None if reach is None else pad(reach, (num_slots, 0), value=True)
    return attend(query, key, value, None, carried.log_bias, scale=scale, reach=reach)


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

    transformers makes a real mask for several queries behind a cache, which ``kvcat_attention`` does not need. Of a
    static cache, whose keys end in empty slots, transformers at times returns None; it gets a real mask here. The
    arguments are transformers' own; ``attention_mask`` is 0 for padding, by position.
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
    """Switch a transformers model to kvcat's attention, in memory only: a saved config.json does not name it.

    Refuses a model that does not use transformers' attention interface, or caps its scores.
    """
    check_not_wrapped(model)
    if model.config._attn_implementation == NAME:
        return
    kind = type(model).__name__
    if not type(model)._can_set_attn_implementation():
        raise InputError(
            f"{kind} is not supported: it does not use transformers' attention interface"
        )
    cap = getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    if cap:
        raise InputError(f"{kind} is not supported: its attention scores are soft-capped at {cap}")
    model.set_attn_implementation(NAME)


def check_not_wrapped(model: nn.Module) -> None:
    """Refuse a model inside a ``PeftModel``, whose parts are not where a transformers model has them."""
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        raise InputError(f"{type(model).__name__} wraps a model: give its get_base_model(), in which adapters stay")


def _reach(mask: Tensor | None) -> Bool[Tensor, "rows queries keys"] | None:
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        raise InputError(
            f"a gate or a compact cache needs a boolean attention mask, not {mask.dtype}"
        )
    return mask[:, 0]


def _refuse_unsupported(module: nn.Module, kwargs: dict[str, Any]) -> None:
    reasons = [
        f"uses {name}"
        for name in ("softcap", "s_aux", "position_bias")
        if kwargs.get(name) is not None
    ]
    if not _is_causal(module, kwargs):
        reasons.append("is not causal")
    if kwargs["dropout"]:
        reasons.append("uses dropout: switch the model to evaluation mode")
    if reasons:
        raise InputError(f"{type(module).__name__} is not supported: its attention {reasons[0]}")


def _is_causal(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    stated = kwargs.get("is_causal")
    return getattr(module, "is_causal", True) if stated is None else stated


AttentionInterface.register(NAME, kvcat_attention)
AttentionMaskInterface.register(NAME, kvcat_mask)
