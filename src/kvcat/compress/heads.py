"""The KV heads of a trace, loaded in batches of equal shape with the queries to fit to."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import ClassVar, NamedTuple, TypeVar

import torch
from tqdm.auto import tqdm

from kvcat.cache import HeadSlots
from kvcat.compress.fitted_rows import fitted_attention, most_fitted
from kvcat.compress.head_attention import DenseAttention, HeadBatch, PastAttention
from kvcat.compress.prefix import Prefix
from kvcat.compress.query_set import QuerySet
from kvcat.memory import rows_per_chunk
from kvcat.progress import disable_bar
from kvcat.types import Float, Int, Tensor, at_least_float32

T = TypeVar("T")
HeadIndex = tuple[int, int, int]
"""Layer, example, KV head."""


class _Shape(NamedTuple):
    """The properties that heads must share to be solved together."""

    query_heads: int  # that read the KV head
    num_slots: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class Heads:
    """The KV heads of a prefix with the queries to fit to, loaded group by group.

    Args:
        prefix: what is compressed.
        queries: of every source, to fit to.
    """

    group_elements: ClassVar[int] = 2**22
    """Most numbers that a group of heads holds on a CPU, if one head has no more."""

    prefix: Prefix
    queries: Sequence[QuerySet]

    @property
    def num_queries(self) -> int:
        """The number of positions whose queries select keys."""
        return sum(map(len, self.queries))

    @property
    def is_causal(self) -> bool:
        """Whether some queries are in place, where they do not see all slots."""
        return any(each.is_causal for each in self.queries)

    def groups_for_scores(self) -> list[list[HeadIndex]]:
        """Heads of equal shape whose scores against the prefix hold ``group_elements`` at most.

        A head that holds more than that is a group by itself.
        """
        groups = []
        for shape, heads in _by_value(self._shapes).items():
            num_queries = shape.query_heads * self.num_queries
            groups += self._limited(heads, held=num_queries * shape.num_slots)
        return groups

    def groups_for_fit(self, sizes: Mapping[HeadIndex, int]) -> list[list[HeadIndex]]:
        """Heads of equal shape that get equally many slots and hold ``group_elements`` at most.

        These are the largest of: the scores of the fitted queries against the slots, the system of
        equations, all queries, and the keys and values of the prefix. A head that holds more is a
        group by itself.

        Args:
            sizes: slots that each head gets.
        """
        shapes_and_sizes = {head: (shape, sizes[head]) for head, shape in self._shapes.items()}
        groups = []
        for (shape, size), heads in _by_value(shapes_and_sizes).items():
            num_queries = shape.query_heads * self.num_queries
            scores = min(num_queries, most_fitted(shape.num_slots)) * size
            states = shape.num_slots * (shape.key_dim + shape.value_dim)
            held = max(scores, size * size, num_queries * shape.key_dim, states)
            groups += self._limited(heads, held)
        return groups

    def _limited(self, heads: list[HeadIndex], held: int) -> list[list[HeadIndex]]:
        """The heads in groups of ``group_elements`` at most, where each head holds ``held``."""
        device = self.prefix.layers[0].keys.device
        num_heads = rows_per_chunk(held, device, cpu_elements=self.group_elements)
        return [heads[start : start + num_heads] for start in range(0, len(heads), num_heads)]

    @cached_property
    def _shapes(self) -> dict[HeadIndex, _Shape]:
        """The shape of every head of the trace."""
        shapes = {}
        for index, layer in enumerate(self.prefix.layers):
            for example, slots_of_heads in enumerate(layer.present_counts().tolist()):
                for kv_head, num_slots in enumerate(slots_of_heads):
                    shapes[index, example, kv_head] = _Shape(
                        query_heads=self.prefix.trace.layers[index].query_heads,
                        num_slots=num_slots,
                        key_dim=layer.keys.shape[3],
                        value_dim=layer.values.shape[3],
                    )
        return shapes

    def load(self, heads: list[HeadIndex]) -> HeadBatch:
        """The tensors of a group of heads with the queries of every source.

        Those of one position follow each other by query head.
        """
        slots = HeadSlots.stacked(
            [
                self.prefix.layers[layer].present_head(example, head)
                for layer, example, head in heads
            ]
        )
        keys = slots.keys
        query_heads = self.prefix.trace.layers[heads[0][0]].query_heads
        num_heads, num_slots, key_dim = keys.shape
        # (heads, positions, query heads, channels), filled layer by layer and source by source
        queries = keys.new_empty(num_heads, self.num_queries, query_heads, key_dim)
        log_elsewhere = keys.new_empty(num_heads, self.num_queries, query_heads)
        num_loaded = 0
        for (layer, example), of_layer in groupby(heads, key=lambda head: head[:2]):
            rows = _query_head_rows(of_layer, query_heads)
            place = slice(num_loaded, num_loaded + len(rows) // query_heads)
            trace_layer = self.prefix.trace.layers[layer]
            first = 0
            for source in self.queries:
                to = slice(first, first + len(source))
                by_head = source.of_heads(layer, trace_layer.number, example, rows)
                torch.mul(
                    _by_position(by_head, query_heads), trace_layer.scale, out=queries[place, to]
                )
                elsewhere = source.log_elsewhere[layer][example, rows]
                log_elsewhere[place, to] = _by_position(elsewhere, query_heads)
                first = to.stop
            num_loaded = place.stop
        weights = torch.cat([source.weights for source in self.queries])
        return HeadBatch(
            queries=queries.flatten(1, 2),
            factors=_of_every_head(weights.to(keys), query_heads, num_heads),
            log_elsewhere=log_elsewhere.flatten(1, 2),
            counts_all=any(source.counts_all for source in self.queries),
            keys=keys,
            values=slots.values,
            log_bias=slots.log_bias,
            last_seen=self._last_seen(num_slots, query_heads, num_heads),
            past=self._past(heads, query_heads),
            num_supervising=query_heads * sum(len(q) for q in self.queries if not q.is_own),
        )

    def fitted_attention(self, heads: list[HeadIndex]) -> tuple[HeadBatch, DenseAttention]:
        """A group of heads with the queries that are fitted to, and their attention."""
        return fitted_attention(self.load(heads))

    def _past(self, heads: list[HeadIndex], query_heads: int) -> PastAttention | None:
        """What the kept queries attended to before it was compressed; None: there are none."""
        first_row = 0  # of the one source that knows its earlier attention
        for kept in self.queries:
            if kept.log_mass:
                break
            first_row += len(kept) * query_heads
        else:
            return None
        log_mass: list[Tensor] = []
        outputs: list[Tensor] = []
        for layer, example, kv_head in heads:
            rows = _query_head_rows([(layer, example, kv_head)], query_heads)
            log_mass.append(_by_position(kept.log_mass[layer][example, rows], query_heads))
            of_rows = kept.outputs[layer][example, rows].numbers()
            outputs.append(_by_position(of_rows, query_heads))
        return PastAttention(
            first_row=first_row,
            num_new=self.prefix.num_new,
            log_mass=torch.cat(log_mass).flatten(1, 2),
            outputs=torch.cat(outputs).flatten(1, 2),
        )

    def _last_seen(
        self, num_slots: int, query_heads: int, num_heads: int
    ) -> Int[Tensor, "heads queries"] | None:
        """Last slot that each query sees, if some of them are in place.

        After a compact cache only the last slots have queries.
        """
        if not self.is_causal:
            return None
        positions = torch.cat([source.positions for source in self.queries])
        last = num_slots - 1 - self.prefix.num_unprotected_after[positions]
        device = self.prefix.layers[0].keys.device
        return _of_every_head(last.to(device), query_heads, num_heads)


def with_progress(groups: list[list[HeadIndex]], name: str) -> Iterator[list[HeadIndex]]:
    """The groups, with a progress bar in a terminal after two seconds; TQDM_DISABLE=1 hides it."""
    yield from tqdm(groups, name, delay=2.0, disable=disable_bar(), leave=False)


def _by_value(values: Mapping[HeadIndex, T]) -> dict[T, list[HeadIndex]]:
    """The heads that have the same value, by value."""
    heads: dict[T, list[HeadIndex]] = {}
    for head, value in values.items():
        heads.setdefault(value, []).append(head)
    return heads


def _query_head_rows(heads: Iterable[HeadIndex], query_heads: int) -> list[int]:
    """Query heads of some KV heads of a layer."""
    return [kv_head * query_heads + n for _, _, kv_head in heads for n in range(query_heads)]


def _by_position(
    states: Float[Tensor, "rows queries *channels"], query_heads: int
) -> Float[Tensor, "heads queries query_heads *channels"]:
    """States of query heads, ordered so that those of one KV head and position are next to each
    other.
    """
    return at_least_float32(states).unflatten(0, (-1, query_heads)).transpose(1, 2)


def _of_every_head(numbers: Tensor, query_heads: int, num_heads: int) -> Tensor:
    """Numbers by position as (heads, queries), each for all query heads of a KV head."""
    return numbers.repeat_interleave(query_heads).expand(num_heads, -1)
