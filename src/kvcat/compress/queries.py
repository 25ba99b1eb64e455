"""The queries to which Attention Matching is fitted, and the weight of each query's error.

A fit is exact where many queries attend, and approximate elsewhere, so the queries decide what a
compact cache is good for. There are two sources: text after the prefix, and the prefix itself,
whose queries are moved to where they would be if it were repeated; they represent later text that
attends to the prefix as the prefix does.

What a query gives to the fitted slots matters as much as it reaches them: its error is weighted by
their share of its attention. This file puts together the mass elsewhere (``QuerySet``): that of the
query's own text, of sinks, and of protected slots.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvcat.compress.prefix import Prefix
from kvcat.compress.query_set import QuerySet
from kvcat.compress.trace import Trace
from kvcat.types import Float, Tensor, at_least_float32


def usual_own_weight(trace: Trace) -> float:
    """The weight of the prefix's own queries where none is named.

    With a repetition of the document a larger weight is closer on later text, but loses right
    answers: what a model attends to when it copies is what answers need.
    """
    return 1.0 if trace.is_repeated else 2.0


@torch.no_grad()
def fitted_queries(prefix: Prefix, own_weight: float | None, *, by_share: bool) -> list[QuerySet]:
    """The supervising queries, and those of the prefix moved to positions after it.

    With supervision "self", the fit uses only the queries of the prefix. They are moved after it,
    or stay in place if they cannot be moved or own_weight is 0. Queries kept of earlier repetitions
    count like those of the last one.

    Args:
        prefix: what is compressed.
        own_weight: sum of the squared weights of the prefix's queries, relative to that of the
            supervising queries; None: ``usual_own_weight``.
        by_share: a query's error is weighted by the share of its attention that goes to the prefix;
            False: all queries count equally.
    """
    trace = prefix.trace
    if own_weight is None:
        own_weight = usual_own_weight(trace)
    moved = moved_sets(trace) if own_weight or trace.sources else []
    kept = [each for each in moved if each.log_mass and trace.is_repeated]
    of_prefix = moved[len(kept) :] if own_weight else []
    supervising = supervising_sets(trace, has_moved=bool(of_prefix))
    if supervising:
        # errors are weighted before they are squared
        total = torch.cat([each.weights for each in supervising]).square().sum()
        of_prefix = _weighing(of_prefix, own_weight * float(total))
    sets = [*supervising, *kept, *of_prefix]
    if by_share:
        sets = [_with_sinks(each, trace) for each in sets]
    else:
        sets = [replace(each, log_elsewhere=_no_mass(each.log_elsewhere)) for each in sets]
    return [_with_unfitted_keys(each, prefix, by_share=by_share) for each in sets]


def supervising_sets(trace: Trace, *, has_moved: bool) -> list[QuerySet]:
    """The queries at the supervising positions, which are not moved.

    The prefix supervises itself with the queries that are moved, if there are any.
    """
    is_self = trace.text.supervision == "self"
    if trace.sources:
        return [each for each in trace.sources if not each.is_own]
    if is_self and has_moved:
        return []
    positions = trace.prefix_positions
    if not is_self:
        positions = torch.arange(trace.text.supervision_start, trace.input_ids.shape[1])
    queries = QuerySet(
        states=trace.queries,
        positions=positions,
        weights=torch.ones(len(positions)),
        log_elsewhere=_no_mass([states[..., 0] for states in trace.queries]),
        is_causal=is_self,
    )
    return [queries]


def with_text(queries: QuerySet, trace: Trace) -> QuerySet:
    """Queries of the text after the prefix, with the mass of this text, as far as each sees it."""
    keys = [layer.suffix_keys for layer in trace.layers]
    last_seen = queries.positions - trace.prefix_len
    masses = queries.log_masses(trace.layer_numbers, trace.scales, keys, last_seen)
    return queries.with_elsewhere(masses)


def moved_sets(trace: Trace) -> list[QuerySet]:
    """The prefix's own queries, after those that were kept of tokens in a compact cache.

    Each of the latter represents as many tokens as are in the cache for every query kept. There are
    none at all if none were kept, or if they cannot be moved.
    """
    if trace.sources:
        return [each for each in trace.sources if each.is_own]
    kept = None if trace.past is None else trace.past.queries
    if trace.past_len and kept is None:
        return []
    moved = own_queries(trace)
    if moved is None:
        return []
    if kept is None or not len(kept):
        return [moved]
    weights = torch.full([len(kept)], (trace.past_len / len(kept)) ** 0.5)
    return [replace(kept, weights=weights, rotation=moved.rotation), moved]


def own_queries(trace: Trace) -> QuerySet | None:
    """The queries of each part of the prefix, as if the part were repeated right after the prefix.

    Of a compact cache's tokens there are no queries. The result is None if the model's keys cannot
    be moved to other positions.
    The last part comes first.
    """
    rotation = trace.rotation
    if rotation is None:
        return None
    prefix_len = trace.prefix_len
    part_len = trace.own_part_len
    positions = trace.own_positions
    rows = torch.isin(trace.prefix_positions, positions).nonzero().squeeze(1)
    part_numbers = (positions - prefix_len) // part_len  # -1 is the last part
    starts = (prefix_len + part_numbers * part_len).clamp_min(trace.past_len)
    order = part_numbers.argsort(descending=True, stable=True)
    moved = QuerySet(
        states=[layer.prefix_queries for layer in trace.layers],
        positions=positions[order],
        weights=torch.ones(len(order)),
        log_elsewhere=[],
        rows=rows[order],
        starts=starts[order],
        place=prefix_len,
        rotation=rotation,
    )
    return replace(moved, log_elsewhere=_masses_in_parts(trace, moved))


def _masses_in_parts(trace: Trace, moved: QuerySet) -> list[Float[Tensor, "batch heads queries"]]:
    """Per layer, the log of each query's attention mass on the keys of its part that it sees.

    A part that is moved as a whole attends to itself as it does in place, because a score depends
    on the distance of query and key alone.
    """
    num_new = trace.prefix_len - trace.past_len
    starts: Tensor = moved.starts  # type: ignore[assignment]
    masses: list[Tensor] = []
    for start in starts.unique().tolist():
        is_in_part = starts == start
        in_place = replace(moved.selected(is_in_part.nonzero().squeeze(1)), rotation=None)
        part_keys = slice(start - trace.past_len, start - trace.past_len + trace.own_part_len)
        keys = [layer.slots.keys[:, :, -num_new:][:, :, part_keys] for layer in trace.layers]
        of_part = in_place.log_masses(
            trace.layer_numbers, trace.scales, keys, in_place.positions - start
        )
        masses = masses or [mass.new_empty(*mass.shape[:2], len(moved)) for mass in of_part]
        for of_layer, mass in zip(masses, of_part, strict=True):
            of_layer[:, :, is_in_part] = mass
    return masses


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


def _with_unfitted_keys(queries: QuerySet, prefix: Prefix, *, by_share: bool) -> QuerySet:
    """The queries, where the mass elsewhere includes that on keys which are not fitted.

    These are the keys of the text after the prefix, for queries of this text (a trace's sources
    have their mass), and protected slots. Queries in place that see none of the slots that are
    fitted are left out.
    """
    trace = prefix.trace
    if by_share and not (trace.sources or queries.is_own or queries.is_causal):
        queries = with_text(queries, trace)
    if not prefix.protected:
        return queries
    last_seen = torch.full([len(queries)], prefix.num_protected - 1)
    if queries.is_causal:
        fewest = min(int(layer.present_counts().min()) for layer in prefix.layers)
        num_unseen = prefix.num_unprotected_after[queries.positions]
        sees_any = num_unseen < fewest
        queries = queries.selected(sees_any.nonzero().squeeze(1))
        # of all tokens up to the query, those that are not protected are no slots of these keys
        num_others = trace.prefix_len - prefix.num_protected - num_unseen[sees_any]
        last_seen = queries.positions - num_others
    keys = [layer.keys for layer in prefix.protected]
    masses = queries.log_masses(trace.layer_numbers, trace.scales, keys, last_seen)
    return queries.with_elsewhere(masses)


def _no_mass(
    like: Sequence[Float[Tensor, "batch heads queries"]],
) -> list[Float[Tensor, "batch heads queries"]]:
    """The log of a mass of 0 for every query: -inf."""
    return [torch.full_like(at_least_float32(states), -torch.inf) for states in like]
