"""Attention over visible slots and log-bias on PyTorch's fused kernels."""

from itertools import accumulate
from typing import Any

import torch
from torch.nn.functional import pad

from kvcat.attention.carried import SlotsOfExample
from kvcat.attention.kernels import attend_biased, attend_extended, fused_attention, with_sinks
from kvcat.attention.mask_gradient import KeepGradient
from kvcat.attention.reference import reachable, visible
from kvcat.types import Bool, Float, Int, Tensor

# nats: exp(-1e4) is 0 in every dtype, and finite scores keep gradients free of NaN
_DROPPED = -1e4
# up to so many queries of all rows x KV heads, heads with different numbers of slots are computed
# together, where each query has scores for the slots of all
_FEW_QUERIES = 48
# up to so many queries, a log-bias may be a tensor of heads x queries x keys
_BIAS_TENSOR_QUERIES = 64


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
    sinks: Float[Tensor, " heads"] | None = None,
) -> Float[Tensor, "batch heads queries value_dim"]:
    """``attend_reference`` on fused kernels; gradients to q, k, v and sinks are exact for the hard
    mask.

    ``keep`` gets the gradient of ``KeepGradient`` if it requires one. Without a window or ``reach``
    no tensor of queries x keys is made in the forward.

    Args:
        q, k, v, keep, scale, window, sinks: as in ``attend_reference``.
        log_bias: nats added to the scores of the first slots; the keys after them get none; -inf
            hides a slot. Not with ``keep``.
        reach: True where a query may look at a key, instead of causality and ``window``.
    """
    if keep is not None and log_bias is not None:
        raise ValueError("attend takes keep or log_bias, not both; attend_reference takes both")
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    if window is not None:
        reach = reachable(q.shape[2], k.shape[2], window=window, device=q.device)[None]
    # the value, with the exact gradient for the hard mask; keep has none here
    out = _over_visible(q, k, v, keep, log_bias, reach, factor, sinks)
    if keep is None or not keep.requires_grad:
        return out
    if sinks is not None:
        q, k, v = _with_finite_sinks(q, k, v, sinks, factor)
        # the sink is one more key in front, which every query sees
        keep = pad(keep, (1, 0), value=1.0)
        reach = None if reach is None else pad(reach, (1, 0), value=True)
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
    sinks: Float[Tensor, " heads"] | None = None,
) -> Float[Tensor, "batch heads twice value_dim"]:
    """Attention of sequences, each followed by its suffix again, which sees only kept prefix slots.

    Of the T + S positions the first T are a sequence that attends densely. The last S are its
    tokens prefix_len..T-1 again. They see the slots before prefix_len for which ``keep`` is 1, and
    those of the repeated suffix up to the query's position. The prefix is thus computed once for
    both.

    Args:
        q, k, v: queries, keys and values of all T + S positions, after rotation; S = T -
            prefix_len.
        keep: 1 for kept slots of the prefix, 0 for dropped ones; gradient as in ``attend``.
        prefix_len: tokens before the split, in 1..T-1.
        scale: factor on q.k.
        window: tokens that a query sees, itself included; None: no limit.
        detach_prefix: the repeated suffix passes no gradient to the prefix's keys and values.
        sinks: as in ``attend_reference``.
    """
    num_tokens = (q.shape[2] + prefix_len) // 2
    # such a window hides nothing, and would only cost a tensor of queries x keys
    if window is not None and window >= num_tokens:
        window = None
    dense = attend(
        q[:, :, :num_tokens],
        k[:, :, :num_tokens],
        v[:, :, :num_tokens],
        scale=scale,
        window=window,
        sinks=sinks,
    )
    prefix_keys = k[:, :, :prefix_len]
    prefix_values = v[:, :, :prefix_len]
    if detach_prefix:
        prefix_keys = prefix_keys.detach()
        prefix_values = prefix_values.detach()
    masked = attend(
        q[:, :, num_tokens:],
        # (batch, kv_heads, prefix + suffix, head_dim): causality counts from the end, so that each
        # repeated query sees the prefix and the repeated tokens up to itself
        torch.cat([prefix_keys, k[:, :, num_tokens:]], dim=2),
        torch.cat([prefix_values, v[:, :, num_tokens:]], dim=2),
        pad(keep, (0, num_tokens - prefix_len), value=1.0),
        scale=scale,
        window=window,
        sinks=sinks,
    )
    return torch.cat([dense, masked], dim=2)


