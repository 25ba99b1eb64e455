"""Which queries Attention Matching fits to, and how much each of them counts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvcat.compress.base import wide
from kvcat.compress.trace import Trace, sampled_positions
from kvcat.errors import InputError
from kvcat.models.rotation import KeyRotation
from kvcat.types import Float, Int, Tensor

_PARTS = 3
_LEAST = 1e-6
_CHUNK_ELEMENTS = 2**21


@dataclass(frozen=True)
class FittedQueries:
    """Per layer, the queries to fit to.

    Args:
        queries: after rotation.
        weights: what the error of each query is multiplied by; 1 where all count equally.
        causal: the queries are the prefix's own at their own positions, and see no later key.
    """

    queries: Sequence[Float[Tensor, "batch heads queries head_dim"]]
    weights: Sequence[Float[Tensor, "batch heads queries"]]
    causal: bool = False


@torch.no_grad()
def fitted_queries(trace: Trace, own_weight: float, *, by_share: bool) -> FittedQueries:
    """The supervising queries and, moved behind the prefix, the prefix's own.

    By share, a query's error counts as much as it can change what the model computes: by the part of the query's
    attention that goes to the prefix and not to what stands behind it. (Where a trace joins the queries of several
    suffixes, these count alike.) Squared weights of the prefix's own queries are also multiplied by
    own_weight * supervising positions / own positions. A prefix that supervises itself is fitted to its own queries
    alone, moved behind it, or in place where they cannot be moved or own_weight is 0.

    Args:
        trace: of the windows.
        own_weight: of the prefix's own queries all together, relative to the supervising ones all together, at least 0.
        by_share: weigh by share; otherwise equally.
    """
    own = _own_queries(trace) if own_weight else None
    if trace.supervision == "self":
        if own is None:
            return FittedQueries(trace.queries, [torch.ones_like(q[..., 0]) for q in trace.queries], causal=True)
        shares = own.weights if by_share else [torch.ones_like(share) for share in own.weights]
        return FittedQueries(own.queries, shares)
    last = torch.arange(trace.supervision_start - trace.prefix_len, trace.suffix_ids.shape[1])
    queries, weights = [], []
    for layer, supervising in enumerate(trace.queries):
        own_weights = torch.ones_like(supervising[..., 0])
        if by_share and supervising.shape[2] == len(last):
            rest = log_mass(supervising, trace.suffix_keys[layer], trace.scales[layer], last=last)
            own_weights = _share(trace, layer, supervising, rest)
        parts = [(supervising, own_weights)]
        if own is not None:
            moved, share = own.queries[layer], own.weights[layer]
            factor = (own_weight * supervising.shape[2] / moved.shape[2]) ** 0.5
            parts.append((moved, factor * (share if by_share else torch.ones_like(share))))
        queries.append(torch.cat([part for part, _ in parts], 2))
        weights.append(torch.cat([part for _, part in parts], 2))
    return FittedQueries(queries, weights)


def _own_queries(trace: Trace) -> FittedQueries | None:
    """Queries of the prefix moved behind it, as if its text were repeated there; weights: their shares.

    The prefix is cut into thirds (the first may be shorter), and each is put behind the whole prefix, its queries and
    keys turned by the model's rotary embedding and otherwise as they were: the query at t of a third that begins at a
    moves to prefix_len + t - a. None where a compact cache stands for part of the prefix, or where the model's
    positions cannot be turned.
    """
    length = trace.prefix_len
    if trace.past_len:
        return None
    part = -(-length // _PARTS)
    bounds = [(max(0, stop - part), stop) for stop in range(length, 0, -part)]
    try:
        rotations = [KeyRotation(trace.model, length - start) for start, _ in bounds]
    except InputError:
        return None
    positions = sampled_positions(length)
    kept = torch.isin(trace.prefix_positions, positions)
    queries, shares = [], []
    for layer, every in enumerate(trace.prefix_queries):
        sampled, moved, rests = every[:, :, kept], [], []
        for (start, stop), rotation in zip(bounds, rotations, strict=True):
            rows = (positions >= start) & (positions < stop)
            own, keys = sampled[:, :, rows], trace.keys[layer][:, :, start:stop]
            moved.append(rotation(own, layer))
            rests.append(log_mass(own, keys, trace.scales[layer], last=positions[rows] - start))
        queries.append(torch.cat(moved, 2))
        shares.append(_share(trace, layer, queries[-1], torch.cat(rests, 2)))
    return FittedQueries(queries, shares)


def log_mass(
    queries: Float[Tensor, "batch heads queries head_dim"],
    keys: Float[Tensor, "batch kv_heads keys head_dim"],
    scale: float,
    *,
    last: Int[Tensor, " queries"] | None = None,
    log_bias: Float[Tensor, "batch kv_heads keys"] | None = None,
) -> Float[Tensor, "batch heads queries"]:
    """Mass of keys: log sum_j exp(scale q.k_j + log_bias_j) over those that a query sees, nats, in chunks of queries.

    Args:
        queries: after rotation.
        keys: after rotation; their heads are shared by groups of the queries'.
        scale: factor on q.k.
        last: index of the last key that each query sees; None: it sees all.
        log_bias: nats added to the scores; None: none.
    """
    batch, heads = queries.shape[:2]
    step = max(1, _CHUNK_ELEMENTS // (batch * heads * keys.shape[2]))
    turned, at, found = wide(keys).mT.unsqueeze(2), torch.arange(keys.shape[2], device=keys.device), []
    for start in range(0, queries.shape[2], step):
        rows = slice(start, start + step)
        scores = wide(queries[:, :, rows]).unflatten(1, (keys.shape[1], -1)) @ turned
        scores *= scale
        if log_bias is not None:
            scores += log_bias[:, :, None, None]
        if last is not None:
            scores.masked_fill_(at > last[rows, None].to(at.device), -torch.inf)
        found.append(scores.logsumexp(-1).flatten(1, 2))
    return torch.cat(found, 2)


def _share(trace: Trace, layer: int, queries: Tensor, rest: Tensor) -> Float[Tensor, "batch heads queries"]:
    """The part of the queries' attention that goes to the prefix; a millionth at least, so that none is empty."""
    bias = None if trace.log_bias is None else trace.log_bias[layer]
    whole = log_mass(queries, trace.keys[layer], trace.scales[layer], log_bias=bias)
    return (whole - rest).sigmoid().clamp_min(_LEAST)
