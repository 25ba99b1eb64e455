"""Attention of new tokens over the slots of a compact cache and over each other."""

import torch
from torch.nn.functional import pad

from kvcat.attention.biased import attend_biased
from kvcat.attention.carried import SlotsByHead
from kvcat.attention.kernels import attend_extended, extend_keys, fused_attention
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

    With a mask, few queries take the bias as a part of it; many take it in extra channels of the keys, without a
    tensor of heads x queries x keys. Without a mask there is none of queries x keys either (``attend_biased``).

    Args:
        q: queries of the newest tokens.
        k: of the slots and of all tokens behind them.
        v: likewise.
        log_bias: of the slots, nats; -inf hides one.
        mask: boolean or additive, (batch or 1, 1, queries, columns), whose last columns are the tokens behind the
            slots; the columns before them stand for the slots, which are always seen, however many the mask was made
            for. None: causal, the queries being the last of the tokens.
        scale: factor on q.k.
        dropout: probability that an attention weight is dropped.
    """
    num_slots, num_new = log_bias.shape[-1], k.shape[2] - log_bias.shape[-1]
    wide = torch.promote_types(q.dtype, torch.float32)  # a bfloat16 mask would lose 0.01 nats
    lowest = max(_LOWEST, 0.5 * scale * torch.finfo(k.dtype).min)
    if mask is None and q.shape[2] > 1:
        bias = log_bias.to(wide).clamp(min=lowest).expand(len(k), -1, -1)
        return attend_biased(q, k, v, bias, scale=scale, dropout=dropout)
    if mask is not None:
        mask = mask[..., mask.shape[-1] - num_new :]
        mask = pad(mask, (num_slots, 0), value=True if mask.dtype == torch.bool else 0.0)
    if q.shape[2] <= _FEW_QUERIES and (q.device.type == "cpu" or q.dtype == wide):
        additive = _per_query(log_bias, num_new, mask, q.shape[1] // k.shape[1]).to(wide)
        return fused_attention(q, k, v, additive, causal=False, scale=scale, dropout=dropout)
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
    slots: SlotsByHead,
    rows: Int[Tensor, " batch"],
    mask: Tensor | None,
    *,
    scale: float,
) -> Float[Tensor, "batch heads queries value_dim"]:
    """Attention over each head's own slots, which every query sees, and over the tokens behind them.

    One head after the other for all rows that go on from the same example; nothing is padded.

    Args:
        q: queries of the newest tokens.
        k: of all tokens behind the slots.
        v: likewise.
        slots: of every example.
        rows: the example that each row goes on from.
        mask: as in ``attend_compact``.
        scale: factor on q.k.
    """
    if mask is not None and len(mask) == 1:
        mask = mask.expand(len(q), -1, -1, -1)
    num_groups = q.shape[1] // k.shape[1]
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=v.dtype, device=q.device)
    for example in rows.unique().tolist():
        own = (rows == example).nonzero().flatten()
        seen = None if mask is None else mask[own]
        for head in range(k.shape[1]):
            *old, bias = slots.head(example, head)
            bias = old[0].new_zeros(1, 1, len(old[0])) if bias is None else bias.expand(1, 1, -1)
            keys, values = (
                torch.cat([x.to(new.dtype).expand(len(own), 1, -1, -1), new[own, head : head + 1]], dim=2)
                for x, new in zip(old, (k, v), strict=True)
            )
            part = slice(head * num_groups, (head + 1) * num_groups)
            out[own, part] = attend_compact(q[own, part], keys, values, bias, seen, scale=scale)
    return out
