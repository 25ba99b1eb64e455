"""Attention of KV heads in a batch, over the whole prefix or over some of its slots."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch

from kvcat.attention.chunks import exp_below
from kvcat.memory import CPU_CACHE_ELEMENTS, rows_per_chunk
from kvcat.types import Float, Int, Tensor, at_least_float32

_LEAST_SHARE = 1e-6
NUM_SAMPLED = 128
"""Queries of each kind that represent all of a head's in ``SampledAttention``."""


@dataclass(frozen=True)
class PastAttention:
    """Attention of kept queries over the tokens of a compact cache (``Past.queries``).

    Args:
        first_row: of these queries among those of the batch, where they follow each other.
        num_new: number of slots after those of the cache, which are exact.
        log_mass: of each query on the tokens of the cache, nats.
        outputs: its attention over them.
    """

    first_row: int
    num_new: int
    log_mass: Float[Tensor, "heads kept"]
    outputs: Float[Tensor, "heads kept value_dim"]

    @property
    def rows(self) -> slice:
        """The rows of these queries in the batch."""
        return slice(self.first_row, self.first_row + self.log_mass.shape[1])

    def of(self, heads: slice) -> "PastAttention":
        """The attention of some heads."""
        return replace(self, log_mass=self.log_mass[heads], outputs=self.outputs[heads])


@dataclass(frozen=True)
class HeadBatch:
    """KV heads with the slots of their prefix and the queries that read them, in at least float32.

    Args:
        queries: multiplied by the layer's scale.
        factors: weight of each query, as in ``QuerySet``.
        log_elsewhere, counts_all: as in ``QuerySet``, of each query.
        keys, values: keys and values of the prefix's slots in this head.
        log_bias: nats added to the scores of these slots; None adds none.
        last_seen: last slot that each query sees; None: all see the whole prefix.
        past: what some of the queries attended to before it was compressed; None: all attend to the
            slots.
        num_supervising: number of the first queries, which are supervising ones; the others are the
            prefix's own.
    """

    queries: Float[Tensor, "heads queries head_dim"]
    factors: Float[Tensor, "heads queries"]
    log_elsewhere: Float[Tensor, "heads queries"]
    keys: Float[Tensor, "heads prefix head_dim"]
    values: Float[Tensor, "heads prefix value_dim"]
    log_bias: Float[Tensor, "heads prefix"] | None = None
    last_seen: Int[Tensor, "heads queries"] | None = None
    past: PastAttention | None = None
    num_supervising: int = 0
    counts_all: bool = False

    def split(self, num_heads: int) -> Iterator["HeadBatch"]:
        """The batch in smaller batches of ``num_heads`` heads, the last of the remaining ones."""
        not_tensors = ("past", "num_supervising", "counts_all")
        names = [field.name for field in fields(self) if field.name not in not_tensors]
        tensors = [getattr(self, name) for name in names]
        for start in range(0, len(self.keys), num_heads):
            heads = slice(start, start + num_heads)
            selected: list[Any] = [None if x is None else x[heads] for x in tensors]
            past = None if self.past is None else self.past.of(heads)
            yield HeadBatch(
                *selected,
                past=past,
                num_supervising=self.num_supervising,
                counts_all=self.counts_all,
            )

    def with_queries(
        self,
        rows: Int[Tensor, "heads chosen"],
        boosts: Float[Tensor, "heads chosen"] | float = 1.0,
    ) -> "HeadBatch":
        """The batch with some queries of each head alone.

        Kept queries among them attend to the slots of the cache.

        Args:
            rows: of the queries.
            boosts: further factors of their weights.
        """
        rows = rows.to(self.queries.device)
        return HeadBatch(
            queries=take(self.queries, rows),
            factors=self.factors.gather(1, rows) * boosts,
            log_elsewhere=self.log_elsewhere.gather(1, rows),
            keys=self.keys,
            values=self.values,
            log_bias=self.log_bias,
            last_seen=None if self.last_seen is None else self.last_seen.gather(1, rows),
            counts_all=self.counts_all,
        )

    def shares(
        self, rows: slice, log_mass: Float[Tensor, "heads rows"]
    ) -> Float[Tensor, "heads rows"]:
        """The share of some queries' attention that goes to the slots, from its mass on them."""
        if self.counts_all:  # rounding may make the part larger than the whole
            return (log_mass - self.log_elsewhere[:, rows]).clamp_max(0.0).exp_()
        return (log_mass - self.log_elsewhere[:, rows]).sigmoid_()

    def scores(
        self,
        rows: slice | Tensor = slice(None),
        slots: Int[Tensor, "heads slots"] | None = None,
        out: Tensor | None = None,
        keys: Float[Tensor, "heads slots head_dim"] | None = None,
    ) -> Float[Tensor, "heads rows slots"]:
        """Scores scale q.k + log-bias of some queries against some slots; -inf for an unseen slot.

        Args:
            rows: of the queries.
            slots: positions in the prefix; None: all of them.
            out: where the scores are written to; None: a new tensor.
            keys: of these slots, rounded; None: their keys.
        """
        if keys is None:
            keys = self.keys if slots is None else take(self.keys, slots)
        scores = torch.matmul(self.queries[:, rows], keys.mT, out=out)
        if self.log_bias is not None:
            bias = self.log_bias if slots is None else self.log_bias.gather(1, slots)
            scores += bias.unsqueeze(1)
        if self.last_seen is not None:
            positions = slots
            if positions is None:
                positions = torch.arange(keys.shape[1], device=keys.device).expand(len(keys), -1)
            unseen = positions.unsqueeze(1) > self.last_seen[:, rows].unsqueeze(2)
            scores.masked_fill_(unseen, -torch.inf)
        return scores


