"""KV heads of all layers and examples, in batches that are fitted together and fit in memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kvcat.compress.base import example_generators, wide
from kvcat.compress.queries import FittedQueries
from kvcat.compress.trace import Trace
from kvcat.types import Float, Int, Tensor

HeadIndex = tuple[int, int, int]
_BATCH_ELEMENTS = 2**23
_LEAST_SHARE = 1e-6


@dataclass(frozen=True)
class HeadBatch:
    """KV heads with their keys, values and the queries that read them, in at least float32.

    Args:
        queries: multiplied by the layer's scale.
        factors, log_rest: of the queries, as in ``FittedQueries``.
        keys: of the slots that the head has of the prefix.
        values: of these slots.
        log_bias: nats added to the scores of these slots; None: none.
        last: last slot that each query sees; None: all see the whole prefix.
    """

    queries: Float[Tensor, "heads queries head_dim"]
    factors: Float[Tensor, "heads queries"]
    log_rest: Float[Tensor, "heads queries"]
    keys: Float[Tensor, "heads prefix head_dim"]
    values: Float[Tensor, "heads prefix value_dim"]
    log_bias: Float[Tensor, "heads prefix"] | None = None
    last: Int[Tensor, "heads queries"] | None = None

    def select(self, rows: Int[Tensor, " rows"]) -> "HeadBatch":
        """Some of the heads."""
        taken: dict[str, Any] = {name: None if x is None else x[rows] for name, x in vars(self).items()}
        return HeadBatch(**taken)

    def query_chunks(self) -> Iterator[slice]:
        """Ranges of queries whose scores against the whole prefix fit in memory."""
        step = max(1, _BATCH_ELEMENTS // (self.keys.shape[0] * self.keys.shape[1]))
        for start in range(0, self.queries.shape[1], step):
            yield slice(start, start + step)

    def scores(
        self, chunk: slice = slice(None), slots: Int[Tensor, "heads slots"] | None = None
    ) -> Float[Tensor, "heads queries slots"]:
        """Scores of a chunk of queries against some slots: scale q.k + log-bias, -inf where one is not seen."""
        keys = self.keys if slots is None else take(self.keys, slots)
        scores = self.queries[:, chunk] @ keys.mT
        if self.log_bias is not None:
            scores += (self.log_bias if slots is None else self.log_bias.gather(1, slots)).unsqueeze(1)
        if self.last is not None:
            at = torch.arange(keys.shape[1], device=keys.device).expand(len(keys), -1) if slots is None else slots
            scores.masked_fill_(at.unsqueeze(1) > self.last[:, chunk].unsqueeze(2), -torch.inf)
        return scores


@dataclass(frozen=True)
class DenseAttention:
    """What a batch of heads gives on the whole prefix.

    Args:
        log_mass: log sum over the prefix of exp(score), nats.
        mass: the same sum with each query's largest score taken off its scores.
        outputs: attention over the prefix.
        weights: what the error of each query is multiplied by; a millionth of its factor at least.
        importance: how much attention each slot gets: over all queries, the sum of its squared attention weights, each
            times the query's own weight.
    """

    log_mass: Float[Tensor, "heads queries"]
    mass: Float[Tensor, "heads queries"]
    outputs: Float[Tensor, "heads queries value_dim"]
    weights: Float[Tensor, "heads queries"]
    importance: Float[Tensor, "heads prefix"]

    def select(self, rows: Int[Tensor, " rows"]) -> "DenseAttention":
        """Some of the heads."""
        return DenseAttention(**{name: x[rows] for name, x in vars(self).items()})


def dense_attention(batch: HeadBatch) -> DenseAttention:
    """Attention of a batch of heads over the whole prefix, in chunks of queries."""
    parts, importance = [], torch.zeros_like(batch.keys[..., 0])
    for chunk in batch.query_chunks():
        attention = batch.scores(chunk)
        top = attention.amax(-1, keepdim=True)
        attention = attention.sub_(top).exp_()
        mass = attention.sum(-1)
        log_mass = top.squeeze(-1) + mass.log()
        weights = batch.factors[:, chunk] * (log_mass - batch.log_rest[:, chunk]).sigmoid().clamp_min(_LEAST_SHARE)
        attention = attention.div_(mass.unsqueeze(-1))
        parts.append((log_mass, mass, attention @ batch.values, weights))
        importance += attention.mul_(weights.unsqueeze(-1)).square_().sum(-2)
    log_mass, mass, outputs, weights = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    return DenseAttention(log_mass, mass, outputs, weights, importance)


def take(
    states: Float[Tensor, "heads prefix head_dim"], slots: Int[Tensor, "heads slots"]
) -> Float[Tensor, "heads slots head_dim"]:
    """Keys or values at the given positions of each head."""
    return states.gather(1, slots.unsqueeze(-1).expand(-1, -1, states.shape[-1]))


def head_groups(trace: Trace, fitted: FittedQueries) -> list[list[HeadIndex]]:
    """Heads (layer, example, KV head) in groups of equal shape that are solved together.

    A group's dense scores hold about 2^23 elements, or one head's where that is more.
    """
    alike: dict[tuple[int, ...], list[HeadIndex]] = {}
    for layer, (keys, queries) in enumerate(zip(trace.keys, fitted.queries, strict=True)):
        count = queries.shape[1] // keys.shape[1] * queries.shape[2]
        for example, row in enumerate(trace.counts(layer).tolist()):
            for head, slots in enumerate(row):
                shape = count, slots, keys.shape[3], trace.values[layer].shape[3]
                alike.setdefault(shape, []).append((layer, example, head))
    groups = []
    for (count, slots, *_), heads in alike.items():
        step = max(1, _BATCH_ELEMENTS // (count * slots))
        groups += [heads[start : start + step] for start in range(0, len(heads), step)]
    return groups


def draw_queries(
    trace: Trace, fitted: FittedQueries, num_queries: int, seed: int
) -> dict[HeadIndex, Int[Tensor, " drawn"]]:
    """Which of a KV head's queries are used, drawn per example without replacement."""
    drawn = {}
    for example, generator in enumerate(example_generators(trace, seed)):
        for layer, (keys, queries) in enumerate(zip(trace.keys, fitted.queries, strict=True)):
            available = queries.shape[1] // keys.shape[1] * queries.shape[2]
            for head in range(keys.shape[1]):
                order = torch.randperm(available, generator=generator)[:num_queries]
                drawn[layer, example, head] = order.sort().values
    return drawn