def attend_ragged(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads new head_dim"],
    v: Float[Tensor, "batch kv_heads new value_dim"],
    slots: SlotsOfExample,
    rows: Int[Tensor, " batch"],
    mask: Bool[Tensor, "#batch queries new"] | None,
    *,
    scale: float,
    sinks: Float[Tensor, " heads"] | None = None,
) -> Float[Tensor, "batch heads queries value_dim"]:
    """Attention over each head's slots, which every query sees, and the tokens after them.

    All rows that continue the same example are computed together. Nothing is padded. For few
    queries, as in decoding, slots are not copied to be joined with the tokens.

    Args:
        q, k, v: queries, keys and values of the tokens after the slots, after rotation.
        slots: of an example.
        rows: the example that each row of the batch continues.
        mask: which of the tokens after the slots a query sees; None: causal.
        scale: factor on q.k.
        sinks: as in ``attend_reference``.
    """
    examples = rows.tolist()
    num_queries = len(q) * q.shape[2]
    is_few = num_queries * k.shape[1] <= _FEW_QUERIES
    attend_rows = _attend_few if is_few else _attend_many
    if len(set(examples)) == 1:  # no row is copied
        return attend_rows(q, k, v, *slots(examples[0]), mask, scale, sinks)
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=v.dtype, device=q.device)
    for example in sorted(set(examples)):
        batch_rows = (rows == example).nonzero().flatten()
        reach = mask if mask is None or len(mask) == 1 else mask[batch_rows]
        states = (q[batch_rows], k[batch_rows], v[batch_rows])
        out[batch_rows] = attend_rows(*states, *slots(example), reach, scale, sinks)
    return out


def _attend_few(
    q: Float[Tensor, "rows heads queries head_dim"],
    k: Float[Tensor, "rows kv_heads new head_dim"],
    v: Float[Tensor, "rows kv_heads new value_dim"],
    slots: Any,
    counts: list[int],
    mask: Bool[Tensor, "#rows queries new"] | None,
    scale: float,
    sinks: Float[Tensor, " heads"] | None,
) -> Float[Tensor, "rows heads queries value_dim"]:
    """``attend_ragged`` of rows that continue one example, all heads at once.

    Every query has a score for the slots of all heads, and that of other heads is -inf: products of
    a few queries cost less than separate operations for every head.
    """
    num_rows, _, num_queries, head_dim = q.shape
    num_kv_heads, num_new = k.shape[1:3]
    num_slots = len(slots)
    wide = torch.promote_types(q.dtype, torch.float32)  # a bfloat16 bias would lose 0.01 nats
    heads = torch.arange(num_kv_heads, device=q.device)
    owners = heads.repeat_interleave(torch.tensor(counts, device=q.device), output_size=num_slots)
    is_own = owners == heads[:, None, None]  # (kv_heads, 1, slots)
    bias = q.new_zeros(1, dtype=wide) if slots.log_bias is None else slots.log_bias.to(wide)
    if mask is None and num_queries > 1:
        mask = reachable(num_queries, num_new, device=q.device)[None]
    with torch.autocast(q.device.type, enabled=False):  # it would round the scores
        # (rows, kv_heads, group * queries, head_dim)
        queries = (q.to(wide) * scale).reshape(num_rows, num_kv_heads, -1, head_dim)
        scores = queries @ slots.keys.to(wide).T + torch.where(is_own, bias, -torch.inf)
        new_scores = queries @ k.to(wide).mT
        if mask is not None:
            by_query = new_scores.unflatten(2, (-1, num_queries))
            new_scores = by_query.masked_fill(~mask[:, None, None], -torch.inf).flatten(2, 3)
        joined = [scores, new_scores]
        if sinks is not None:
            # one more logit after the tokens, without a value
            logits = sinks.to(wide).repeat_interleave(num_queries).view(1, num_kv_heads, -1, 1)
            joined.append(logits.expand(num_rows, -1, -1, -1))
        weights = torch.cat(joined, dim=-1).softmax(-1)
        of_slots = weights[..., :num_slots] @ slots.values.to(wide)
        out = of_slots + weights[..., num_slots : num_slots + num_new] @ v.to(wide)
    return out.reshape(*q.shape[:-1], -1).to(v.dtype)


def _attend_many(
    q: Float[Tensor, "rows heads queries head_dim"],
    k: Float[Tensor, "rows kv_heads new head_dim"],
    v: Float[Tensor, "rows kv_heads new value_dim"],
    slots: Any,
    counts: list[int],
    mask: Bool[Tensor, "#rows queries new"] | None,
    scale: float,
    sinks: Float[Tensor, " heads"] | None,
) -> Float[Tensor, "rows heads queries value_dim"]:
    """``attend_ragged`` of rows that continue one example, on fused kernels."""
    num_rows = len(q)
    group = q.shape[1] // k.shape[1]
    starts = [0, *accumulate(counts)]
    outs = []
    # a loop in Python: one fused call for all heads would need slots padded to the fullest head
    for kv_head in range(k.shape[1]):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        before = slots.kept(slice(starts[kv_head], starts[kv_head + 1]))
        new_keys = k[:, kv_head : kv_head + 1]
        new_values = v[:, kv_head : kv_head + 1]
        keys = torch.cat([before.keys.to(k.dtype).expand(num_rows, 1, -1, -1), new_keys], dim=2)
        values = torch.cat(
            [before.values.to(v.dtype).expand(num_rows, 1, -1, -1), new_values], dim=2
        )
        log_bias = None if before.log_bias is None else before.log_bias.expand(1, 1, -1)
        reach = None if mask is None else pad(mask, (len(before), 0), value=True)
        of_head = None if sinks is None else sinks[heads]
        outs.append(
            attend(
                q[:, heads], keys, values, None, log_bias, reach=reach, scale=scale, sinks=of_head
            )
        )
    return torch.cat(outs, dim=1)