class Attended(NamedTuple):
    """Attention of some queries over some slots.

    Args:
        log_mass: log sum of exp(score) over the slots, nats.
        outputs: their values, averaged by attention.
    """

    log_mass: Float[Tensor, "*heads queries"]
    outputs: Float[Tensor, "*heads queries value_dim"]

    @classmethod
    def over(
        cls,
        scores: Float[Tensor, "*heads queries slots"],
        values: Float[Tensor, "... slots value_dim"],
    ) -> "Attended":
        """The attention with these scores; values are those of every row of the heads."""
        return cls(scores.logsumexp(-1), scores.softmax(-1) @ values)

    def joined(self, other: "Attended") -> "Attended":
        """The attention over the slots of both."""
        log_mass = torch.logaddexp(self.log_mass, other.log_mass)
        outputs = (self.log_mass - log_mass).exp().unsqueeze(-1) * self.outputs
        outputs = outputs + (other.log_mass - log_mass).exp().unsqueeze(-1) * other.outputs
        return Attended(log_mass, outputs)


class SampledAttention(NamedTuple):
    """Weighted attention of a few queries, which represent all, to the first slots in the order.

    Args:
        attention: P, attention weights over the prefix times the queries' weights.
        outputs: O, attention over the whole prefix times the same weights.
        values: V, of the slots.
        energy: |P|^2 of all queries over the whole prefix.
    """

    attention: Float[Tensor, "heads sampled slots"]
    outputs: Float[Tensor, "heads sampled value_dim"]
    values: Float[Tensor, "heads slots value_dim"]
    energy: Float[Tensor, " heads"]