def load_heads(
    trace: Trace,
    fitted: FittedQueries,
    heads: list[HeadIndex],
    drawn: dict[HeadIndex, Int[Tensor, " drawn"]] | None = None,
) -> HeadBatch:
    """The tensors of one group of heads."""
    layer, _, _ = heads[0]
    group = fitted.queries[layer].shape[1] // trace.keys[layer].shape[1]
    keys, values, biases = zip(*(trace.head(*head) for head in heads), strict=True)
    # behind a compact cache, only the last slots of a prefix that supervises itself have queries
    first, last = len(keys[0]) - fitted.queries[layer].shape[2], len(keys[0])
    columns: list[list[Tensor]] = [[], [], [], []]
    for index, example, head in heads:
        part = slice(head * group, (head + 1) * group)
        own = [x[index][example, part].flatten(0, 1) for x in (fitted.queries, fitted.factors, fitted.log_rest)]
        own = [
            wide(own[0]) * trace.scales[index],
            *own[1:],
            torch.arange(first, last, device=own[0].device).repeat(group),
        ]
        chosen = slice(None) if drawn is None else drawn[index, example, head].to(own[0].device)
        for column, x in zip(columns, own, strict=True):
            column.append(x[chosen])
    queries, factors, log_rest, seen = (torch.stack(column) for column in columns)
    return HeadBatch(
        queries,
        factors,
        log_rest,
        wide(torch.stack(keys)),
        wide(torch.stack(values)),
        None if trace.log_bias is None else wide(torch.stack([bias for bias in biases if bias is not None])),
        seen if fitted.causal else None,
    )
