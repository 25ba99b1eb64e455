"""Attention over visible slots and log-bias on PyTorch's fused kernels."""

from collections.abc import Callable

import torch
from torch.nn.functional import pad

from kvcat.attention.kernels import attend_biased, attend_extended, fused_attention
from kvcat.attention.mask_gradient import KeepGradient
from kvcat.attention.reference import reachable, visible
from kvcat.types import Bool, Float, Int, Tensor

_DROPPED = (
    -1e4
)  # nats: exp(_DROPPED) is 0 in every dtype, and finite scores keep gradients free of NaN
_FEW_QUERIES = 64  # so few take a log-bias as a tensor of heads x queries x keys

Head = tuple[
    Float[Tensor, "slots head_dim"],
    Float[Tensor, "slots value_dim"],
    Float[Tensor, " slots"] | None,
]
"""Keys, values and log-bias of one KV head of one example."""
SlotsByHead = Callable[[int, int], Head]
"""The slots of an example and a head."""


def attend(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    keep: Float[Tensor, "batch keys"] | Bool[Tensor, "batch keys"] | None = None,
    log_bias: Float[Tensor, "#batch kv_heads slots"] | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    reach: Bool[Tensor, "#batch queries keys"] | None = None,
) -> Float[Tensor, "batch heads queries value_dim"]:
    """``attend_reference`` on fused kernels; gradients to q, k, v are exact for the hard mask.

    ``keep`` gets the gradient of ``KeepGradient`` where it requires one. Without a window or ``reach`` no tensor of
    queries x keys is made in the forward.

    Args:
        q, k, v, keep, scale, window: as in ``attend_reference``.
        log_bias: nats added to the scores of the first slots, the keys after them get none; -inf hides a slot. Not with
            ``keep``.
        reach: True where a query may look at a key, instead of causality and ``window``.
    """
    if keep is not None and log_bias is not None:
        raise ValueError("attend takes keep or log_bias, not both; attend_reference takes both")
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    if window is not None:
        reach = reachable(q.shape[2], k.shape[2], window=window, device=q.device)[None]
    hard = None if keep is None else keep.detach() > 0
    if reach is None:
        out = _without_reach(q, k, v, hard, log_bias, factor)
    else:
        seen = reach if hard is None else visible(hard, reach)
        out = _within_reach(q, k, v, seen[:, None], log_bias, factor)
    if keep is None or not keep.requires_grad:
        return out
    return KeepGradient.apply(out, keep, q, k, v, reach, factor)  # type: ignore[return-value]


def attend_twice(
    q: Float[Tensor, "batch heads twice head_dim"],
    k: Float[Tensor, "batch kv_heads twice head_dim"],
    v: Float[Tensor, "batch kv_heads twice value_dim"],
    keep: Float[Tensor, "batch prefix"],
    prefix_len: int,
    *,
    scale: float,
    window: int | None = None,
    detach_prefix: bool = False,
) -> Float[Tensor, "batch heads twice value_dim"]:
    """Attention of sequences, each followed by its suffix again, which sees only kept prefix slots.

    Of the T + S positions the first T are a sequence that attends densely, the last S are its tokens prefix_len..T-1
    again. These see the sequence's own slots before prefix_len where ``keep`` is 1, and the slots of their kind up to
    themselves. The prefix is thus computed once for both.

    Args:
        q, k, v: of all T + S positions, after rotation; S = T - prefix_len.
        keep: 1 for kept slots of the prefix, 0 for dropped ones; gradient as in ``attend``.
        prefix_len: tokens before the split, in 1..T-1.
        detach_prefix: no gradient of the suffix's second pass reaches the prefix's keys and values.
    """
    num_tokens = (q.shape[2] + prefix_len) // 2
    window = None if window is None or window >= num_tokens else window
    first = slice(0, num_tokens)
    dense = attend(q[:, :, first], k[:, :, first], v[:, :, first], scale=scale, window=window)
    prefixes = (
        x[:, :, :prefix_len].detach() if detach_prefix else x[:, :, :prefix_len] for x in (k, v)
    )
    keys, values = (
        torch.cat([old, x[:, :, num_tokens:]], dim=2)
        for old, x in zip(prefixes, (k, v), strict=True)
    )
    seen = pad(keep, (0, num_tokens - prefix_len), value=1.0)
    masked = attend(q[:, :, num_tokens:], keys, values, seen, scale=scale, window=window)
    return torch.cat([dense, masked], dim=2)


