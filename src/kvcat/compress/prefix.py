"""What a compressor compresses: the slots of a prefix that are not protected.

Protected slots are ranges of tokens that stay exact in every head and layer. A compact cache holds
them first in every head, in the order of their positions, with their dense keys and values and a
log-bias of 0. They are part of its budget. The other slots are fitted to the attention that
remains: to the fit, the protected slots are like text after the prefix, which every query sees
exactly.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvcat.cache import CompactLayer, HeadGrid, HeadSlots, Layer, PackedHead
from kvcat.cache.ranges import Range, num_positions, range_text
from kvcat.compress.trace import Trace
from kvcat.errors import InputError, check_kind, whole
from kvcat.types import Int, Tensor


@dataclass(frozen=True)
class Prefix:
    """The slots that a compressor compresses, and those that stay as they are.

    Args:
        trace: the forward pass.
        layers: per layer, the slots to compress. Heads with fewer slots than the fullest are padded
            with slots of log-bias -inf. Slots know their positions unless ``trace`` continued from
            a compact cache.
        protected: per layer, the slots that stay as they are, equally many in all heads, without
            log-bias; (): none are protected.
        first_slot: index in the whole prefix of the first slot, of a part of it.
        tokens: range of the tokens of a part; None: all.
    """

    trace: Trace
    layers: Sequence[CompactLayer]
    protected: Sequence[CompactLayer] = ()
    first_slot: int = 0
    tokens: Range | None = None

    @classmethod
    def of(cls, trace: Trace) -> "Prefix":
        """The prefix of a trace.

        Raises:
            InputError: every slot of a head is protected.
        """
        if not trace.protected:
            return cls(trace, [layer.slots for layer in trace.layers])
        prefix = cls(
            trace,
            [layer.slots.at(trace.other_slots(layer)) for layer in trace.layers],
            protected_layers(trace),
        )
        if min(int(layer.present_counts().min()) for layer in prefix.layers) < 1:
            raise InputError("every slot of a head is protected: nothing is left to compress")
        return prefix

    @property
    def num_protected(self) -> int:
        """The number of protected slots in every head."""
        return self.trace.num_protected

    @property
    def max_slots(self) -> int:
        """The slots of the fullest head: the most that a compressor can keep."""
        return max(int(layer.present_counts().max()) for layer in self.layers)

    @property
    def num_new(self) -> int:
        """The number of slots of tokens after the compact cache: the last ones of every head."""
        past_len = self.trace.past_len
        new = clipped(self.trace.protected, past_len, self.trace.prefix_len)
        return self.trace.prefix_len - past_len - num_positions(new)

    @property
    def num_unprotected_after(self) -> Int[Tensor, " tokens"]:
        """For each token of the prefix, the number of tokens after it that are not protected."""
        is_unprotected = torch.ones(self.trace.prefix_len, dtype=torch.long)
        for start, stop in self.trace.protected:
            is_unprotected[start:stop] = 0
        return is_unprotected.sum() - is_unprotected.cumsum(0)

    def whole_layers(self, kept: Sequence[Layer]) -> list[Layer]:
        """The layers of a cache: the protected slots, and after them those kept of the others."""
        if not self.protected:
            return list(kept)
        grids = self.whole_heads([layer.heads() for layer in kept])
        return [CompactLayer.of_heads(grid) for grid in grids]

    def whole_heads(self, kept: Sequence[HeadGrid]) -> list[HeadGrid]:
        """As ``whole_layers``, the heads of every layer; those with codes keep them."""
        if not self.protected:
            return list(kept)
        return [
            [
                [_after(*both) for both in zip(*rows, strict=True)]
                for rows in zip(protected.heads(), others, strict=True)
            ]
            for protected, others in zip(self.protected, kept, strict=True)
        ]


def _after(protected: HeadSlots, others: HeadSlots) -> HeadSlots:
    """The slots of a head, the protected ones first."""
    joined = HeadSlots.joined([protected, others])
    if not isinstance(others.codes, PackedHead):
        return joined
    return replace(joined, codes=others.codes.after(protected.keys, protected.values))


def protected_layers(trace: Trace) -> list[CompactLayer]:
    """Per layer, the protected slots of a trace, without log-bias."""
    return [
        replace(layer.slots.at(trace.protected_slots(layer)), log_bias=None)
        for layer in trace.layers
    ]


def protecting(trace: Trace, ranges: Sequence[Any]) -> Trace:
    """The trace with protected tokens, whose slots every compressor keeps as they are.

    Args:
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
    past_protected = () if trace.past is None else trace.past.protected
    if in_past != past_protected:
        held = range_text(past_protected) or "no tokens"
        raise InputError(
            f"protect={range_text(in_past) or 'no tokens'} of the {trace.past_len} tokens in the "
            f"compact cache, which protects {held}: protect the same ones again"
        )
    return replace(trace, text=replace(trace.text, protected=joined))


def joined_ranges(ranges: Sequence[Any], num_tokens: int) -> tuple[Range, ...]:
    """Ranges in ascending order that neither overlap nor touch, of the same tokens.

    Raises:
        InputError: a range that is empty, not in 0..num_tokens, or no pair of whole numbers.
    """
    for each in ranges:
        is_pair = isinstance(each, tuple | list) and len(each) == 2
        if not is_pair:
            raise InputError(f"protect holds {each!r}, not a pair of positions (first, end)")
        start, stop = (whole(f"a position of {each!r} in protect", position) for position in each)
        if not 0 <= start < stop <= num_tokens:
            raise InputError(
                f"protect holds ({start}, {stop}): a range has 0 <= first < end <= {num_tokens}, "
                "the tokens of the prefix"
            )
    joined: list[Range] = []
    for start, stop in sorted((int(start), int(stop)) for start, stop in ranges):
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
