"""Attention mass: how much each key receives, and how much each query gives to some keys."""

import torch

from kvcat.attention.chunks import exp_below, score_chunks
from kvcat.attention.kernels import log_mass_on_cpu
from kvcat.memory import rows_per_chunk
from kvcat.types import Float, Int, Tensor, at_least_float32

_LOG_ROWS = 64  # products of few rows skip more of the later keys


def attention_mass(
    queries: Float[Tensor, "batch heads queries head_dim"],
    keys: Float[Tensor, "batch kv_heads keys head_dim"],
    *,
    scale: float,
    window: int | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
    cpu_elements: int = 2**22,
) -> Float[Tensor, "batch kv_heads keys"]:
    """Causal attention that each slot receives from the queries of its KV head.

    For slot j this is the sum over the queries of softmax_j(scale q.k_j), where a sink is one more
    logit of the softmax. The queries are those of the last keys. The masses of a sequence sum to
    heads * queries, and to less with sinks.

    Args:
        queries, keys: after rotation.
        scale: factor on q.k.
        window: keys that a query sees, itself included; None: all up to itself.
        sinks: of each query head, nats; None: there are none.
        cpu_elements: most weights that exist at once on a CPU, if one query has no more.
    """
    batch, heads, num_queries, _ = queries.shape
    kv_heads, num_keys = keys.shape[1:3]
    grouped = at_least_float32(queries).unflatten(1, (kv_heads, -1))
    keys = at_least_float32(keys)
    mass = keys.new_zeros(batch, kv_heads, num_keys)
    row_elements = batch * heads * num_keys
    rows_at_once = rows_per_chunk(row_elements, keys.device, cpu_elements=cpu_elements)
    last_seen = torch.arange(num_keys - num_queries, num_keys)
    # autocast would round the products to 16 bits again
    with torch.autocast(keys.device.type, enabled=False):
        for _, scores in score_chunks(grouped, keys, scale, last_seen, rows_at_once, window=window):
            weights = scores.softmax(-1)
            if sinks is not None:
                # (kv_heads, query heads of each, 1): the share of the keys in each query's mass
                logits = sinks.to(scores).view(kv_heads, -1, 1)
                weights *= (scores.logsumexp(-1) - logits).sigmoid().unsqueeze(-1)
            mass[..., : scores.shape[-1]] += weights.sum((2, 3))
    return mass


def log_mass(
    queries: Float[Tensor, "batch heads queries head_dim"],
    keys: Float[Tensor, "batch kv_heads keys head_dim"],
    scale: float,
    last_seen: Int[Tensor, " queries"],
    *,
    cpu_elements: int = 2**21,
) -> Float[Tensor, "batch heads queries"]:
    """Mass of keys: log sum_j exp(scale q.k_j) over the keys that each query sees, nats.

    On a CPU a fused kernel computes it where all queries see all keys, or where they are those of
    the last keys and see no later ones: in a third of the time.

    Args:
        queries, keys: after rotation.
        scale: factor on q.k.
        last_seen: index of the last key that each query sees.
        cpu_elements: most scores that exist at once on a CPU, if one query has no more.
    """
    batch, heads, num_queries, _ = queries.shape
    kv_heads, num_keys = keys.shape[1:3]
    grouped = at_least_float32(queries).unflatten(1, (kv_heads, -1))
    keys = at_least_float32(keys)
    if keys.device.type == "cpu" and num_keys:
        sees_all = bool((last_seen == num_keys - 1).all())
        own_keys = torch.arange(num_keys - num_queries, num_keys)
        if sees_all or torch.equal(last_seen.cpu(), own_keys):
            return log_mass_on_cpu(
                at_least_float32(queries), keys, causal=not sees_all, scale=scale
            )
    masses = keys.new_empty(batch, kv_heads, heads // kv_heads, num_queries)
    row_elements = batch * heads * num_keys
    rows_at_once = rows_per_chunk(row_elements, keys.device, cpu_elements=cpu_elements)
    rows_at_once = min(_LOG_ROWS, rows_at_once)
    for rows, scores in score_chunks(grouped, keys, scale, last_seen, rows_at_once):
        # log-sum-exp by hand: exp_below overwrites the scores, and logsumexp would copy them
        largest = scores.amax(-1, keepdim=True)
        sums = exp_below(largest, scores).sum(-1)
        masses[..., rows] = sums.log_() + largest.squeeze(-1)
    return masses.flatten(1, 2)
