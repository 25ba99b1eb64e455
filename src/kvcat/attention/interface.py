"""kvcat's attention inside unmodified transformers models, registered under the name "kvcat".

Besides queries, keys and values it gets two inputs. A gate (``SlotGate``) says which slots the
masked rows of a batch see; a decoder layer gets it as a keyword, and its window as another. The
keys of a compact cache carry a log-bias or slots (``kvcat.attention.carried``).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvcat.attention.carried import Carried, carried_by
from kvcat.attention.exclusive import exclusive
from kvcat.attention.fast import attend, attend_ragged, attend_twice
from kvcat.errors import InputError, check_kind
from kvcat.types import Bool, Float, Tensor

NAME = "kvcat"

KVRecord = Callable[[int, Tensor, Tensor, Tensor, float], None]
"""A function that gets a layer's number, its queries, keys and values after rotation, and the
scale."""
Decision = Callable[[Tensor, Tensor, float, int | None, Tensor | None], Tensor]
"""A function that makes the visible slots from all rows' queries and keys after rotation, scale,
window and sinks."""


class SlotGate:
    """The gate of a group of layers in one forward pass.

    A decoder layer gets it as the keyword ``kv_gate``. It is a plain class because FSDP2 copies the
    dataclasses among a layer's arguments, and a copy would lose the decision.

    Args:
        keep: 1 for slots that the masked rows see, 0 for the others; carries the policy's gradient.
            None: decided in the attention of the group's first layer.
        prefix_len: tokens before the suffix that runs again, in rows ``[sequence, its suffix
            again]``; ``keep`` then has the prefix's slots. None: whole rows are masked.
        detach_prefix: the suffix that runs again passes no gradient to the prefix's keys and
            values.
        decide: makes ``keep``. It is called once, without gradient, so that a layer that runs again
            finds the gate that the later layers used.
    """

    def __init__(
        self,
        keep: Float[Tensor, "batch slots"] | None,
        prefix_len: int | None = None,
        detach_prefix: bool = False,
        decide: Decision | None = None,
    ):
        self.keep = keep
        self.prefix_len = prefix_len
        self.detach_prefix = detach_prefix
        self.decide = decide
        self.reached_attention = False
        """Whether a layer has asked for its slots; a model's own attention may drop the keyword."""

    def keep_for(
        self,
        queries: Tensor,
        keys: Tensor,
        scale: float,
        window: int | None,
        sinks: Tensor | None,
    ) -> Float[Tensor, "batch slots"]:
        """The slots that the masked rows see in this layer."""
        self.reached_attention = True
        if self.keep is None:
            with torch.no_grad():
                queries = queries.detach()
                keys = keys.detach()
                sinks = None if sinks is None else sinks.detach()
                # once: a layer that activation checkpointing runs again finds the same gate
                self.keep = self.decide(queries, keys, scale, window, sinks)  # type: ignore[misc]
        return self.keep


def kvcat_attention(
    module: nn.Module,
    query: Float[Tensor, "rows heads queries head_dim"],
    key: Float[Tensor, "rows kv_heads keys key_dim"],
    value: Float[Tensor, "rows kv_heads keys value_dim"],
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    kv_gate: SlotGate | None = None,
    kv_window: int | None = None,
    kv_record: KVRecord | None = None,
    s_aux: Float[Tensor, " heads"] | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "rows queries heads value_dim"], None]:
    """SDPA attention as transformers computes it, with additions, each off by default.

    - ``kv_gate``: the first rows attend densely, the last ones over the gate's slots. With a
      ``prefix_len``, see ``attend_twice``. ``kv_window`` is the layer's sliding window in tokens;
      some models (Qwen2-MoE) apply theirs in the mask alone and pass no ``sliding_window``.
    - The keys of a compact cache carry a log-bias or slots (``Carried``), which are attended to.
    - ``kv_record`` is called with queries, keys and values.
    - ``s_aux``: sinks, one more logit per query head in the softmax, without a value (gpt-oss).

    With a gate, carried slots or sinks, attention that they cannot be combined with is rejected.

    Args:
        module: the attention layer of the model.
        query, key, value: after rotation, those of a cache included.
        attention_mask: (rows or 1, 1, queries, keys); None: causal, the queries being the last of
            the keys (``kvcat_mask``).
        scaling: factor on q.k; None: head_dim ** -0.5.
        kv_gate, kv_window, kv_record, s_aux: see above.
        **kwargs: further options of the model's attention.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if kv_record is not None:
        kv_record(int(module.layer_idx), query, key, value, scale)  # type: ignore[arg-type]
    stock = {"dropout": dropout, "scaling": scaling, **kwargs}
    if s_aux is not getattr(module, "sinks", None):  # where attention_sinks finds them
        raise InputError(f"{type(module).__name__} is not supported: sinks of an unknown place")
    carried = carried_by(key)
    # several queries after a cache: transformers would need a real mask
    is_causal_tail = (
        attention_mask is None and 1 < query.shape[2] < key.shape[2] and _is_causal(module, kwargs)
    )
    # SDPA would leave out sinks without an error
    if carried is None and kv_gate is None and s_aux is None and not is_causal_tail:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **stock)
    _reject_unsupported(module, stock)
    if carried is not None:
        out = _behind_slots(query, key, value, carried, attention_mask, scale, s_aux)
    elif kv_gate is not None and kv_gate.prefix_len is not None:
        out = attend_twice(
            query,
            key,
            value,
            kv_gate.keep_for(query, key, scale, kv_window, s_aux),
            kv_gate.prefix_len,
            scale=scale,
            window=kv_window,
            detach_prefix=kv_gate.detach_prefix,
            sinks=s_aux,
        )
    elif kv_gate is not None:
        return _dense_and_masked(
            module, query, key, value, attention_mask, scale, kv_gate, kv_window, s_aux, stock
        ), None
    else:
        out = attend(query, key, value, reach=_reach(attention_mask), scale=scale, sinks=s_aux)
    return out.transpose(1, 2).contiguous(), None


def _dense_and_masked(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    gate: SlotGate,
    window: int | None,
    sinks: Tensor | None,
    stock: dict[str, Any],
) -> Float[Tensor, "rows queries heads value_dim"]:
    """Attention of the dense rows, and of the masked rows over the gate's slots."""
    # rows [0, num_dense) of the batch are dense, the others masked
    keep = gate.keep_for(query, key, scale, window, sinks)
    num_dense = len(query) - len(keep)
    dense_mask = mask
    masked_mask = mask
    if mask is not None and len(mask) > 1:
        dense_mask, masked_mask = mask.tensor_split([num_dense])
    dense, _ = kvcat_attention(
        module,
        query[:num_dense],
        key[:num_dense],
        value[:num_dense],
        dense_mask,
        s_aux=sinks,
        **stock,
    )
    masked = attend(
        query[num_dense:],
        key[num_dense:],
        value[num_dense:],
        keep,
        reach=_reach(masked_mask),
        scale=scale,
        sinks=sinks,
    )
    return torch.cat([dense, masked.transpose(1, 2)])


