"""The queries to which Attention Matching is fitted, and the weight of each query's error."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvcat.attention.mass import log_mass
from kvcat.compress.prefix import Prefix
from kvcat.compress.query_set import QuerySet
from kvcat.compress.trace import Trace, sampled_positions
from kvcat.errors import InputError
from kvcat.models.rotation import KeyRotation
from kvcat.types import Float, Int, Tensor, at_least_float32

_LEAST_PARTS = 3


def usual_own_weight(trace: Trace) -> float:
    """The weight of the prefix's own queries where none is named.

    With a repetition of the document a larger weight is closer on later text, but loses right
    answers: what a model attends to when it copies is what answers need.
    """
    return 1.0 if trace.text.supervision == "reconstruction" else 2.0


@torch.no_grad()
def fitted_queries(
    prefix: Prefix,
    own_weight: float | None,
    *,
    by_share: bool,
    part_tokens: int = 256,
    fitted_per_token: float = 1.5,
) -> list[QuerySet]:
    """The supervising queries, and those of the prefix moved to positions after it.

    With supervision "self", the fit uses only the queries of the prefix. They are moved after it,
    or stay in place if they cannot be moved or own_weight is 0.

    Args:
        prefix: what is compressed.
        own_weight: sum of the squared weights of the prefix's queries, relative to that of the
            supervising queries; None: ``usual_own_weight``.
        by_share: a query's error is weighted by the share of its attention that goes to the prefix;
            False: all queries count equally.
        part_tokens: largest number of tokens in a part of the prefix that is repeated after it.
        fitted_per_token: number of the prefix's queries per token to which log-bias and values are
            fitted. If there are at least twice as many, they are thinned evenly, to between one and
            two times this number.
    """
    trace = prefix.trace
    if own_weight is None:
        own_weight = usual_own_weight(trace)
    is_self = trace.text.supervision == "self"
    if trace.sources:
        supervising = [each for each in trace.sources if not each.is_own]
        moved = [each for each in trace.sources if each.is_own] if own_weight else []
    else:
        moved = _moved_sets(trace, part_tokens, fitted_per_token) if own_weight else []
        supervising = [] if moved and is_self else [supervising_queries(trace)]
    if supervising:
        total = torch.cat([each.weights for each in supervising]).square().sum()
        moved = _weighing(moved, own_weight * float(total))
    sets = [*supervising, *moved]
    if by_share:
        sets = [_with_sinks(each, trace) for each in sets]
    else:
        sets = [replace(each, log_elsewhere=_no_mass(each.log_elsewhere)) for each in sets]
    return [_with_protected_mass(each, prefix) for each in sets] if prefix.protected else sets


def supervising_queries(trace: Trace) -> QuerySet:
    """The queries at the supervising positions, which are not moved."""
    is_self = trace.text.supervision == "self"
    if is_self:
        positions = trace.prefix_positions
        log_elsewhere = _no_mass([queries[..., 0] for queries in trace.queries])
    else:
        positions = torch.arange(trace.text.supervision_start, trace.input_ids.shape[1])
        last_seen = positions - trace.prefix_len
        log_elsewhere = [
            log_mass(layer.queries, layer.suffix_keys, layer.scale, last_seen)
            for layer in trace.layers
        ]
    return QuerySet(
        states=trace.queries,
        positions=positions,
        weights=torch.ones(len(positions)),
        log_elsewhere=log_elsewhere,
        num_fitted=len(positions),
        is_causal=is_self,
    )


def own_queries(
    trace: Trace,
    part_tokens: int,
    fitted_per_token: float,
    positions: Int[Tensor, " sampled"] | None = None,
) -> QuerySet | None:
    """The queries of each part of the prefix, as if the part were repeated right after the prefix.

    A part is a third of the prefix, but at most ``part_tokens``. Of a compact cache's tokens there
    are no queries. The result is None if the model's keys cannot be moved to other positions.

    The last part comes first. All positions select keys. If query heads share a KV head, log-bias
    and values are fitted only to evenly spaced positions, of which at least ``fitted_per_token``
    queries per token of the prefix remain.

    Args:
        trace: of the prefix.
        part_tokens, fitted_per_token: as in ``fitted_queries``.
        positions: of the queries, kept in the trace; None: at most 4,096 evenly spaced ones.
    """
    prefix_len = trace.prefix_len
    part_len = min(-(-prefix_len // _LEAST_PARTS), part_tokens)
    try:
        rotation = KeyRotation(trace.model, part_len)
    except InputError:
        return None
    if positions is None:
        positions = trace.past_len + sampled_positions(prefix_len - trace.past_len)
    rows = torch.isin(trace.prefix_positions, positions).nonzero().squeeze(1)
    part_numbers = (positions - prefix_len) // part_len  # -1 is the last part
    starts = (prefix_len + part_numbers * part_len).clamp_min(trace.past_len)
    last_part_first = part_numbers.argsort(descending=True, stable=True)

    first = trace.layers[0]
    query_heads = first.prefix_queries.shape[1] // first.slots.keys.shape[1]
    num_queries = query_heads * len(positions)
    stride = max(1, int(num_queries / (fitted_per_token * prefix_len)))
    places = torch.arange(len(positions))
    is_fitted = places % stride == 0
    order = last_part_first[torch.cat([places[is_fitted], places[~is_fitted]])]
    moved = QuerySet(
        states=[layer.prefix_queries for layer in trace.layers],
        positions=positions[order],
        weights=torch.ones(len(order)),
        log_elsewhere=[],
        num_fitted=int(is_fitted.sum()),
        boost=stride**0.5,
        rows=rows[order],
        starts=starts[order],
        place=prefix_len,
        rotation=rotation,
    )
    return replace(moved, log_elsewhere=_mass_of_parts(trace, moved, part_len))


def _moved_sets(trace: Trace, part_tokens: int, fitted_per_token: float) -> list[QuerySet]:
    """The prefix's own queries, after those that were kept of tokens in a compact cache.

    Each of the latter represents as many tokens as are in the cache for every query kept. There are
    none at all if none were kept, or if they cannot be moved.
    """
    kept = None if trace.past is None else trace.past.queries
    if trace.past is not None and kept is None:
        return []
    moved = own_queries(trace, part_tokens, fitted_per_token)
    if moved is None:
        return []
    if kept is None or not len(kept):
        return [moved]
    weights = torch.full([len(kept)], (trace.past_len / len(kept)) ** 0.5)
    return [replace(kept, weights=weights, rotation=moved.rotation), moved]


def _weighing(sets: Sequence[QuerySet], total: float) -> list[QuerySet]:
    """The sets with weights whose squares sum to a total."""
    if not sets:
        return []
    factor = (total / torch.cat([each.weights for each in sets]).square().sum()) ** 0.5
    return [replace(each, weights=factor * each.weights) for each in sets]


def _with_sinks(queries: QuerySet, trace: Trace) -> QuerySet:
    """The queries, where the mass elsewhere includes that of the sink of each head."""
    masses = []
    for elsewhere, sinks in zip(queries.log_elsewhere, trace.sinks, strict=True):
        if sinks is not None:
            elsewhere = torch.logaddexp(elsewhere, sinks.to(elsewhere).unsqueeze(-1))
        masses.append(elsewhere)
    return replace(queries, log_elsewhere=masses)


def _with_protected_mass(queries: QuerySet, prefix: Prefix) -> QuerySet:
    """The queries for a fit of the slots that are not protected.

    Queries in place that see none of these are left out.
    """
    trace = prefix.trace
    last_seen = torch.full([len(queries)], prefix.num_protected - 1)
    if queries.is_causal:
        fewest = min(int(layer.present_counts().min()) for layer in prefix.layers)
        num_unseen = prefix.num_unprotected_after(queries.positions)
        sees_any = num_unseen < fewest
        queries = queries.selected(sees_any.nonzero().squeeze(1))
        # of all tokens up to the query, those that are not protected are no slots of these keys
        num_others = trace.prefix_len - prefix.num_protected - num_unseen[sees_any]
        last_seen = queries.positions - num_others
    masses = []
    for index, layer in enumerate(trace.layers):
        states = queries.of_layer(index, layer.number)
        keys = prefix.protected[index].keys
        mass = log_mass(states, keys, layer.scale, last_seen.clamp_min(0))
        mass[..., last_seen < 0] = -torch.inf
        masses.append(torch.logaddexp(queries.log_elsewhere[index], mass))
    return replace(queries, log_elsewhere=masses)


@dataclass(frozen=True)
class PartQueries:
    """The queries to which the slots of each part of a prefix are fitted.

    These are all queries whose text is the part's. Of the others, evenly spaced ones among those
    that are fitted to are used, each with the weight of those that it represents. The other parts'
    slots are like text after the prefix: their mass is elsewhere.

    Args:
        queries: to which the whole prefix is fitted.
        of_prefix: for each of them, per layer, the log of its attention mass on the whole prefix.
        stride: every how many of the other parts' queries one is used.
    """

    queries: Sequence[QuerySet]
    of_prefix: Sequence[Sequence[Float[Tensor, "batch _ _"]]]
    stride: int

    @classmethod
    def of(
        cls, prefix: Prefix, num_parts: int, queries: Sequence[QuerySet], *, sampled: float
    ) -> "PartQueries":
        """The queries for a number of parts.

        Args:
            prefix: what is compressed.
            num_parts: of the prefix.
            queries: of ``fitted_queries``.
            sampled: number of the others' queries, relative to those of the part.
        """
        if num_parts == 1:
            return cls(queries, [], 0)
        stride = max(1, round((num_parts - 1) / sampled))
        return cls(queries, [_mass_on(prefix, each) for each in queries], stride)

    def part(self, segment: Prefix) -> list[QuerySet]:
        """The queries for a part of ``Prefix.parts``."""
        if segment.tokens is None:
            return list(self.queries)
        start, stop = segment.tokens
        chosen: list[QuerySet] = []
        for each, masses in zip(self.queries, self.of_prefix, strict=True):
            positions = each.positions if each.repeated is None else each.repeated
            is_inside = (positions >= start) & (positions < stop)
            numbers = torch.arange(len(each))
            is_sampled = (numbers % self.stride == 0) & (numbers < each.num_fitted)
            rows = (is_inside | is_sampled).nonzero().squeeze(1)
            if not len(rows):
                continue
            some = each.selected(rows)
            weights = torch.where(is_inside[rows], 1.0, self.stride**0.5) * some.weights
            of_rows = [mass.index_select(2, rows.to(mass.device)) for mass in masses]
            chosen.append(_with_other_parts(segment, replace(some, weights=weights), of_rows))
        return chosen


def _mass_on(prefix: Prefix, queries: QuerySet) -> list[Float[Tensor, "batch heads queries"]]:
    """Per layer, the log of each query's attention mass on all slots of a prefix."""
    masses = []
    for index, layer in enumerate(prefix.trace.layers):
        keys = prefix.layers[index].keys
        last_seen = torch.full([len(queries)], keys.shape[2] - 1)
        states = queries.of_layer(index, layer.number)
        masses.append(log_mass(states, keys, layer.scale, last_seen))
    return masses