def _over_visible(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    keep: Float[Tensor, "batch keys"] | Bool[Tensor, "batch keys"] | None,
    log_bias: Float[Tensor, "#batch kv_heads slots"] | None,
    reach: Bool[Tensor, "#batch queries keys"] | None,
    scale: float,
    sinks: Float[Tensor, " heads"] | None,
) -> Float[Tensor, "batch heads queries value_dim"]:
    """``attend`` without a gradient to ``keep``; None for ``reach`` is causal."""
    is_kept = None if keep is None else keep.detach() > 0
    seen = None
    if reach is not None:
        seen = reach if is_kept is None else visible(is_kept, reach)
    alone: tuple[Tensor, Tensor] | None = None  # queries that see no slot, and what they get
    if seen is None and is_kept is not None:
        # (batch, 1, queries, 1): no kept key up to the position of the query
        sees_none = is_kept.cumsum(-1)[:, None, -q.shape[2] :, None] == 0
        alone = (sees_none, _at_own_position(q, k, v, scale, sinks))
    if sinks is not None:
        q, k, v = _with_finite_sinks(q, k, v, sinks, scale)
        seen = None if seen is None else pad(seen, (1, 0), value=True)
        is_kept = None if is_kept is None else pad(is_kept, (1, 0), value=True)
        log_bias = None if log_bias is None else pad(log_bias, (1, 0))
    if seen is not None:
        return _within_reach(q, k, v, seen.unsqueeze(1), log_bias, scale)
    bias = None
    if is_kept is not None:
        # a bias per key needs no tensor of queries x keys; a finite one, because -inf - -inf is NaN
        bias = torch.where(is_kept[:, None], q.new_zeros(k.shape[:3]), _lowest(k, scale))
    elif log_bias is not None:
        bias = _finite(log_bias, k, scale).expand(len(k), -1, -1)
    out = attend_biased(q, k, v, bias, scale=scale)
    return out if alone is None else torch.where(*alone, out)


def _at_own_position(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    scale: float,
    sinks: Float[Tensor, " heads"] | None,
) -> Float[Tensor, "batch heads queries value_dim"]:
    """Attention of queries of the last keys, each to the key at its position alone."""
    group = q.shape[1] // v.shape[1]
    values = v[:, :, -q.shape[2] :].repeat_interleave(group, dim=1)
    if sinks is None:
        return values
    keys = k[:, :, -q.shape[2] :].repeat_interleave(group, dim=1)
    scores = scale * (q * keys).sum(-1, keepdim=True)
    # softmax over two logits, the key's and the sink's: e^s / (e^s + e^sink)
    return values * (scores - sinks.view(-1, 1, 1)).sigmoid().to(values.dtype)


def _within_reach(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    seen: Bool[Tensor, "#batch 1 queries keys"],
    log_bias: Float[Tensor, "#batch kv_heads slots"] | None,
    scale: float,
) -> Float[Tensor, "batch heads queries value_dim"]:
    """Attention over the keys that each query sees."""
    if log_bias is None:
        zeros = torch.zeros(seen.shape, dtype=q.dtype, device=q.device)
        mask = zeros.masked_fill(~seen, -torch.inf)
        return fused_attention(q, k, v, mask, causal=False, scale=scale)
    wide = torch.promote_types(q.dtype, torch.float32)  # a bfloat16 bias would lose 0.01 nats
    bias = pad(log_bias.to(wide), (0, k.shape[2] - log_bias.shape[-1]))
    if q.shape[2] <= _BIAS_TENSOR_QUERIES and (q.device.type == "cpu" or q.dtype == wide):
        head_bias = bias.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        mask = torch.where(seen, head_bias.unsqueeze(2), -torch.inf)
        return fused_attention(q, k, v, mask, causal=False, scale=scale)
    bias = _finite(bias, k, scale).expand(len(k), -1, -1)
    return attend_extended(q, k, v, bias, seen, causal=False, scale=scale)


def _lowest(k: Tensor, scale: float) -> float:
    """The bias of a dropped slot, in nats."""
    # as a channel of the keys the bias is divided by the scale: the quotient has to fit the type
    return max(_DROPPED, 0.5 * scale * torch.finfo(k.dtype).min)


def _with_finite_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``with_sinks``, where a sink of -inf gets no attention."""
    return with_sinks(q, k, v, sinks.clamp(min=_lowest(k, scale)), scale)


def _finite(log_bias: Tensor, k: Tensor, scale: float) -> Tensor:
    """The log-bias without -inf, in at least float32."""
    wide = torch.promote_types(k.dtype, torch.float32)
    return log_bias.to(wide).clamp(min=_lowest(k, scale))
