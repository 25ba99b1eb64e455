"""A long prefix is fitted segment by segment, so that the cost is linear in its length.

Every segment has its own slots, and its own choice of the queries. The slots of other segments are
like text after the prefix: what a query gives to them is mass elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from kvcat.compress.heads import Heads
from kvcat.compress.prefix import Prefix
from kvcat.compress.query_set import QuerySet

SEGMENT_TOKENS = 4096
"""Most tokens of a long document whose slots are fitted together: up to here one fit is faster."""
SAMPLED = 0.5
"""Queries of other segments, relative to those of a segment."""
_LEAST_SLOTS = 4  # of a segment, on average


def split_prefix(prefix: Prefix, queries: Sequence[QuerySet]) -> list[Prefix]:
    """Equal segments of at most ``SEGMENT_TOKENS`` tokens; the whole prefix if it has no more.

    A segment without slots to compress is left out. A prefix is one segment if the positions of its
    slots are not known, after a compact cache; and if some of the queries are in place, where they
    see nothing of a later segment.

    Args:
        prefix: what is compressed.
        queries: to which the whole prefix is fitted.
    """
    prefix_len = prefix.trace.prefix_len
    positions = prefix.layers[0].positions
    is_short = prefix_len <= SEGMENT_TOKENS
    if is_short or positions is None or any(each.is_causal for each in queries):
        return [prefix]
    position = positions[0, 0]  # of the slots, the same in every head of every layer
    count = -(-prefix_len // SEGMENT_TOKENS)
    edges = [number * prefix_len // count for number in range(count + 1)]
    segments = []
    for start, stop in pairwise(edges):
        slots = ((position >= start) & (position < stop)).nonzero().squeeze(1)
        if len(slots):
            layers = [layer.at(slots) for layer in prefix.layers]
            first = int(slots[0])
            segments.append(replace(prefix, layers=layers, first_slot=first, tokens=(start, stop)))
    return segments


def is_split_for(segments: Sequence[Prefix], num_slots: int) -> bool:
    """Whether the segments of a prefix are fitted one by one for a number of slots.

    Few slots are soon fitted together, and may be fewer than there are segments.

    Args:
        segments: of ``split_prefix``.
        num_slots: slots of a head, on average.
    """
    return len(segments) > 1 and num_slots >= _LEAST_SLOTS * len(segments)


@dataclass(frozen=True)
class Segments(Sequence[Heads]):
    """The heads of each segment of a prefix, with the queries to which its slots are fitted.

    These are all queries whose text is the segment's. Of the others, evenly spaced ones are used,
    each with the weight of those that it represents.

    The queries of a segment are chosen whenever its heads are asked for: those of all segments at
    once would need much more memory than the trace's.

    Args:
        prefixes: of ``split_prefix``.
        queries: to which the whole prefix is fitted; those of several segments with their whole
            attention mass (``QuerySet.counts_all``).
        stride: every how many of the other segments' queries one is used.
    """

    prefixes: Sequence[Prefix]
    queries: Sequence[QuerySet]
    stride: int

    @classmethod
    def of(
        cls, prefix: Prefix, prefixes: Sequence[Prefix], queries: Sequence[QuerySet]
    ) -> "Segments":
        """The heads of the segments of a prefix, with the queries of ``fitted_queries``."""
        if len(prefixes) == 1:
            return cls(prefixes, queries, 0)
        stride = max(1, round((len(prefixes) - 1) / SAMPLED))
        trace = prefix.trace
        keys = [layer.keys for layer in prefix.layers]
        whole = []
        for each in queries:
            last_seen = torch.full([len(each)], keys[0].shape[2] - 1)
            masses = each.log_masses(trace.layer_numbers, trace.scales, keys, last_seen)
            whole.append(replace(each.with_elsewhere(masses), counts_all=True))
        return cls(prefixes, whole, stride)

    def __len__(self) -> int:
        """The number of segments."""
        return len(self.prefixes)

    def __getitem__(self, number: int) -> Heads:  # type: ignore[override]
        """The heads of one segment."""
        segment = self.prefixes[number]
        if segment.tokens is None:
            return Heads(segment, self.queries)
        return Heads(segment, self._queries_of(*segment.tokens))

    def _queries_of(self, start: int, stop: int) -> list[QuerySet]:
        """The queries to which the slots of these tokens are fitted."""
        chosen: list[QuerySet] = []
        for each in self.queries:
            positions = each.positions if each.repeated is None else each.repeated
            is_inside = (positions >= start) & (positions < stop)
            numbers = torch.arange(len(each))
            is_sampled = numbers % self.stride == 0
            rows = (is_inside | is_sampled).nonzero().squeeze(1)
            if not len(rows):
                continue
            some = each.selected(rows)
            weights = torch.where(is_inside[rows], 1.0, self.stride**0.5) * some.weights
            chosen.append(replace(some, weights=weights))
        return chosen
