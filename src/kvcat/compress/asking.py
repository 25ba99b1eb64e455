"""Which queries Attention Matching fits to, and how much each of them counts."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from kvcat.compress.common import wide
from kvcat.compress.freezing import frozen
from kvcat.compress.tracing import Trace
from kvcat.errors import InputError
from kvcat.models import capture
from kvcat.models.rotation import KeyRotation
from kvcat.types import Float, Int, Tensor

OWN_POSITIONS = 1024
_PARTS = 3
_LEAST = 1e-6
_CHUNK_ELEMENTS = 2**21

LayerKeys = Mapping[int, Float[Tensor, "batch kv_heads suffix head_dim"]]


class Asked(NamedTuple):
    """All queries to fit to.

    Args:
        trace: its queries are these.
        weights: by layer, what the error of each query is multiplied by; None: 1.
    """

    trace: Trace
    weights: dict[int, Float[Tensor, "batch heads queries"]] | None


@dataclass(frozen=True)
class OwnQueries:
    """Queries of a prefix's own positions as if their text stood right behind the prefix.

    Args:
        queries: per layer, after rotation at the positions they were moved to.
        shares: per layer, the part of their attention that goes to the prefix, the rest going to their own text.
    """

    queries: list[Float[Tensor, "batch heads positions head_dim"]]
    shares: list[Float[Tensor, "batch heads positions"]]


@torch.no_grad()
def own_queries(trace: Trace) -> OwnQueries | None:
    """Queries of the prefix moved behind it: what its later text may ask, as far as the prefix itself can tell.

    The prefix is cut into thirds (the first may be shorter), and each is put behind the whole prefix, its queries and
    keys being turned by the model's rotary embedding and otherwise as they were: a query at t of a third that begins at
    a asks from the position prefix_len + t - a. Of longer prefixes 1024 positions ask, evenly spaced.

    Args:
        trace: of the windows.

    Returns:
        None where there are no such queries: a compact cache stands for part of the prefix, or the model's positions
        cannot be turned.
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
    count = min(length, OWN_POSITIONS)
    positions = torch.arange(count) * length // count
    every = [q[:, :, positions] for q in trace.prefix_queries(0)]
    queries, shares = [], []
    for layer, asked in enumerate(every):
        moved, rests = [], []
        for (start, stop), rotation in zip(bounds, rotations, strict=True):
            rows = (positions >= start) & (positions < stop)
            own, keys = asked[:, :, rows], trace.keys[layer][:, :, start:stop]
            moved.append(rotation(own, layer))
            rests.append(log_mass(own, keys, trace.scales[layer], last=positions[rows] - start))
        queries.append(torch.cat(moved, 2))
        shares.append(_share(trace, layer, queries[-1], torch.cat(rests, 2)))
    return OwnQueries(queries, shares)


@torch.no_grad()
def suffix_keys(trace: Trace) -> dict[int, Float[Tensor, "batch kv_heads suffix head_dim"]]:
    """Per layer, the keys of the tokens after the prefix: one more forward of these over the dense prefix.

    Args:
        trace: with tokens after its prefix.
    """
    cache, new = trace.dense_cache(), trace.suffix_ids.shape[1]
    past = replace(cache, layers=[layer.padded() for layer in cache.layers]).to_transformers(trace.model)
    with frozen(trace.model):
        seen = capture(trace.model, trace.suffix_ids, query_start=new - 1, hidden_start=new - 1, past=past)
    return {layer: keys[:, :, keys.shape[2] - new :].clone() for layer, keys in enumerate(seen.keys)}


@torch.no_grad()
def ask(
    trace: Trace,
    own: OwnQueries | None,
    own_weight: float,
    *,
    by_share: bool,
    later_keys: LayerKeys | None = None,
) -> Asked:
    """The supervising queries and the prefix's own, with weights.

    By share, a query's error counts as much as it can change what the model computes: by the part of the query's
    attention that goes to the prefix and not to what stands behind it. (Where a trace joins the queries of several
    suffixes, these count alike: only one suffix is there to take attention.) Squared weights of the prefix's own
    queries are also multiplied by own_weight * supervising positions / own positions. A prefix that supervises itself
    asks its own queries alone, moved behind it, or in place where they cannot be moved.

    Args:
        trace: of the windows.
        own: of the prefix; None: none.
        own_weight: of these all together, relative to the supervising queries all together; larger than 0.
        by_share: weigh by share; otherwise equally.
        later_keys: keys of the tokens after the prefix, of the layers of which to ask; queries of others are of no use
            then. None: all layers, with the keys of the dense model.
    """
    if trace.supervision == "self" and own is not None:
        shares = own.shares if by_share else [torch.ones_like(share) for share in own.shares]
        return Asked(replace(trace, supervision="suffix", queries=own.queries, _memo={}), dict(enumerate(shares)))
    if trace.supervision == "self" or not (by_share or own):
        return Asked(trace, None)
    last = torch.arange(trace.supervision_start - trace.prefix_len, trace.suffix_ids.shape[1])
    single = trace.queries[0].shape[2] == len(last)
    if by_share and single and later_keys is None:
        later_keys = suffix_keys(trace)
    queries, weights = {}, {}
    for layer in later_keys or range(len(trace.keys)):
        asked = trace.queries[layer]
        queries[layer], parts = asked, [torch.ones_like(asked[..., 0])]
        if by_share and single and later_keys:
            rest = log_mass(asked, later_keys[layer], trace.scales[layer], last=last)
            parts = [_share(trace, layer, asked, rest)]
        if own is not None:
            moved = own.queries[layer]
            queries[layer] = torch.cat([asked, moved], 2)
            factor = (own_weight * asked.shape[2] / moved.shape[2]) ** 0.5
            parts.append(factor * (own.shares[layer] if by_share else torch.ones_like(moved[..., 0])))
        weights[layer] = torch.cat(parts, 2)
    # layers that do not ask lend nothing but their place
    some = next(iter(queries.values()))
    every = [queries.get(layer, some) for layer in range(len(trace.queries))]
    return Asked(replace(trace, queries=every, _memo={}), weights)


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
