"""The KV heads of a trace, loaded in batches of equal shape with the queries to fit to."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple, TypeVar

import torch

from kvcat.cache import HeadSlots
from kvcat.compress.attended import PastAttention
from kvcat.compress.base import example_generators
from kvcat.compress.head_attention import HeadBatch, take
from kvcat.compress.prefix import Prefix
from kvcat.compress.queries import FittedQueries, past_queries
from kvcat.compress.trace import Trace
from kvcat.types import Float, Int, Tensor, at_least_float32

T = TypeVar("T")
HeadIndex = tuple[int, int, int]
"""Layer, example, KV head."""
DrawnRows = dict[HeadIndex, Int[Tensor, " drawn"]]
"""Rows of a head's queries that a draw chose, ascending."""


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
        fitted: the queries.
        drawn: rows of each head's queries that are used, as ``draw_rows`` gives them; None: all.
        group_elements: most numbers that a group of heads holds, if one head has no more.
    """

    prefix: Prefix
    fitted: FittedQueries
    drawn: DrawnRows | None = None
    group_elements: int = 2**24

    def groups_for_scores(self) -> list[list[HeadIndex]]:
        """Heads of equal shape whose scores against the prefix hold ``group_elements`` at most.

        A head that holds more than that is a group by itself.
        """
        groups = []
        for shape, heads in _by_value(self._shapes).items():
            num_queries = shape.query_heads * self.fitted.num_queries
            groups += self._limited(heads, held=num_queries * shape.num_slots)
        return groups

    def groups_for_fit(self, sizes: Mapping[HeadIndex, int]) -> list[list[HeadIndex]]:
        """Heads of equal shape that get equally many slots and hold ``group_elements`` at most.

        These are the largest of: the scores of the fitted queries against the slots, the system of
        equations, and the keys and values of the prefix. A head that holds more is a group by
        itself.

        Args:
            sizes: slots that each head gets.
        """
        shapes_and_sizes = {head: (shape, sizes[head]) for head, shape in self._shapes.items()}
        groups = []
        for (shape, size), heads in _by_value(shapes_and_sizes).items():
            scores = shape.query_heads * self.fitted.num_fitted * size
            states = shape.num_slots * (shape.key_dim + shape.value_dim)
            groups += self._limited(heads, held=max(scores, size * size, states))
        return groups

    def _limited(self, heads: list[HeadIndex], held: int) -> list[list[HeadIndex]]:
        """The heads in groups of ``group_elements`` at most, where each head holds ``held``."""
        num_heads = max(1, self.group_elements // held)
        return [heads[start : start + num_heads] for start in range(0, len(heads), num_heads)]

    def load(self, heads: list[HeadIndex]) -> HeadBatch:
        """The tensors of a group of heads with all queries.

        The queries are in the order of ``fitted``; those of one position follow each other by query
        head.
        """
        batch = self._load(heads, self.fitted.num_queries)
        return batch if self.drawn is None else _select_rows(batch, heads, self.drawn)

    def load_fitted(self, heads: list[HeadIndex]) -> HeadBatch:
        """As ``load``, without the queries that only choose keys."""
        if self.drawn is not None:
            return self.load(heads)
        return self._load(heads, self.fitted.num_fitted)

    @cached_property
    def _shapes(self) -> dict[HeadIndex, _Shape]:
        """The shape of every head of the trace."""
        shapes = {}
        for index, layer in enumerate(self.prefix.layers):
            for example, slots_of_heads in enumerate(layer.present_counts().tolist()):
                for kv_head, num_slots in enumerate(slots_of_heads):
                    shapes[index, example, kv_head] = _Shape(
                        query_heads=query_heads_per_kv_head(self.prefix.trace, index),
                        num_slots=num_slots,
                        key_dim=layer.keys.shape[3],
                        value_dim=layer.values.shape[3],
                    )
        return shapes

    def _load(self, heads: list[HeadIndex], num_queries: int) -> HeadBatch:
        """The tensors of a group of heads with the first so many queries."""
        slots = HeadSlots.stacked(
            [
                self.prefix.layers[layer].present_head(example, head)
                for layer, example, head in heads
            ]
        )
        keys = slots.keys
        query_heads = query_heads_per_kv_head(self.prefix.trace, heads[0][0])
        num_heads, num_slots, key_dim = keys.shape
        # (heads, positions, query heads, channels), filled layer by layer
        queries = keys.new_empty(num_heads, num_queries, query_heads, key_dim)
        log_later_mass = keys.new_empty(num_heads, num_queries, query_heads)
        num_loaded = 0
        for (layer, example), of_layer in groupby(heads, key=lambda head: head[:2]):
            rows = _query_head_rows(of_layer, query_heads)
            place = slice(num_loaded, num_loaded + len(rows) // query_heads)
            by_head = self.fitted.states(layer, example, rows, num_queries)
            torch.mul(
                _by_position(by_head, query_heads),
                self.prefix.trace.layers[layer].scale,
                out=queries[place],
            )
            later_mass = self.fitted.log_later_mass[layer][example, rows, :num_queries]
            log_later_mass[place] = _by_position(later_mass, query_heads)
            num_loaded = place.stop
        return HeadBatch(
            queries=queries.flatten(1, 2),
            factors=_of_every_head(
                self.fitted.factors[:num_queries].to(keys), query_heads, num_heads
            ),
            log_later_mass=log_later_mass.flatten(1, 2),
            keys=keys,
            values=slots.values,
            log_bias=slots.log_bias,
            last_seen=self._last_seen(num_slots, num_queries, query_heads, num_heads, keys.device),
            fit_boost=_of_every_head(self.fitted.fit_boost.to(keys), query_heads, num_heads),
            past=self._past(heads, query_heads),
            num_supervising=query_heads * self.fitted.supervising[0].shape[2],
        )

    def _past(self, heads: list[HeadIndex], query_heads: int) -> PastAttention | None:
        """What the kept queries attended to before it was compressed; None: there are none."""
        past = past_queries(self.prefix.trace)
        if past is None or self.fitted.moved is None or not len(past.positions):
            return None
        log_mass: list[Tensor] = []
        outputs: list[Tensor] = []
        for layer, example, kv_head in heads:
            rows = _query_head_rows([(layer, example, kv_head)], query_heads)
            log_mass.append(_by_position(past.log_mass[layer][example, rows], query_heads))
            of_rows = past.outputs[layer][example, rows].numbers()
            outputs.append(_by_position(of_rows, query_heads))
        return PastAttention(
            first_row=self.fitted.supervising[heads[0][0]].shape[2] * query_heads,
            num_new=self.prefix.num_new,
            log_mass=torch.cat(log_mass).flatten(1, 2),
            outputs=torch.cat(outputs).flatten(1, 2),
        )

    def _last_seen(
        self,
        num_slots: int,
        num_queries: int,
        query_heads: int,
        num_heads: int,
        device: torch.device,
    ) -> Int[Tensor, "heads queries"] | None:
        """Last slot that each query sees, if the queries are the prefix's at their original
        positions.

        After a compact cache only the last slots have queries.
        """
        if self.fitted.num_unseen is None:
            return None
        last = num_slots - 1 - self.fitted.num_unseen[:num_queries].to(device)
        return _of_every_head(last, query_heads, num_heads)


def draw_rows(trace: Trace, fitted: FittedQueries, num_queries: int, seed: int) -> DrawnRows:
    """Rows of each KV head's queries, drawn per example without replacement.

    Rows are counted as in ``Heads.load``.
    """
    drawn = {}
    for example, generator in enumerate(example_generators(trace, seed)):
        for layer, keys in enumerate(trace.keys):
            query_heads = query_heads_per_kv_head(trace, layer)
            num_rows = query_heads * fitted.num_queries
            for head in range(keys.shape[1]):
                order = torch.randperm(num_rows, generator=generator)[:num_queries]
                # from query head by query head to position by position
                query_head = order // fitted.num_queries
                position = order % fitted.num_queries
                rows = position * query_heads + query_head
                drawn[layer, example, head] = rows.sort().values
    return drawn


def query_heads_per_kv_head(trace: Trace, layer: int) -> int:
    """Query heads that read one KV head of a layer."""
    of_layer = trace.layers[layer]
    return of_layer.prefix_queries.shape[1] // of_layer.slots.keys.shape[1]


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


def _select_rows(batch: HeadBatch, heads: list[HeadIndex], drawn: DrawnRows) -> HeadBatch:
    """The batch with the drawn queries alone, all of which are fitted to.

    Kept queries among them attend to the slots of the cache.
    """
    rows = torch.stack([drawn[head] for head in heads]).to(batch.queries.device)
    last_seen = batch.last_seen
    return HeadBatch(
        queries=take(batch.queries, rows),
        factors=batch.factors.gather(1, rows),
        log_later_mass=batch.log_later_mass.gather(1, rows),
        keys=batch.keys,
        values=batch.values,
        log_bias=batch.log_bias,
        last_seen=None if last_seen is None else last_seen.gather(1, rows),
    )
