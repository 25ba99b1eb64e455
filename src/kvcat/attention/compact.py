"""Attention of new tokens over the slots of a compact cache and over each other."""

import torch
from torch.nn.functional import pad

from kvcat.attention.fast import attend_extended, extend_keys, fused_attention
from kvcat.cache import RaggedLayer
from kvcat.errors import InputError
from kvcat.types import Float, Int, Tensor

_FEW_QUERIES = 64
_LOWEST = -1e4


def attend_compact(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    log_bias: Float[Tensor, "#batch kv_heads slots"],
    mask: Tensor | None,
    *,
    scale: float,
    dropout: float = 0.0,
) -> Float[Tensor, "batch heads queries value_dim"]:
    """Attention over keys whose first slots have a log-bias and are seen by every query.

    Few queries, as in decoding, take the bias as an additive mask; many take it in extra channels of the keys, where it
    needs no tensor of heads x queries x keys.

    Args:
        q: queries of the newest tokens.
        k: of the slots and of all tokens behind them.
        v: likewise.
        log_bias: of the slots, nats; -inf hides one.
        mask: boolean or additive, (batch or 1, 1, queries, columns), whose last columns are the tokens behind the
            slots; the columns before them stand for the slots, which are always seen, however many the mask was made
            for. None: a single query, which sees everything.
        scale: factor on q.k.
        dropout: probability that an attention weight is dropped.

    Raises:
        InputError: several queries and no mask.
    """
    num_slots, num_new = log_bias.shape[-1], k.shape[2] - log_bias.shape[-1]
    if mask is None and q.shape[2] > 1:
        raise InputError(f"{q.shape[2]} queries over {k.shape[2]} slots with a log-bias need an attention mask")
    if mask is not None:
        mask = mask[..., mask.shape[-1] - num_new :]
        mask = pad(mask, (num_slots, 0), value=True if mask.dtype == torch.bool else 0.0)
    wide = torch.promote_types(q.dtype, torch.float32)  # a bfloat16 mask would lose 0.01 nats
    if q.shape[2] <= _FEW_QUERIES and (q.device.type == "cpu" or q.dtype == wide):
        additive = _per_query(log_bias, num_new, mask, q.shape[1] // k.shape[1]).to(wide)
        return fused_attention(q, k, v, additive, causal=False, scale=scale, dropout=dropout)
    lowest = max(_LOWEST, 0.5 * scale * torch.finfo(k.dtype).min)
    bias = pad(log_bias.to(wide).clamp(min=lowest), (0, num_new)).expand(len(k), -1, -1)
    return attend_extended(q, extend_keys(k, bias, scale), v, mask, causal=False, scale=scale, dropout=dropout)


def _per_query(
    log_bias: Float[Tensor, "#batch kv_heads slots"], num_new: int, mask: Tensor | None, num_groups: int
) -> Float[Tensor, "#batch heads #queries keys"]:
    bias = pad(log_bias, (0, num_new)).repeat_interleave(num_groups, dim=1).unsqueeze(2)
    if mask is None:
        return bias
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else bias + mask


def attend_ragged(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads new head_dim"],
    v: Float[Tensor, "batch kv_heads new value_dim"],
    slots: RaggedLayer,
    rows: Int[Tensor, " batch"],
    mask: Tensor | None,
    *,
    scale: float,
) -> Float[Tensor, "batch heads queries value_dim"]:
    """Attention over each head's own slots, which every query sees, and over the tokens behind them.

    One head after the other for all rows that go on from the same example, in at least float32; nothing is padded.

    Args:
        q: queries of the newest tokens.
        k: of all tokens behind the slots.
        v: likewise.
        slots: of every example.
        rows: the example that each row goes on from.
        mask: as in ``attend_compact``.
        scale: factor on q.k.

    Raises:
        InputError: several queries and no mask.
    """
    if mask is None and q.shape[2] > 1:
        raise InputError(f"{q.shape[2]} queries over {slots.num_slots} slots need an attention mask")
    wide, num_new = torch.promote_types(q.dtype, torch.float32), k.shape[2]
    if mask is not None:
        mask = mask[..., mask.shape[-1] - num_new :]
        mask = torch.zeros_like(mask, dtype=wide).masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else mask
    grouped = (q * scale).unflatten(1, (k.shape[1], -1)).to(wide)
    out = torch.empty(*grouped.shape[:-1], v.shape[-1], dtype=wide, device=q.device)
    for example in rows.unique().tolist():
        own = (rows == example).nonzero().flatten()
        for head in range(k.shape[1]):
            keys, values, bias = slots.head(example, head)
            queries = grouped[own, head]
            old = queries @ keys.to(wide).T
            old = old if bias is None else old + bias.to(wide)
            new = queries @ k[own, head].to(wide).mT.unsqueeze(1)
            if mask is not None:
                new = new + (mask if len(mask) == 1 else mask[own])
            weights = torch.cat([old, new], dim=-1).softmax(-1)
            behind = weights[..., len(keys) :] @ v[own, head].to(wide).unsqueeze(1)
            out[own, head] = weights[..., : len(keys)] @ values.to(wide) + behind
    return out.flatten(1, 2).to(q.dtype)