def _with_other_parts(
    segment: Prefix, queries: QuerySet, of_text: Sequence[Float[Tensor, "batch heads queries"]]
) -> QuerySet:
    """The queries for a fit of one part's slots.

    Args:
        segment: part of the prefix.
        queries: for a fit of the whole prefix.
        of_text: per layer, the log of each query's mass on the whole prefix.
    """
    masses = []
    of_layers = zip(queries.log_elsewhere, of_text, _mass_on(segment, queries), strict=True)
    for elsewhere, of_prefix, of_part in of_layers:
        share = (of_part - of_prefix).clamp_max(-1e-6)  # rounding makes it larger than all
        of_others = of_prefix + torch.log1p(-share.exp())
        masses.append(torch.logaddexp(elsewhere, of_others))
    return replace(queries, log_elsewhere=masses)


def _mass_of_parts(
    trace: Trace, moved: QuerySet, part_len: int
) -> list[Float[Tensor, "batch heads queries"]]:
    """Per layer, the log of each query's attention mass on the keys of its part that it sees."""
    num_new = trace.prefix_len - trace.past_len
    rows: Tensor = moved.rows  # type: ignore[assignment]
    starts: Tensor = moved.starts  # type: ignore[assignment]
    of_layers = []
    for layer in trace.layers:
        queries = layer.prefix_queries
        keys = layer.slots.keys[:, :, -num_new:]
        masses = at_least_float32(queries.new_empty(*queries.shape[:2], len(moved)))
        for start in starts.unique().tolist():
            is_in_part = starts == start
            first_key = start - trace.past_len
            part_keys = keys[:, :, first_key : first_key + part_len]
            part_queries = queries.index_select(2, rows[is_in_part].to(queries.device))
            last_seen = moved.positions[is_in_part] - start
            masses[:, :, is_in_part] = log_mass(part_queries, part_keys, layer.scale, last_seen)
        of_layers.append(masses)
    return of_layers


def _no_mass(
    like: Sequence[Float[Tensor, "batch heads queries"]],
) -> list[Float[Tensor, "batch heads queries"]]:
    """The log of a mass of 0 for every query: -inf."""
    return [torch.full_like(at_least_float32(states), -torch.inf) for states in like]
