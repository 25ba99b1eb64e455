"""Protected slots: ranges of tokens that stay exact in every head and layer.

A compact cache holds the slots of its protected tokens first in every head, in the order of their
positions, with their dense keys and values and a log-bias of 0. They are part of its budget. The
other slots are fitted to the attention that remains: to the fit, the protected slots are like text
after the prefix, which every query sees exactly.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from kvcat.cache import CompactCache, CompactLayer, Layer
from kvcat.compress.ranges import Range, range_text
from kvcat.compress.trace import Trace
from kvcat.errors import InputError, check_kind
from kvcat.types import Tensor


def protecting(trace: Trace, ranges: Sequence[Any]) -> Trace:
    """The trace with protected tokens, whose slots every compressor keeps as they are.

    Args:
        trace: of the prefix.
        ranges: pairs of a first position and the position after the last one, in the prefix.
            Ranges that overlap are joined. Tokens in a compact cache can only be protected again
            as they were before. No range: the trace as it is.

    Raises:
        InputError: a range that is empty, not in the prefix or no pair of whole numbers; or tokens
            in a compact cache that does not protect just these.
    """
    check_kind(Trace, "a Trace", trace=trace)
    check_kind(Sequence, "a sequence of pairs (first, end)", ranges=ranges)
    if not len(ranges):
        return trace
    joined = joined_ranges(ranges, trace.prefix_len)
    in_past = clipped(joined, 0, trace.past_len)
    if in_past != trace.past_protected:
        held = range_text(trace.past_protected) or "no tokens"
        raise InputError(
            f"protect={range_text(in_past) or 'no tokens'} of the {trace.past_len} tokens in the "
            f"compact cache, which protects {held}: protect the same ones again"
        )
    return replace(trace, protected=joined)


def joined_ranges(ranges: Sequence[Any], num_tokens: int) -> tuple[Range, ...]:
    """Ranges in ascending order that neither overlap nor touch, of the same tokens.

    Raises:
        InputError: a range that is empty, not in 0..num_tokens, or no pair of whole numbers.
    """
    for each in ranges:
        is_pair = isinstance(each, tuple | list) and len(each) == 2
        if not is_pair or not all(type(position) is int for position in each):
            raise InputError(f"protect holds {each!r}, not a pair of positions (first, end)")
        start, stop = each
        if not 0 <= start < stop <= num_tokens:
            raise InputError(
                f"protect holds ({start}, {stop}): a range has 0 <= first < end <= {num_tokens}, "
                "the tokens of the prefix"
            )
    joined: list[Range] = []
    for start, stop in sorted((start, stop) for start, stop in ranges):
        if joined and start <= joined[-1][1]:
            first, last = joined.pop()
            joined.append((first, max(last, stop)))
        else:
            joined.append((start, stop))
    return tuple(joined)


def clipped(ranges: Sequence[Range], start: int, stop: int) -> tuple[Range, ...]:
    """The parts of ranges that lie in start..stop."""
    limited = [(max(first, start), min(end, stop)) for first, end in ranges]
    return tuple((first, end) for first, end in limited if first < end)


def check_room(trace: Trace, num_slots: int) -> None:
    """Raise an ``InputError`` for fewer slots than are protected."""
    if num_slots < trace.num_protected:
        raise InputError(
            f"{num_slots} slots are fewer than the {trace.num_protected} protected ones "
            f"(tokens {range_text(trace.protected)}): keep more, or protect fewer"
        )


def behind_protected(trace: Trace, index: int, others: Layer) -> Layer:
    """One layer of a cache: the protected slots, and then those kept of the others.

    Args:
        trace: with protected tokens or without; without, the layer is returned as it is.
        index: of the layer.
        others: slots made from ``trace.unprotected``; their positions count in its slots.
    """
    if not trace.protected:
        return others
    fixed = protected_layer(trace, index)
    slots_of_others = trace.other_slots(index)
    keys: list[list[Tensor]] = []
    values: list[list[Tensor]] = []
    biases: list[list[Tensor]] = []
    positions: list[list[Tensor]] = []
    place = 0  # in the positions of a ragged layer
    for example, counts in enumerate(others.counts.tolist()):
        for rows in (keys, values, biases, positions):
            rows.append([])
        for head, count in enumerate(counts):
            head_keys, head_values, bias = others.head(example, head)
            keys[-1].append(torch.cat([fixed.keys[example, head], head_keys]))
            values[-1].append(torch.cat([fixed.values[example, head], head_values]))
            if bias is not None:
                biases[-1].append(torch.cat([bias.new_zeros(trace.num_protected), bias]))
            if others.positions is not None and fixed.positions is not None:
                if isinstance(others, CompactLayer):
                    kept = others.positions[example, head]
                else:
                    kept = others.positions[place : place + count]
                    place += count
                positions[-1].append(
                    torch.cat([fixed.positions[example, head], slots_of_others[kept]])
                )
    return CompactLayer.ragged(
        keys,
        values,
        biases if others.has_log_bias else None,
        positions if others.positions is not None else None,
    )


def without_protected(layer: Layer, num_protected: int) -> Layer:
    """A layer of a cache without its first slots, the protected ones, and without positions."""
    if not num_protected:
        return layer
    padded = layer.padded()
    bias = None if padded.log_bias is None else padded.log_bias[:, :, num_protected:]
    keys = padded.keys[:, :, num_protected:]
    values = padded.values[:, :, num_protected:]
    others = CompactLayer(keys, values, bias).without_absent()
    if layer.log_bias is None and others.log_bias is not None:
        return replace(others, log_bias=None)
    return others


def protected_layer(trace: Trace, index: int) -> CompactLayer:
    """The protected slots of one layer, without log-bias."""
    slots = trace.protected_slots(index)
    keys = trace.keys[index].index_select(2, slots)
    values = trace.values[index].index_select(2, slots)
    if trace.past_len:
        return CompactLayer(keys, values)
    return CompactLayer(keys, values, None, slots.expand(*keys.shape[:2], -1))


def check_protected(trace: Trace, cache: CompactCache, method: str) -> None:
    """Raise an ``InputError`` for a cache whose first slots are not the protected ones.

    Compressors of other packages may not know protected tokens.
    """
    if not trace.protected:
        return
    for index, layer in enumerate(cache.ordinary_layers()):
        wanted = protected_layer(trace, index)
        made = layer.padded()
        num_protected = trace.num_protected
        is_kept = torch.equal(made.keys[:, :, :num_protected], wanted.keys)
        is_kept = is_kept and torch.equal(made.values[:, :, :num_protected], wanted.values)
        if made.log_bias is not None:
            is_kept = is_kept and not made.log_bias[:, :, :num_protected].any()
        if not is_kept:
            raise InputError(f"{method} does not keep protected slots: leave out protect")
