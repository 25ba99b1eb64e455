"""A sample of the queries of what is compressed, and what they attended to, for later fits.

A kept query is moved to a fixed place ahead of the text, not behind the last token like the others:
its attention to a text is then the same in every compression, so that what it attended to while the
text was exact stays what the fit is to reproduce.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from kvcat.compress.attended import Attended
from kvcat.compress.prefix import Prefix
from kvcat.compress.queries import moved_queries, past_queries
from kvcat.compress.rows import Rows
from kvcat.compress.trace import Past, PastQueries, Trace
from kvcat.models.rotation import KeyRotation
from kvcat.types import Float, Int, Tensor, at_least_float32

_GOLDEN = (math.sqrt(5) - 1) / 2
PLACES = 512
"""Kept queries are moved to the next multiple of this many tokens.

A smaller number moves them more often, each time with an error; with a larger one they are further
from the text than the queries that will come.
"""


def keep_queries(
    trace: Trace, count: int, part_tokens: int = 256, places: int = PLACES
) -> PastQueries | None:
    """A sample of the queries of a trace's prefix, for later fits; None if they cannot be moved.

    Of all tokens of the prefix, whenever they were compressed, equally many are kept: those whose
    position times the golden ratio has the smallest fractional part, which are evenly spaced.

    Args:
        trace: of a prefix, before its compression, with all its queries after the compact cache;
            those kept before are placed (``placed_ahead``).
        count: largest number of tokens whose queries are kept, at least 0.
        part_tokens: as in ``fitted_queries``.
        places: tokens between the places of kept queries.

    Raises:
        ValueError: kept queries of an earlier place.
    """
    without = replace(trace, past=Past(trace.past_len, queries=no_queries(trace)))
    moved = moved_queries(without, part_tokens, math.inf)
    if moved is None:
        return None
    rows = moved.rows
    place = _place(trace.prefix_len, places)
    past = past_queries(trace)
    if past is not None and past.place != place:
        raise ValueError(f"queries kept at position {past.place}, not at {place}: place them first")
    positions = trace.prefix_positions[rows]
    if past is not None:
        positions = torch.cat([past.positions, positions])
    order = (positions.double() * _GOLDEN).frac().argsort(stable=True)[:count]
    num_past = len(positions) - len(rows)
    chosen_new = order[order >= num_past] - num_past
    new = _placed(
        trace,
        rows[chosen_new],
        place=place,
        starts=(trace.prefix_len - moved.shifts)[chosen_new],
        log_later_mass=_rows_of(moved.log_later_mass, chosen_new),
    )
    if past is None:
        return _selected(new, new.positions.argsort())
    chosen_past = order[order < num_past].sort().values
    both = _joined(_with_new_tokens(trace, _selected(past, chosen_past)), new)
    return _selected(both, both.positions.argsort())


def placed_ahead(trace: Trace, places: int = PLACES) -> Trace:
    """The trace with its kept queries moved on, if they are placed before the end of the prefix.

    What they attended to changes by as much as their attention to the slots of the compact cache
    does.

    Args:
        trace: with the ranges that are protected.
        places: as in ``keep_queries``.
    """
    past = past_queries(trace)
    place = _place(trace.prefix_len, places)
    if trace.past is None or past is None or past.place >= place:
        return trace
    prefix = Prefix.of(trace)
    log_masses = []
    all_outputs = []
    for layer, states in enumerate(past.states):
        num_compact = _first_new(prefix, layer)
        if not num_compact:  # the compact cache holds protected slots alone
            log_masses.append(past.log_mass[layer])
            all_outputs.append(past.outputs[layer])
            continue
        compact = slice(0, num_compact)
        before = _attended(prefix, layer, states, past.place - past.starts, compact)
        after = _attended(prefix, layer, states, place - past.starts, compact)
        log_masses.append(past.log_mass[layer] + (after.log_mass - before.log_mass))
        outputs = past.outputs[layer].numbers() + (after.outputs - before.outputs)
        all_outputs.append(Rows.of(outputs))
    moved = replace(past, place=place, log_mass=log_masses, outputs=all_outputs)
    return replace(trace, past=replace(trace.past, queries=moved))


def no_queries(trace: Trace) -> PastQueries:
    """No kept queries."""
    none = torch.zeros(0, dtype=torch.long)
    states = [layer.prefix_queries[:, :, :0] for layer in trace.layers]
    masses = [at_least_float32(queries[..., 0]) for queries in states]
    outputs = [
        values.new_empty(*queries.shape[:3], values.shape[3])
        for queries, values in zip(states, trace.values, strict=True)
    ]
    return PastQueries(
        positions=none,
        starts=none,
        states=list(map(Rows.of, states)),
        log_later_mass=masses,
        place=trace.prefix_len,
        log_mass=masses,
        outputs=list(map(Rows.of, outputs)),
    )


def _place(num_tokens: int, places: int) -> int:
    """The position to which kept queries are moved after so many tokens."""
    return -(-num_tokens // places) * places


def _placed(
    trace: Trace,
    rows: Int[Tensor, " kept"],
    place: int,
    starts: Int[Tensor, " kept"],
    log_later_mass: Sequence[Float[Tensor, "batch _ kept"]],
) -> PastQueries:
    """Queries of the prefix with their attention to all of it.

    Args:
        trace: of the prefix.
        rows: of the queries that the trace keeps.
        place, starts, log_later_mass: as in ``PastQueries``.
    """
    # what the rounded queries attend to
    all_queries = [layer.prefix_queries for layer in trace.layers]
    all_states = list(map(Rows.of, _rows_of(all_queries, rows)))
    prefix = Prefix.of(trace)
    attended = [
        _attended(prefix, layer, states, place - starts, slice(None))
        for layer, states in enumerate(all_states)
    ]
    return PastQueries(
        positions=trace.prefix_positions[rows],
        starts=starts,
        states=all_states,
        log_later_mass=log_later_mass,
        place=place,
        log_mass=[each.log_mass for each in attended],
        outputs=[Rows.of(each.outputs) for each in attended],
    )


def _with_new_tokens(trace: Trace, past: PastQueries) -> PastQueries:
    """Kept queries whose attention is joined with that to the tokens after the compact cache."""
    prefix = Prefix.of(trace)
    joined = []
    for layer, states in enumerate(past.states):
        new_slots = slice(_first_new(prefix, layer), None)
        before = Attended(past.log_mass[layer], past.outputs[layer].numbers())
        new = _attended(prefix, layer, states, past.place - past.starts, new_slots)
        joined.append(before.joined(new))
    return replace(
        past,
        log_mass=[each.log_mass for each in joined],
        outputs=[Rows.of(each.outputs) for each in joined],
    )


def _first_new(prefix: Prefix, layer: int) -> int:
    """The number of slots in the compact cache that are not protected, padding included.

    Those of the tokens after it follow. There are none of these if all such tokens are protected.
    """
    return prefix.layers[layer].max_slots - prefix.num_new


def _attended(
    prefix: Prefix,
    layer: int,
    queries: Rows,
    shifts: Int[Tensor, " queries"],
    slots: slice,
) -> Attended:
    """Attention of moved queries over some slots of a layer that are not protected.

    Args:
        prefix: of the slots.
        layer: of the prefix.
        queries: at their own positions, (batch, heads, queries, head_dim).
        shifts: positions by which each is moved.
        slots: of the prefix.
    """
    unprotected = prefix.layers[layer]
    of_layer = prefix.trace.layers[layer]
    rotation = KeyRotation(prefix.trace.model, PLACES)
    moved = rotation(queries.numbers(), of_layer.number, shifts)
    keys = at_least_float32(unprotected.keys[:, :, slots])
    values = at_least_float32(unprotected.values[:, :, slots])
    # (batch, kv_heads, query heads of each, queries, head_dim)
    grouped = moved.unflatten(1, (keys.shape[1], -1))
    scores = of_layer.scale * grouped @ keys.unsqueeze(2).mT
    if unprotected.log_bias is not None:
        scores += unprotected.log_bias[:, :, None, None, slots]
    attended = Attended.over(scores, values.unsqueeze(2))
    return Attended(attended.log_mass.flatten(1, 2), attended.outputs.flatten(1, 2))


def _rows_of(states: Sequence[Tensor], rows: Int[Tensor, " rows"]) -> list[Tensor]:
    """Some queries of every layer; queries are the third dimension."""
    return [each.index_select(2, rows.to(each.device)) for each in states]


def _joined(first: PastQueries, second: PastQueries) -> PastQueries:
    """The queries of both, which have the same place."""
    later_mass = zip(first.log_later_mass, second.log_later_mass, strict=True)
    log_mass = zip(first.log_mass, second.log_mass, strict=True)
    states = zip(first.states, second.states, strict=True)
    outputs = zip(first.outputs, second.outputs, strict=True)
    return PastQueries(
        positions=torch.cat([first.positions, second.positions]),
        starts=torch.cat([first.starts, second.starts]),
        states=[Rows.joined(both, dim=2) for both in states],
        log_later_mass=[torch.cat(both, dim=2) for both in later_mass],
        place=second.place,
        log_mass=[torch.cat(both, dim=2) for both in log_mass],
        outputs=[Rows.joined(both, dim=2) for both in outputs],
    )


def _selected(kept: PastQueries, rows: Int[Tensor, " rows"]) -> PastQueries:
    """Some of the queries."""
    return PastQueries(
        positions=kept.positions[rows],
        starts=kept.starts[rows],
        states=[each.selected(2, rows) for each in kept.states],
        log_later_mass=_rows_of(kept.log_later_mass, rows),
        place=kept.place,
        log_mass=_rows_of(kept.log_mass, rows),
        outputs=[each.selected(2, rows) for each in kept.outputs],
    )
