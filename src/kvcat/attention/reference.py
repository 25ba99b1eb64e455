"""Attention over visible slots, slow and obviously right: the oracle of every fast path.

Nothing here saves time or memory. Every function makes whole (queries, keys) matrices.
"""

import torch

from kvcat.types import Bool, Float, Tensor


def reachable(
    num_queries: int,
    num_keys: int,
    *,
    causal: bool = True,
    window: int | None = None,
    device: torch.device | None = None,
) -> Bool[Tensor, "queries keys"]:
    """True where query i, at key index t = num_keys - num_queries + i, may look at key j.

    Causal: j <= t. With a window, the tokens that a query sees, itself included: t - window < j as
    well. Not causal: everywhere, and no window.
    """
    if num_queries > num_keys:
        raise ValueError(f"{num_queries} queries cannot be the last positions of {num_keys} keys")
    if window is not None and (window < 1 or not causal):
        values = f"window={window}, causal={causal}"
        raise ValueError(f"window must be at least 1 and causal, got {values}")
    if not causal:
        return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    t = torch.arange(num_keys - num_queries, num_keys, device=device).unsqueeze(1)
    j = torch.arange(num_keys, device=device).unsqueeze(0)
    if window is None:
        return j <= t
    return (j <= t) & (j > t - window)


def visible(
    keep: Float[Tensor, "#batch keys"] | Bool[Tensor, "#batch keys"],
    reach: Bool[Tensor, "#batch queries keys"] | Bool[Tensor, "queries keys"],
) -> Bool[Tensor, "#batch queries keys"]:
    """True where a query sees a slot: {j reachable : keep_j = 1}, or itself if that is empty."""
    num_queries, num_keys = reach.shape[-2:]
    every_key = torch.eye(num_keys, dtype=torch.bool, device=keep.device)
    itself = every_key[num_keys - num_queries :]  # (queries, keys)
    seen = reach & (keep > 0)[:, None, :]
    return seen | (itself & ~seen.any(-1, keepdim=True))


def attend_reference(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    keep: Float[Tensor, "batch keys"] | Bool[Tensor, "batch keys"] | None = None,
    log_bias: Float[Tensor, "batch kv_heads keys"] | None = None,
    causal: bool = True,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
) -> Float[Tensor, "batch heads queries value_dim"]:
    """Attention of the last positions over the visible slots.

    o_t = sum_{j in A_t} e^{s_tj} v_j / (e^sink + sum_{j in A_t} e^{s_tj}) with s_tj = scale q_t.k_j
    + log_bias_j and A_t the kept slots that t may look at; without sinks e^sink is 0. A query that
    sees nothing sees itself. Position 0 is nothing special here.

    Args:
        q: queries, the last ``queries`` of the ``keys`` positions; heads is a multiple of kv_heads.
        k, v: keys, after rotation, and values.
        keep: 1 for kept slots, 0 for dropped ones; None keeps all. It gets no gradient here.
        log_bias: nats added to the scores of each slot; None adds none.
        causal: whether later positions are hidden.
        scale: factor on q.k; None is head_dim ** -0.5.
        window: tokens that a query sees, itself included; None is no limit.
        sinks: per query head, the logit of a further slot without value that every query sees,
            nats; None: there is none.

    References: KV-CAT, appendix "Masked attention forward pass".
    """
    scores = _scores(q, k, log_bias, scale)
    reach = reachable(q.shape[2], k.shape[2], causal=causal, window=window, device=q.device)
    seen = reach[None] if keep is None else visible(keep, reach)
    logits = scores.masked_fill(~seen[:, None], -torch.inf)
    if sinks is not None:
        sink_logits = sinks.to(logits)[None, :, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, sink_logits], dim=-1)
    weights = logits.softmax(-1)[..., : k.shape[2]]
    return weights @ _per_query_head(v, q.shape[1])


def _per_query_head(
    x: Float[Tensor, "b kv_heads keys channels"], num_heads: int
) -> Float[Tensor, "b heads keys channels"]:
    return x.repeat_interleave(num_heads // x.shape[1], dim=1)


def _scores(q: Tensor, k: Tensor, log_bias: Tensor | None, scale: float | None) -> Tensor:
    num_heads = q.shape[1]
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    scores = factor * (q @ _per_query_head(k, num_heads).mT)  # (batch, heads, queries, keys)
    if log_bias is None:
        return scores
    return scores + _per_query_head(log_bias.unsqueeze(-1), num_heads).mT