class DenseAttention(NamedTuple):
    """Attention of a batch of heads over the whole prefix.

    Args:
        log_mass: for each query, log sum over the prefix of exp(score), nats.
        mass: the same sum with each query's largest score subtracted from its scores.
        outputs: attention over the prefix, times the weights.
        weights: what each query's error is multiplied by; at least a millionth of its factor.
        importance: for each slot, its attention weights times the queries' weights, squared and
            summed over all queries, also over those that are not fitted to.
        peaks: for each slot, the square of the largest share of a supervising or kept query's
            attention, whatever the query's factor; 0 without any.
        order: the slots in the order in which they are kept.
        rows, boosts: of ``HeadBatch.with_queries``, which makes the batch of these queries from
            that of all.
    """

    log_mass: Float[Tensor, "heads queries"]
    mass: Float[Tensor, "heads queries"]
    outputs: Float[Tensor, "heads queries value_dim"]
    weights: Float[Tensor, "heads queries"]
    importance: Float[Tensor, "heads prefix"]
    peaks: Float[Tensor, "heads prefix"]
    order: Int[Tensor, "heads prefix"]
    rows: Int[Tensor, "heads queries"]
    boosts: Float[Tensor, "heads queries"]

    def split(self) -> Iterator["DenseAttention"]:
        """The attention of each head alone, without the dimension of heads."""
        return map(DenseAttention._make, zip(*self, strict=True))

    @classmethod
    def batched(cls, single: Sequence["DenseAttention"]) -> "DenseAttention":
        """The attention of several heads of equal shape, from that of each alone, in at least
        float32.
        """
        several = cls(*(torch.stack(tensors) for tensors in zip(*single, strict=True)))
        return several._replace(outputs=at_least_float32(several.outputs))

    def in_16_bits(self) -> "DenseAttention":
        """The attention with outputs in bfloat16, which changes them by 1 in 256 at most."""
        return self._replace(outputs=self.outputs.bfloat16())

    def order_alone(self) -> "DenseAttention":
        """One head's slots in their order with their peaks, and the choice of its queries."""
        return DenseAttention(
            log_mass=self.log_mass[:0],
            mass=self.mass[:0],
            outputs=self.outputs[:0],
            weights=self.weights[:0],
            importance=self.importance[:0],
            peaks=self.peaks.clone(),
            order=self.order.clone(),
            rows=self.rows.clone(),
            boosts=self.boosts.clone(),
        )

    def first_slots(self, num_slots: int) -> Int[Tensor, "heads slots"]:
        """The positions of the first slots in the order, ascending."""
        return self.order[:, :num_slots].sort(dim=-1).values

    def sampled(self, batch: HeadBatch, num_slots: int) -> SampledAttention:
        """The attention of at most ``NUM_SAMPLED`` supervising queries, and as many of the
        prefix's own, to the first slots in the order.

        Queries are drawn with a fixed seed; the weight of each is multiplied by the root of the
        number that it represents. The two kinds are drawn apart: in one draw from both, few of the
        kind with fewer queries would represent all of it. They are not evenly spaced, because the
        query heads alternate among the rows.

        Args:
            batch: the same heads and queries.
            num_slots: a head with fewer gives all.
        """
        slots = self.order[:, :num_slots]
        generator = torch.Generator().manual_seed(0)
        num_supervising = batch.num_supervising
        drawn = []
        roots = []
        for start, stop in ((0, num_supervising), (num_supervising, self.weights.shape[1])):
            count = stop - start
            of_kind = start + torch.randperm(count, generator=generator)[:NUM_SAMPLED]
            drawn.append(of_kind)
            roots.append(torch.full([len(of_kind)], (count / max(1, len(of_kind))) ** 0.5))
        rows = torch.cat(drawn).to(slots.device)
        factors = torch.cat(roots).to(self.weights).unsqueeze(-1)
        weights = self.weights[:, rows].unsqueeze(-1) * factors
        log_mass = self.log_mass[:, rows].unsqueeze(-1)
        return SampledAttention(
            attention=batch.scores(rows, slots).sub_(log_mass).exp_().mul_(weights),
            outputs=self.outputs[:, rows] * factors,
            values=take(batch.values, slots),
            energy=self.importance.sum(-1),
        )

    def add_chunk(self, batch: HeadBatch, rows: slice, space: Tensor) -> None:
        """Write the results for some of the queries, and add these queries' share to the
        importance and peaks.

        Args:
            batch: the same heads.
            rows: of the queries.
            space: memory for the scores, (heads, rows, prefix).
        """
        scores = batch.scores(rows, out=space)
        largest = scores.amax(-1, keepdim=True)
        exponentials = exp_below(largest, scores)  # (heads, rows, prefix)
        sums = exponentials.sum(-1)
        log_sums = sums.log().add_(largest.squeeze(-1))
        share_of_prefix = batch.shares(rows, log_sums)
        weights = batch.factors[:, rows] * share_of_prefix.clamp_min_(_LEAST_SHARE)
        weight_per_sum = weights / sums
        self.log_mass[:, rows] = log_sums
        self.mass[:, rows] = sums
        self.weights[:, rows] = weights
        if self.outputs.shape[1]:
            outputs = torch.bmm(exponentials, batch.values, out=self.outputs[:, rows])
            outputs.mul_(weight_per_sum.unsqueeze(-1))
        squares = weight_per_sum.square_().unsqueeze(1) @ exponentials.square_()
        self.importance.add_(squares.squeeze(1))
        # those kept of earlier repetitions follow those of the last one
        num_kept = 0 if batch.past is None else batch.past.log_mass.shape[1]
        num_sharp = batch.num_supervising + num_kept
        if rows.start < num_sharp:
            squares = exponentials[:, : num_sharp - rows.start]
            # a query that represents others attends to a slot no more than one that does not
            share_per_sum = (share_of_prefix / sums)[:, : squares.shape[1]]
            squares.mul_(share_per_sum.square_().unsqueeze(-1))
            torch.maximum(self.peaks, squares.amax(1), out=self.peaks)

    def set_past(self, batch: HeadBatch, past: PastAttention) -> None:
        """Put what the kept queries attended to in the place of their attention to the cache.

        Their importance for the slots stays.

        Args:
            batch: the same heads.
            past: of the batch.
        """
        rows = past.rows
        num_slots = batch.keys.shape[1]
        first_new = num_slots - past.num_new
        new_slots = torch.arange(first_new, num_slots, device=batch.keys.device)
        scores = batch.scores(rows, slots=new_slots.expand(len(batch.keys), -1))
        new = Attended.over(scores, batch.values[:, first_new:])
        whole = Attended(past.log_mass, past.outputs).joined(new)
        share_of_prefix = batch.shares(rows, whole.log_mass)
        weights = batch.factors[:, rows] * share_of_prefix.clamp_min(_LEAST_SHARE)
        largest = self.log_mass[:, rows] - self.mass[:, rows].log()
        self.mass[:, rows] = (whole.log_mass - largest).exp()
        self.log_mass[:, rows] = whole.log_mass
        self.weights[:, rows] = weights
        if self.outputs.shape[1]:
            self.outputs[:, rows] = whole.outputs * weights.unsqueeze(-1)