def _behind_slots(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    carried: Carried,
    mask: Tensor | None,
    scale: float,
    sinks: Tensor | None,
) -> Float[Tensor, "rows heads queries value_dim"]:
    """Attention over slots, which every query sees, and over the tokens after them."""
    # slots that are carried themselves (ragged, packed) are not among the keys
    num_slots = 0 if carried.log_bias is None else carried.log_bias.shape[-1]
    reach = _reach(mask)
    if reach is not None:
        # the last columns are the new tokens; the others represent the slots, however many
        num_new = key.shape[2] - num_slots
        reach = reach[..., reach.shape[-1] - num_new :]
    if carried.slots is not None and carried.rows is not None:
        heads = (carried.slots, carried.rows)
        return attend_ragged(query, key, value, *heads, reach, scale=scale, sinks=sinks)
    if reach is not None:
        reach = pad(reach, (num_slots, 0), value=True)
    bias = carried.log_bias
    return attend(query, key, value, None, bias, scale=scale, reach=reach, sinks=sinks)


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
    """Transformers' mask for SDPA; None if the queries are the last keys and all else is seen.

    transformers makes a real mask for several queries after a cache; ``kvcat_attention`` does not
    need it. For a static cache, whose keys end in empty slots, transformers sometimes returns None;
    here it gets a real mask. The arguments are those of transformers; ``attention_mask`` is 0 for
    padding, by position.
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
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,  # type: ignore[arg-type]
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip and q_length in (1, kv_length),
        **kwargs,
    )


def enable(model: PreTrainedModel) -> None:
    """Switch a transformers model to kvcat's attention, in memory only.

    A saved config.json does not name it.

    Raises:
        InputError: a model that does not use transformers' attention interface, or caps its scores.
    """
    check_not_wrapped(model)
    with exclusive(model):
        if model.config._attn_implementation == NAME:
            return
        kind = type(model).__name__
        if not type(model)._can_set_attn_implementation():
            reason = "it does not use transformers' attention interface"
            raise InputError(f"{kind} is not supported: {reason}")
        cap = getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None)
        if cap:
            reason = f"its attention scores are soft-capped at {cap}"
            raise InputError(f"{kind} is not supported: {reason}")
        model.set_attn_implementation(NAME)


def check_not_wrapped(model: nn.Module) -> None:
    """Reject what is not a model, and a wrapper such as a ``PeftModel``: its layers are not where a
    transformers model has them, and its weights have other names.
    """
    check_kind(nn.Module, "a transformers model", model=model)
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        remedy = "merge its adapters and give the result of merge_and_unload()"
    elif hasattr(model, "_orig_mod"):  # of torch.compile
        remedy = "give the model itself, which model.compile() compiles in place"
    elif isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        remedy = "give its module"
    else:
        return
    raise InputError(f"{type(model).__name__} wraps a model: {remedy}")


def _reach(mask: Tensor | None) -> Bool[Tensor, "rows queries keys"] | None:
    """True where a query may look at a key, from transformers' mask."""
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        wanted = "a gate or a compact cache needs a boolean attention mask"
        raise InputError(f"{wanted}, not {mask.dtype}")
    return mask[:, 0]


def _reject_unsupported(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Reject attention that a gate or carried slots cannot be combined with."""
    options = ("softcap", "position_bias")
    reasons = [f"uses {name}" for name in options if kwargs.get(name) is not None]
    if not _is_causal(module, kwargs):
        reasons.append("is not causal")
    if kwargs["dropout"]:
        reasons.append("uses dropout: switch the model to evaluation mode")
    if reasons:
        raise InputError(f"{type(module).__name__} is not supported: its attention {reasons[0]}")


def _is_causal(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    argument = kwargs.get("is_causal")
    return getattr(module, "is_causal", True) if argument is None else argument


AttentionInterface.register(NAME, kvcat_attention)
AttentionMaskInterface.register(NAME, kvcat_mask)
