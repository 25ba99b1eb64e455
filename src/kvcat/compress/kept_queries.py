"""A sample of the queries of what is compressed, and what they attended to, for later fits.

What they attended to while the text was exact is recorded, and stays the target of later fits. Like
the other queries they are moved to the end of the text, so that they stay as far from it as the
queries that will come; what is recorded changes with them.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch

from kvcat.compress.head_attention import Attended
from kvcat.compress.prefix import Prefix
from kvcat.compress.queries import own_queries
from kvcat.compress.query_set import QuerySet
from kvcat.compress.trace import Trace
from kvcat.models.rounded import Rounded
from kvcat.types import at_least_float32

_GOLDEN = (math.sqrt(5) - 1) / 2


def keep_queries(trace: Trace, count: int, repeated: Sequence[QuerySet] = ()) -> QuerySet | None:
    """A sample of the queries of a trace's prefix, for later fits; None if they cannot be moved.

    Of all tokens of the prefix, whenever they were compressed, equally many are kept: those whose
    position times the golden ratio has the smallest fractional part, which are evenly spaced.

    Args:
        trace: of a prefix, before its compression, with all its queries after the compact cache;
            those kept before are at its end (``placed_after``).
        repeated: queries of its tokens after the compact cache, repeated right after the prefix
            (``repeated_tokens``), which are kept in place of the tokens' own; (): their own.
        count: largest number of tokens whose queries are kept, at least 0.

    Raises:
        ValueError: queries kept before that are not at the end of the prefix.
    """
    moved = _of_repeated_tokens(repeated, trace.prefix_len) if repeated else own_queries(trace)
    if moved is None:
        return None
    place = trace.prefix_len
    past = None if trace.past is None else trace.past.queries
    if past is not None and past.place != place:
        raise ValueError(f"queries kept at position {past.place}, not at {place}: move them first")
    num_past = 0 if past is None else len(past)
    positions = moved.positions if past is None else torch.cat([past.positions, moved.positions])
    order = (positions.double() * _GOLDEN).frac().argsort(stable=True)[:count]
    new = _placed(trace, moved.selected(order[order >= num_past] - num_past), place)
    if past is None:
        return new.selected(new.positions.argsort())
    chosen_past = order[order < num_past].sort().values
    both = _joined(_with_new_tokens(trace, past.selected(chosen_past)), new)
    return both.selected(both.positions.argsort())


def placed_after(trace: Trace) -> Trace:
    """The trace with its kept queries at the end of the prefix.

    Their recorded attention changes as their attention to the compact slots does.

    Args:
        trace: with the ranges that are protected.
    """
    past = None if trace.past is None else trace.past.queries
    place = trace.prefix_len
    if trace.past is None or past is None or past.place == place:
        return trace
    prefix = Prefix.of(trace)
    log_masses = []
    all_outputs = []
    for layer in range(len(past.states)):
        num_compact = _first_new(prefix, layer)
        if not num_compact:  # the compact cache holds protected slots alone
            log_masses.append(past.log_mass[layer])
            all_outputs.append(past.outputs[layer])
            continue
        compact = slice(0, num_compact)
        before = _attended(prefix, layer, past, past.place, compact)
        after = _attended(prefix, layer, past, place, compact)
        log_masses.append(past.log_mass[layer] + (after.log_mass - before.log_mass))
        outputs = past.outputs[layer].numbers() + (after.outputs - before.outputs)
        all_outputs.append(Rounded.of(outputs))
    moved = replace(past, place=place, log_mass=log_masses, outputs=all_outputs)
    return replace(trace, past=replace(trace.past, queries=moved))


def _of_repeated_tokens(repeated: Sequence[QuerySet], start: int) -> QuerySet:
    """Queries of a repetition as those of the tokens that it repeats, in one set.

    Args:
        repeated: the queries of each part.
        start: position at which every part was repeated.
    """
    of_tokens = []
    for each in repeated:
        tokens: Any = each.repeated
        starts = torch.full([len(each)], start)
        of_tokens.append(replace(each, positions=tokens, repeated=None, starts=starts))
    return reduce(_joined, of_tokens)


def _placed(trace: Trace, moved: QuerySet, place: int) -> QuerySet:
    """Queries of the prefix, in 8 bits, with their attention to all of it from another place."""
    states = [each if isinstance(each, Rounded) else Rounded.of(each) for each in moved.states]
    # what the rounded queries attend to
    rounded = replace(moved, states=states, place=place, rotation=None)
    prefix = Prefix.of(trace)
    attended = [
        _attended(prefix, layer, rounded, place, slice(None)) for layer in range(len(trace.layers))
    ]
    return replace(
        rounded,
        log_mass=[each.log_mass for each in attended],
        outputs=[Rounded.of(each.outputs) for each in attended],
    )


def _with_new_tokens(trace: Trace, past: QuerySet) -> QuerySet:
    """Kept queries whose attention is joined with that to the tokens after the compact cache."""
    prefix = Prefix.of(trace)
    joined = []
    for layer in range(len(past.states)):
        new_slots = slice(_first_new(prefix, layer), None)
        before = Attended(past.log_mass[layer], past.outputs[layer].numbers())
        new = _attended(prefix, layer, past, past.place, new_slots)
        joined.append(before.joined(new))
    return replace(
        past,
        log_mass=[each.log_mass for each in joined],
        outputs=[Rounded.of(each.outputs) for each in joined],
    )


def _first_new(prefix: Prefix, layer: int) -> int:
    """The number of slots in the compact cache that are not protected, padding included.

    Those of the tokens after it follow. There are none of these if all such tokens are protected.
    """
    return prefix.layers[layer].max_slots - prefix.num_new


def _attended(prefix: Prefix, layer: int, queries: QuerySet, place: int, slots: slice) -> Attended:
    """Attention of queries over some slots of a layer that are not protected.

    Args:
        prefix: of the slots.
        queries: at the positions of their tokens, in 8 bits.
        place: to which the parts of the queries are moved.
        slots: of the prefix.
    """
    unprotected = prefix.layers[layer]
    of_layer = prefix.trace.layers[layer]
    rotation: Any = prefix.trace.rotation  # queries that cannot be moved are not kept
    states: Any = queries.states[layer]
    starts: Any = queries.starts
    moved = rotation(states.numbers(), of_layer.number, place - starts)
    keys = at_least_float32(unprotected.keys[:, :, slots])
    values = at_least_float32(unprotected.values[:, :, slots])
    # (batch, kv_heads, query heads of each, queries, head_dim)
    grouped = moved.unflatten(1, (keys.shape[1], -1))
    scores = of_layer.scale * grouped @ keys.unsqueeze(2).mT
    if unprotected.log_bias is not None:
        scores += unprotected.log_bias[:, :, None, None, slots]
    attended = Attended.over(scores, values.unsqueeze(2))
    return Attended(attended.log_mass.flatten(1, 2), attended.outputs.flatten(1, 2))


def _joined(first: QuerySet, second: QuerySet) -> QuerySet:
    """The queries of both, which have the same place."""

    def joined(name: str) -> list[Any]:
        pairs = zip(getattr(first, name), getattr(second, name), strict=True)
        return [
            Rounded.joined(both, 2) if isinstance(both[0], Rounded) else torch.cat(both, 2)
            for both in pairs
        ]

    return replace(
        first,
        states=joined("states"),
        positions=torch.cat([first.positions, second.positions]),
        weights=torch.cat([first.weights, second.weights]),
        log_elsewhere=joined("log_elsewhere"),
        starts=torch.cat([first.starts, second.starts]),  # type: ignore[list-item]
        log_mass=joined("log_mass"),
        outputs=joined("outputs"),
    )
