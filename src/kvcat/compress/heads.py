"""Attention heads of a trace, taken from all layers and examples into blocks that fit in memory."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

import torch

from kvcat.compress.common import example_generators, wide
from kvcat.compress.tracing import Trace
from kvcat.types import Bool, Float, Int, Tensor

Head = tuple[int, int, int]
_BLOCK_ELEMENTS = 2**23


@dataclass(frozen=True)
class HeadBlock:
    """KV heads with their keys, values and the queries that read them, in at least float32.

    Args:
        queries: multiplied by the layer's scale.
        keys: of the prefix.
        values: of the prefix.
        positions: slots of the queries within the prefix when it supervises itself; None: all see the whole prefix.
        log_bias: nats added to the scores of the prefix's slots; None: none.
    """

    queries: Float[Tensor, "heads queries head_dim"]
    keys: Float[Tensor, "heads prefix head_dim"]
    values: Float[Tensor, "heads prefix value_dim"]
    positions: Int[Tensor, "heads queries"] | None
    log_bias: Float[Tensor, "heads prefix"] | None = None

    def select(self, rows: Int[Tensor, " rows"]) -> "HeadBlock":
        """Some of the heads."""
        positions = None if self.positions is None else self.positions[rows]
        log_bias = None if self.log_bias is None else self.log_bias[rows]
        return HeadBlock(self.queries[rows], self.keys[rows], self.values[rows], positions, log_bias)

    def query_chunks(self) -> Iterator[slice]:
        """Ranges of queries whose scores against the whole prefix fit in memory."""
        heads, prefix, _ = self.keys.shape
        step = max(1, _BLOCK_ELEMENTS // (heads * prefix))
        for start in range(0, self.queries.shape[1], step):
            yield slice(start, start + step)

    def scores(
        self, chunk: slice, slots: Int[Tensor, "heads slots"] | None = None
    ) -> Float[Tensor, "heads queries slots"]:
        """Scores of a chunk of queries against the kept keys, or all: scale q.k + log-bias, -inf where one is not seen.

        Args:
            chunk: which queries.
            slots: positions of the kept keys; None takes the whole prefix.
        """
        keys = self.keys if slots is None else take(self.keys, slots)
        scores = self.queries[:, chunk] @ keys.mT
        if self.log_bias is not None:
            scores += (self.log_bias if slots is None else self.log_bias.gather(1, slots)).unsqueeze(1)
        if self.positions is not None:
            at = torch.arange(keys.shape[1], device=keys.device).expand(len(keys), -1) if slots is None else slots
            scores = scores.masked_fill(_later(at, self.positions[:, chunk]), -torch.inf)
        return scores


def take(
    states: Float[Tensor, "heads prefix head_dim"], slots: Int[Tensor, "heads slots"]
) -> Float[Tensor, "heads slots head_dim"]:
    """Keys or values at the given positions of each head."""
    return states.gather(1, slots.unsqueeze(-1).expand(-1, -1, states.shape[-1]))


def head_groups(trace: Trace, layers: Iterable[int] | None = None) -> list[list[Head]]:
    """Heads (layer, example, KV head) in groups of equal shape that are solved together.

    A group's dense scores hold about 2^23 elements, or one head's where that is more.

    Args:
        trace: where the heads come from.
        layers: whose heads; None takes all layers.
    """

    def shapes(layer: int) -> tuple[torch.Size, ...]:
        return trace.keys[layer].shape, trace.values[layer].shape, trace.queries[layer].shape

    groups = []
    for _, same in groupby(range(len(trace.keys)) if layers is None else layers, shapes):
        alike = list(same)
        first = alike[0]
        heads = [(i, b, h) for i in alike for b in range(trace.batch_size) for h in range(trace.keys[first].shape[1])]
        queries = trace.queries[first].shape[1] // trace.keys[first].shape[1] * trace.queries[first].shape[2]
        step = max(1, _BLOCK_ELEMENTS // (queries * trace.keys[first].shape[2]))
        groups += [heads[start : start + step] for start in range(0, len(heads), step)]
    return groups


def draw_queries(trace: Trace, num_queries: int | None, seed: int) -> dict[Head, Int[Tensor, " drawn"]] | None:
    """Which of a KV head's queries are used, drawn per example without replacement; None: all of them.

    Args:
        trace: the tokens of its prefixes and the seed determine the draw.
        num_queries: at most this many per KV head; None: all.
        seed: any integer.
    """
    if num_queries is None:
        return None
    drawn = {}
    for example, generator in enumerate(example_generators(trace, seed)):
        for layer, (keys, queries) in enumerate(zip(trace.keys, trace.queries, strict=True)):
            available = queries.shape[1] // keys.shape[1] * queries.shape[2]
            for head in range(keys.shape[1]):
                order = torch.randperm(available, generator=generator)[:num_queries]
                drawn[layer, example, head] = order.sort().values
    return drawn


def load_block(trace: Trace, heads: list[Head], drawn: dict[Head, Int[Tensor, " drawn"]] | None) -> HeadBlock:
    """The tensors of one group of heads.

    Args:
        trace: where they come from.
        heads: of equal shape.
        drawn: which queries to take; None: all.
    """
    layer, _, _ = heads[0]
    group = trace.queries[layer].shape[1] // trace.keys[layer].shape[1]
    # of a prefix that supervises itself, behind a compact cache only the last slots have queries
    last, first = trace.keys[layer].shape[2], trace.keys[layer].shape[2] - trace.queries[layer].shape[2]
    causal = trace.supervision == "self"
    queries, positions = [], []
    for index, example, head in heads:
        own = trace.queries[index][example, head * group : (head + 1) * group].flatten(0, 1)
        chosen = None if drawn is None else drawn[index, example, head].to(own.device)
        queries.append(wide(own if chosen is None else own[chosen]) * trace.scales[index])
        if causal:
            at = torch.arange(first, last, device=own.device).repeat(group)
            positions.append(at if chosen is None else at[chosen])
    return HeadBlock(
        torch.stack(queries),
        wide(torch.stack([trace.keys[i][b, h] for i, b, h in heads])),
        wide(torch.stack([trace.values[i][b, h] for i, b, h in heads])),
        torch.stack(positions) if causal else None,
        None if trace.log_bias is None else wide(torch.stack([trace.log_bias[i][b, h] for i, b, h in heads])),
    )


def _later(
    slots: Int[Tensor, "heads slots"], positions: Int[Tensor, "heads queries"]
) -> Bool[Tensor, "heads queries slots"]:
    return slots.unsqueeze(1) > positions.unsqueeze(2)
