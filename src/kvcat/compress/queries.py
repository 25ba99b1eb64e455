"""Which queries Attention Matching fits to, and how much each of them counts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvcat.compress.base import wide
from kvcat.compress.trace import Trace, sampled_positions
from kvcat.errors import InputError
from kvcat.models.rotation import KeyRotation
from kvcat.types import Float, Int, Tensor

_PARTS = 3
_CHUNK_ELEMENTS = 2**21


@dataclass(frozen=True)
class FittedQueries:
    """Per layer, the queries to fit to, and what the error of each query is multiplied by.

    That is factor * share, the share of the query's attention that goes to the prefix and not to what stands behind it:
    m / (m + exp(log_rest)), m the mass of the prefix.

    Args:
        queries: after rotation.
        factors: of the queries.
        log_rest: mass of the keys behind the prefix that each query sees, nats; -inf where all count equally.
        causal: the queries are the prefix's own at their own positions, and see no later key.
    """

    queries: Sequence[Float[Tensor, "batch heads queries head_dim"]]
    factors: Sequence[Float[Tensor, "batch heads queries"]]
    log_rest: Sequence[Float[Tensor, "batch heads queries"]]
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
        found = own or FittedQueries(trace.queries, _filled(trace.queries, 1.0), _none(trace.queries), causal=True)
        return found if by_share else replace(found, log_rest=_none(found.queries))
    last = torch.arange(trace.supervision_start - trace.prefix_len, trace.suffix_ids.shape[1])
    found = FittedQueries(trace.queries, _filled(trace.queries, 1.0), _none(trace.queries))
    if by_share and trace.queries[0].shape[2] == len(last):
        parts = zip(trace.queries, trace.suffix_keys, trace.scales, strict=True)
        found = replace(found, log_rest=[log_mass(q, keys, scale, last=last) for q, keys, scale in parts])
    if own is None:
        return found
    factor = (own_weight * found.queries[0].shape[2] / own.queries[0].shape[2]) ** 0.5
    own = FittedQueries(own.queries, _filled(own.queries, factor), own.log_rest if by_share else _none(own.queries))
    return FittedQueries(
        _joined(found.queries, own.queries), _joined(found.factors, own.factors), _joined(found.log_rest, own.log_rest)
    )


def _own_queries(trace: Trace) -> FittedQueries | None:
    """Queries of the prefix moved behind it, as if its text were repeated there.

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
        rotation = KeyRotation(trace.model, part)
    except InputError:
        return None
    positions = sampled_positions(length)
    kept = torch.isin(trace.prefix_positions, positions)
    queries, rest = [], []
    for layer, every in enumerate(trace.prefix_queries):
        sampled, moved, rests = every[:, :, kept], [], []
        for start, stop in bounds:
            rows = (positions >= start) & (positions < stop)
            own, keys = sampled[:, :, rows], trace.keys[layer][:, :, start:stop]
            moved.append(rotation.by(length - start)(own, layer))
            rests.append(log_mass(own, keys, trace.scales[layer], last=positions[rows] - start))
        queries.append(torch.cat(moved, 2))
        rest.append(torch.cat(rests, 2))
    return FittedQueries(queries, _filled(queries, 1.0), rest)


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


def _filled(queries: Sequence[Tensor], value: float) -> list[Tensor]:
    """A number for every query."""
    return [torch.full_like(wide(own[..., 0]), value) for own in queries]


def _none(queries: Sequence[Tensor]) -> list[Tensor]:
    """No mass behind the prefix."""
    return _filled(queries, -torch.inf)


def _joined(first: Sequence[Tensor], second: Sequence[Tensor]) -> list[Tensor]:
    """Per layer, the queries of both."""
    return [torch.cat(pair, 2) for pair in zip(first, second, strict=True)]