def dense_attention(
    batch: HeadBatch, *, outputs: bool = True, cpu_elements: int = CPU_CACHE_ELEMENTS
) -> DenseAttention:
    """Attention of a batch of heads over the whole prefix.

    Some heads and some queries at a time, so that on a CPU their scores stay in its cache.

    Args:
        batch: of heads.
        outputs: False: without them, for which the result has no rows.
        cpu_elements: most scores that exist at once on a CPU, if one query has no more.
    """
    num_heads, num_rows, _ = batch.queries.shape
    _, prefix_len, value_dim = batch.values.shape
    device = batch.keys.device
    # few heads with many queries each: products of many rows are faster
    heads_at_once = rows_per_chunk(num_rows * prefix_len, device, cpu_elements=cpu_elements)
    heads_at_once = min(num_heads, heads_at_once)
    rows_at_once = rows_per_chunk(heads_at_once * prefix_len, device, cpu_elements=cpu_elements)
    rows_at_once = min(num_rows, rows_at_once)
    numbers = batch.queries.new_empty(num_heads, num_rows)
    attention = DenseAttention(
        log_mass=torch.empty_like(numbers),
        mass=torch.empty_like(numbers),
        outputs=batch.values.new_empty(num_heads, num_rows if outputs else 0, value_dim),
        weights=torch.empty_like(numbers),
        importance=batch.values.new_zeros(num_heads, prefix_len),
        peaks=batch.values.new_zeros(num_heads, prefix_len),
        order=torch.empty(num_heads, prefix_len, dtype=torch.long, device=device),
        rows=torch.arange(num_rows, device=device).expand(num_heads, -1),
        boosts=numbers.new_ones(1).expand(num_heads, num_rows),
    )
    # all chunks write their scores to the same memory
    space = batch.queries.new_empty(heads_at_once, rows_at_once, prefix_len)
    for index, some_heads in enumerate(batch.split(heads_at_once)):
        heads = slice(index * heads_at_once, (index + 1) * heads_at_once)
        target = DenseAttention(*(tensor[heads] for tensor in attention))
        for start in range(0, num_rows, rows_at_once):
            rows = slice(start, start + rows_at_once)
            chunk_space = space[: len(some_heads.keys), : num_rows - start]
            target.add_chunk(some_heads, rows, chunk_space)
    if batch.past is not None:
        attention.set_past(batch, batch.past)
    # stable: of equal importances, the earlier slot is kept
    order = attention.importance.sort(dim=-1, descending=True, stable=True).indices
    attention.order.copy_(order)
    return attention


def take(
    states: Float[Tensor, "heads prefix head_dim"], slots: Int[Tensor, "heads slots"]
) -> Float[Tensor, "heads slots head_dim"]:
    """Keys or values at the given positions of each head."""
    num_heads, prefix_len, _ = states.shape
    first_rows = prefix_len * torch.arange(num_heads, device=slots.device)
    rows = slots + first_rows.unsqueeze(1)
    # on CPUs several times as fast as gather, which goes channel by channel
    selected = states.flatten(0, 1).index_select(0, rows.flatten())
    return selected.unflatten(0, slots.shape)
