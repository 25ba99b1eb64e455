"""Attention heads of a trace, taken from all layers and examples into blocks that fit in memory."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

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
        keys: of the slots that the head has of the prefix.
        values: of these slots.
        positions: slots of the queries within the prefix when it supervises itself; None: all see the whole prefix.
        log_bias: nats added to the scores of these slots; None: none.
        weights: what the errors of each query are multiplied by; None: 1.
    """

    queries: Float[Tensor, "heads queries head_dim"]
    keys: Float[Tensor, "heads prefix head_dim"]
    values: Float[Tensor, "heads prefix value_dim"]
    positions: Int[Tensor, "heads queries"] | None
    log_bias: Float[Tensor, "heads prefix"] | None = None
    weights: Float[Tensor, "heads queries"] | None = None

    def select(self, rows: Int[Tensor, " rows"]) -> "HeadBlock":
        """Some of the heads."""
        positions = None if self.positions is None else self.positions[rows]
        log_bias = None if self.log_bias is None else self.log_bias[rows]
        weights = None if self.weights is None else self.weights[rows]
        return HeadBlock(self.queries[rows], self.keys[rows], self.values[rows], positions, log_bias, weights)

    def weighted(
        self, rows: Float[Tensor, "heads queries columns"], chunk: slice
    ) -> Float[Tensor, "heads queries columns"]:
        """Rows of a chunk of queries, each multiplied by its query's weight.

        Args:
            rows: one per query of the chunk.
            chunk: which queries.
        """
        return rows if self.weights is None else rows * self.weights[:, chunk].unsqueeze(-1)

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
    """Heads (layer, example, KV head) in groups of as many slots and queries that are solved together.

    A group's dense scores hold about 2^23 elements, or one head's where that is more.

    Args:
        trace: where the heads come from.
        layers: whose heads; None takes all layers.
    """
    alike: dict[tuple[int, ...], list[Head]] = {}
    for index in range(len(trace.keys)) if layers is None else layers:
        keys, queries = trace.keys[index], trace.queries[index]
        looks = queries.shape[1] // keys.shape[1] * queries.shape[2]
        for example, row in enumerate(trace.counts(index).tolist()):
            for head, slots in enumerate(row):
                shape = looks, slots, keys.shape[3], trace.values[index].shape[3]
                alike.setdefault(shape, []).append((index, example, head))
    groups = []
    for (looks, slots, *_), heads in alike.items():
        step = max(1, _BLOCK_ELEMENTS // (looks * slots))
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


def load_block(
    trace: Trace,
    heads: list[Head],
    drawn: dict[Head, Int[Tensor, " drawn"]] | None,
    weights: Mapping[int, Float[Tensor, "batch heads queries"]] | None = None,
) -> HeadBlock:
    """The tensors of one group of heads.

    Args:
        trace: where they come from.
        heads: of equal shape.
        drawn: which queries to take; None: all.
        weights: by layer, of the queries' errors; None: 1.
    """
    layer, _, _ = heads[0]
    group = trace.queries[layer].shape[1] // trace.keys[layer].shape[1]
    keys, values, biases = zip(*(trace.head(*head) for head in heads), strict=True)
    # of a prefix that supervises itself, behind a compact cache only the last slots have queries
    last, first = len(keys[0]), len(keys[0]) - trace.queries[layer].shape[2]
    causal = trace.supervision == "self"
    queries, positions, counted = [], [], []
    for index, example, head in heads:
        part = slice(head * group, (head + 1) * group)
        own = trace.queries[index][example, part].flatten(0, 1)
        chosen = None if drawn is None else drawn[index, example, head].to(own.device)
        queries.append(wide(own if chosen is None else own[chosen]) * trace.scales[index])
        if weights is not None:
            own = wide(weights[index][example, part].flatten())
            counted.append(own if chosen is None else own[chosen])
        if causal:
            at = torch.arange(first, last, device=own.device).repeat(group)
            positions.append(at if chosen is None else at[chosen])
    return HeadBlock(
        torch.stack(queries),
        wide(torch.stack(keys)),
        wide(torch.stack(values)),
        torch.stack(positions) if causal else None,
        None if trace.log_bias is None else wide(torch.stack([bias for bias in biases if bias is not None])),
        torch.stack(counted) if counted else None,
    )


def _later(
    slots: Int[Tensor, "heads slots"], positions: Int[Tensor, "heads queries"]
) -> Bool[Tensor, "heads queries slots"]:
    return slots.unsqueeze(1) > positions.unsqueeze(2)