def attend_ragged(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads new head_dim"],
    v: Float[Tensor, "batch kv_heads new value_dim"],
    slots: SlotsByHead,
    rows: Int[Tensor, " batch"],
    mask: Bool[Tensor, "#batch queries new"] | None,
    *,
    scale: float,
) -> Float[Tensor, "batch heads queries value_dim"]:
    """Attention over each head's own slots, which every query sees, and over the tokens behind them.

    One head after the other, for all rows that go on from the same example, ``rows[i]``. Nothing is padded. ``k`` and
    ``v`` are of the tokens behind the slots; ``mask`` says which of them a query sees, None is causal.
    """
    num_groups = q.shape[1] // k.shape[1]
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=v.dtype, device=q.device)
    for example in rows.unique().tolist():
        own = (rows == example).nonzero().flatten()
        reach = mask if mask is None or len(mask) == 1 else mask[own]
        for head in range(k.shape[1]):
            *prefix, bias = slots(example, head)
            keys, values = (
                torch.cat(
                    [x.to(new.dtype).expand(len(own), 1, -1, -1), new[own, head : head + 1]], dim=2
                )
                for x, new in zip(prefix, (k, v), strict=True)
            )
            part = slice(head * num_groups, (head + 1) * num_groups)
            out[own, part] = attend(
                q[own, part], keys, values, None, None if bias is None else bias.expand(1, 1, -1),
                reach=None if reach is None else pad(reach, (len(prefix[0]), 0), value=True), scale=scale,
            )  # fmt: skip
    return out


def _without_reach(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, log_bias: Tensor | None, scale: float
) -> Tensor:
    """Dropped slots have a bias of -1e4; queries that see no kept slot get their own value."""
    if keep is None:
        bias = None if log_bias is None else _finite(log_bias, k, scale).expand(len(k), -1, -1)
        return attend_biased(q, k, v, bias, scale=scale)
    bias = torch.where(keep[:, None], q.new_zeros(k.shape[:3]), _lowest(k, scale))
    out = attend_biased(q, k, v, bias, scale=scale)
    num_queries = q.shape[2]
    blind = keep.cumsum(-1)[:, None, -num_queries:, None] == 0
    own = v[:, :, -num_queries:].repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return torch.where(blind, own, out)


def _within_reach(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, log_bias: Tensor | None, scale: float
) -> Tensor:
    """``seen`` is (batch or 1, 1, queries, keys)."""
    wide = torch.promote_types(q.dtype, torch.float32)  # a bfloat16 bias would lose 0.01 nats
    if log_bias is None:
        mask = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(
            ~seen, -torch.inf
        )
        return fused_attention(q, k, v, mask, causal=False, scale=scale)
    bias = pad(log_bias.to(wide), (0, k.shape[2] - log_bias.shape[-1]))
    if q.shape[2] <= _FEW_QUERIES and (q.device.type == "cpu" or q.dtype == wide):
        mask = torch.where(
            seen, bias.repeat_interleave(q.shape[1] // k.shape[1], dim=1)[:, :, None], -torch.inf
        )
        return fused_attention(q, k, v, mask, causal=False, scale=scale)
    bias = _finite(bias, k, scale).expand(len(k), -1, -1)
    return attend_extended(q, k, v, bias, seen, causal=False, scale=scale)


def _lowest(k: Tensor, scale: float) -> float:
    return max(_DROPPED, 0.5 * scale * torch.finfo(k.dtype).min)


def _finite(log_bias: Tensor, k: Tensor, scale: float) -> Tensor:
    return log_bias.to(torch.promote_types(k.dtype, torch.float32)).clamp(min=_lowest(k, scale))
