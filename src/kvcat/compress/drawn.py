"""Attention Matching with a draw of the queries, as in the paper: the edge of the usual fit."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from kvcat.compress.base import example_generators
from kvcat.compress.head_attention import DenseAttention, HeadBatch, dense_attention
from kvcat.compress.heads import HeadIndex, Heads
from kvcat.compress.query_set import QuerySet
from kvcat.compress.trace import Trace
from kvcat.types import Int, Tensor


@dataclass(frozen=True)
class DrawnHeads(Heads):
    """Heads with some of the queries, all of which are fitted to.

    Args:
        num_drawn: queries of each KV head.
        seed: of the draw.
    """

    num_drawn: int
    seed: int

    def load(self, heads: list[HeadIndex]) -> HeadBatch:
        """The tensors of a group of heads with the drawn queries."""
        rows = torch.stack([self._rows[head] for head in heads])
        return super().load(heads).with_queries(rows)

    def fitted_attention(self, heads: list[HeadIndex]) -> tuple[HeadBatch, DenseAttention]:
        """The drawn queries, none of which is left out."""
        batch = self.load(heads)
        return batch, dense_attention(batch)

    @cached_property
    def _rows(self) -> dict[HeadIndex, Int[Tensor, " drawn"]]:
        """Rows of each head's queries that are used."""
        return draw_rows(self.prefix.trace, self.queries, self.num_drawn, self.seed)


def draw_rows(
    trace: Trace, queries: Sequence[QuerySet], num_queries: int, seed: int
) -> dict[HeadIndex, Int[Tensor, " drawn"]]:
    """Rows of each KV head's queries, drawn per example without replacement, ascending.

    Rows are counted as in ``Heads.load``.
    """
    drawn = {}
    num_positions = sum(map(len, queries))
    for example, generator in enumerate(example_generators(trace, seed)):
        for layer, keys in enumerate(trace.keys):
            query_heads = trace.layers[layer].query_heads
            num_rows = query_heads * num_positions
            for head in range(keys.shape[1]):
                order = torch.randperm(num_rows, generator=generator)[:num_queries]
                # from query head by query head to position by position
                query_head = order // num_positions
                position = order % num_positions
                rows = position * query_heads + query_head
                drawn[layer, example, head] = rows.sort().values
    return drawn
