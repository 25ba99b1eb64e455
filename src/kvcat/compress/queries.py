"""What Attention Matching fits to: queries with weights, and KV heads in batches that fit in memory."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch

from kvcat.compress.base import example_generators
from kvcat.compress.trace import Trace, sampled_positions
from kvcat.errors import InputError
from kvcat.losses.terms import wide
from kvcat.models.rotation import KeyRotation
from kvcat.types import Float, Int, Tensor

HeadIndex = tuple[int, int, int]
"""Layer, example, KV head."""
Drawn = dict[HeadIndex, Int[Tensor, " drawn"]]
_LEAST_PARTS, _PART_TOKENS, _FITTED_PER_TOKEN = 3, 256, 1.5
_CHUNK_ELEMENTS, _CHUNK_ROWS = 2**21, 64
_BATCH_ELEMENTS, _CACHED_ELEMENTS, _DEVICE_ELEMENTS = 2**24, 2**19, 2**26
_LEAST_SHARE = 1e-6


@dataclass(frozen=True)
class MovedQueries:
    """The prefix's own queries, turned by the model's rotary embedding to stand right behind parts of the prefix.

    Args:
        rotation: of the model.
        rows: of the queries that the trace keeps; those that are fitted to stand first.
        shifts: positions that each is moved by.
        log_rest: per layer, mass of the keys of its part that each query sees, nats.
        boost: as in ``FittedQueries``.
    """

    rotation: KeyRotation
    rows: Int[Tensor, " queries"]
    shifts: Int[Tensor, " queries"]
    log_rest: Sequence[Float[Tensor, "batch heads queries"]]
    boost: Float[Tensor, " fitted"]


@dataclass(frozen=True)
class FittedQueries:
    """The queries to fit to; the error of each counts times factor * m / (m + exp(log_rest)).

    m is the mass of the prefix, so that the quotient is the share of the query's attention that goes to the prefix.

    Args:
        trace: that the queries come from.
        given: per layer, the supervising queries, which stand first.
        own: the prefix's own queries, which stand behind them; None: none.
        factors: of the queries.
        log_rest: per layer, mass of the keys behind the prefix that each query sees, nats; -inf where all count alike.
        boost: factors, beside ``factors``, of those that log-bias and values are fitted to, which stand first; the rest
            only choose keys.
        causal: the queries are the prefix's own at their own positions, and see no later key.
    """

    trace: Trace
    given: Sequence[Float[Tensor, "batch heads given head_dim"]]
    own: MovedQueries | None
    factors: Float[Tensor, " queries"]
    log_rest: Sequence[Float[Tensor, "batch heads queries"]]
    boost: Float[Tensor, " fitted"]
    causal: bool = False

    def parts(
        self, layer: int, example: int, heads: list[int], count: int | None = None
    ) -> list[Float[Tensor, "heads _ head_dim"]]:
        """The first ``count`` queries of some heads, given and own; these are moved at every call, to hold none."""
        given, every = self.given[layer][example], self.trace.prefix_queries[layer][example]
        numbers = torch.tensor(heads, device=given.device)
        given = given.index_select(0, numbers)
        if self.own is None:
            return [given[:, :count]]
        few = slice(None if count is None else count - given.shape[1])
        rows = numbers.unsqueeze(1) * every.shape[1] + self.own.rows[few].to(given.device)
        own = every.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, rows.shape)
        return [given, self.own.rotation(own.unsqueeze(0), layer, self.own.shifts[few])[0]]


@torch.no_grad()
def fitted_queries(trace: Trace, own_weight: float, *, by_share: bool) -> FittedQueries:
    """The supervising queries and, moved behind the prefix, the prefix's own.

    A prefix that supervises itself is fitted to its own queries alone, moved behind it, or in place where they cannot
    be moved or own_weight is 0.

    Args:
        trace: of the windows.
        own_weight: of the squared weights of the prefix's own queries, relative to the supervising ones', both summed.
        by_share: a query's error counts by the part of its attention that goes to the prefix; otherwise all equally.
    """
    own, alone = _moved_queries(trace) if own_weight else None, trace.supervision == "self"
    given = [q[:, :, :0] for q in trace.queries] if own and alone else trace.queries
    last = torch.arange(trace.supervision_start - trace.prefix_len, trace.suffix_ids.shape[1])
    log_rest = [torch.full_like(wide(queries[..., 0]), -torch.inf) for queries in given]
    if by_share and not alone:
        parts = zip(given, trace.suffix_keys, trace.scales, strict=True)
        log_rest = [log_mass(queries, keys, scale, last) for queries, keys, scale in parts]
    boost = factors = torch.ones(given[0].shape[2])
    if own:
        rest = own.log_rest if by_share else [torch.full_like(rest, -torch.inf) for rest in own.log_rest]
        log_rest = [torch.cat(parts, 2) for parts in zip(log_rest, rest, strict=True)]
        factor = 1.0 if alone else (own_weight * len(factors) / len(own.rows)) ** 0.5
        factors, boost = torch.cat([factors, torch.full([len(own.rows)], factor)]), torch.cat([boost, own.boost])
    return FittedQueries(trace, given, own, factors, log_rest, boost, alone and own is None)


def _moved_queries(trace: Trace) -> MovedQueries | None:
    """Queries of each part of the prefix, to stand right behind the prefix.

    A part is a third of the prefix, at most 256 tokens. All of up to 4,096 positions choose keys; where query heads
    share a KV head, log-bias and values are fitted to those of evenly spaced positions alone, one to two queries per
    token of the prefix, in place of all. None where a compact cache stands for part of the prefix, or where the
    model's positions cannot be turned.
    """
    length = trace.prefix_len
    if trace.past_len:
        return None
    part = min(-(-length // _LEAST_PARTS), _PART_TOKENS)
    try:
        rotation = KeyRotation(trace.model, part)
    except InputError:
        return None
    positions = sampled_positions(length)
    rows = torch.isin(trace.prefix_positions, positions).nonzero().squeeze(1)
    # the last part first
    order = ((positions - length) // part).argsort(descending=True, stable=True)
    starts = (length + (positions - length) // part * part).clamp_min(0)
    num_queries = trace.prefix_queries[0].shape[1] // trace.keys[0].shape[1] * len(positions)
    stride, places = max(1, int(num_queries / (_FITTED_PER_TOKEN * length))), torch.arange(len(positions))
    first = order[torch.cat([places[places % stride == 0], places[places % stride != 0]])]
    boost = torch.full([-(-len(positions) // stride)], stride**0.5)
    log_rest = []
    for queries, keys, scale in zip(trace.prefix_queries, trace.keys, trace.scales, strict=True):
        masses = []
        for start in starts.unique().tolist():
            at = starts == start
            seen = keys[:, :, start : start + part]
            own = queries.index_select(2, rows[at].to(queries.device))
            masses.append(log_mass(own, seen, scale, positions[at] - start))
        log_rest.append(torch.cat(masses, 2)[:, :, first])
    return MovedQueries(rotation, rows[first], length - starts[first], log_rest, boost)


def log_mass(queries: Tensor, keys: Tensor, scale: float, last: Tensor) -> Float[Tensor, "batch heads queries"]:
    """Mass of keys: log sum_j exp(scale q.k_j) over the keys up to the last that each query sees, nats."""
    batch, heads = queries.shape[:2]
    step = max(1, min(_CHUNK_ROWS, _CHUNK_ELEMENTS // (batch * heads * keys.shape[2])))
    turned, at, found = (wide(keys) * scale).mT, torch.arange(keys.shape[2]), []
    for start in range(0, queries.shape[2], step):
        rows = slice(start, start + step)
        seen = slice(0, int(last[rows].max()) + 1)
        own = wide(queries[:, :, rows]).unflatten(1, (keys.shape[1], -1))
        hidden = torch.where(at[seen] > last[rows, None], -torch.inf, 0.0).to(turned)
        scores = (own.flatten(2, 3) @ turned[..., seen]).unflatten(2, own.shape[2:4]).add_(hidden)
        top = scores.amax(-1, keepdim=True)
        found.append((exp_below(top, scores).sum(-1).log_() + top.squeeze(-1)).flatten(1, 2))
    return torch.cat(found, 2)


def exp_below(
    top: Float[Tensor, "*batch queries 1"], scores: Float[Tensor, "*batch queries keys"]
) -> Float[Tensor, "*batch queries keys"]:
    """exp(scores - top) in place of the scores, by powers of two: on many CPUs two to three times as fast as exp."""
    return torch.add(top * -math.log2(math.e), scores, alpha=math.log2(math.e), out=scores).exp2_()


@dataclass(frozen=True)
class HeadBatch:
    """KV heads with their slots and the queries that read them, in at least float32.

    Args:
        queries: multiplied by the layer's scale.
        factors, log_rest: of the queries, as in ``FittedQueries``.
        keys, values: of the slots that the head has of the prefix.
        log_bias: nats added to the scores of these slots; None: none.
        last: last slot that each query sees; None: all see the whole prefix.
        boost: of the queries that are fitted to, the first ones, as in ``FittedQueries``; None: all, and 1.
    """

    queries: Float[Tensor, "heads queries head_dim"]
    factors: Float[Tensor, "heads queries"]
    log_rest: Float[Tensor, "heads queries"]
    keys: Float[Tensor, "heads prefix head_dim"]
    values: Float[Tensor, "heads prefix value_dim"]
    log_bias: Float[Tensor, "heads prefix"] | None = None
    last: Int[Tensor, "heads queries"] | None = None
    boost: Float[Tensor, "heads fitted"] | None = None

    def split(self, count: int) -> Iterator["HeadBatch"]:
        """The batch in parts of ``count`` heads, the last of fewer."""
        states = [getattr(self, part.name) for part in fields(self)]
        for start in range(0, len(self.keys), count):
            own: list[Any] = [None if x is None else x[start : start + count] for x in states]
            yield HeadBatch(*own)

    def scores(
        self,
        chunk: slice | Tensor = slice(None),
        slots: Int[Tensor, "heads slots"] | None = None,
        out: Tensor | None = None,
    ) -> Float[Tensor, "heads queries slots"]:
        """Scores of a chunk of queries against some slots: scale q.k + log-bias, -inf where one is not seen."""
        keys = self.keys if slots is None else take(self.keys, slots)
        scores = torch.matmul(self.queries[:, chunk], keys.mT, out=out)
        if self.log_bias is not None:
            scores += (self.log_bias if slots is None else self.log_bias.gather(1, slots)).unsqueeze(1)
        if self.last is not None:
            at = torch.arange(keys.shape[1], device=keys.device).expand(len(keys), -1) if slots is None else slots
            scores.masked_fill_(at.unsqueeze(1) > self.last[:, chunk].unsqueeze(2), -torch.inf)
        return scores


class DenseAttention(NamedTuple):
    """What a batch of heads gives on the whole prefix.

    Args:
        log_mass: of the queries that are fitted to, log sum over the prefix of exp(score), nats.
        mass: the same sum with each query's largest score taken off its scores.
        outputs: attention over the prefix, times the weights.
        weights: what the error of each query is multiplied by; a millionth of its factor at least.
        importance: of each slot, its attention weights times the queries' weights, squared, summed over all queries.
    """

    log_mass: Float[Tensor, "heads fitted"]
    mass: Float[Tensor, "heads fitted"]
    outputs: Float[Tensor, "heads fitted value_dim"]
    weights: Float[Tensor, "heads fitted"]
    importance: Float[Tensor, "heads prefix"]


def dense_attention(batch: HeadBatch) -> DenseAttention:
    """Attention of a batch of heads over the whole prefix, in chunks of queries that stay in the processor's cache."""
    (heads, rows, _), (_, slots, width) = batch.queries.shape, batch.values.shape
    elements = _CACHED_ELEMENTS if batch.keys.device.type == "cpu" else _DEVICE_ELEMENTS
    # few heads with many queries each: products of many rows are faster
    together = min(heads, max(1, elements // (rows * slots)))
    step = min(rows, max(1, elements // (together * slots)))
    boost = torch.ones_like(batch.factors) if batch.boost is None else batch.boost
    log_mass, mass, weights = (boost.new_empty(boost.shape) for _ in range(3))
    outputs, importance = batch.values.new_empty(*boost.shape, width), batch.values.new_zeros(heads, slots)
    # the scores of all chunks take the same place in the cache
    space = batch.queries.new_empty(together, step, slots)
    for index, part in enumerate(batch.split(together)):
        own = slice(index * together, (index + 1) * together)
        for start in range(0, rows, step):
            chunk = slice(start, start + step)
            scores = part.scores(chunk, out=space[: len(part.keys), : rows - start])
            top = scores.amax(-1, keepdim=True)
            exp_below(top, scores)
            sums = scores.sum(-1)
            log_sums = sums.log().add_(top.squeeze(-1))
            share = (log_sums - part.log_rest[:, chunk]).sigmoid_().clamp_min_(_LEAST_SHARE)
            factors = part.factors[:, chunk] * share
            relative, more = factors / sums, boost[own, chunk]
            if few := more.shape[1]:
                log_mass[own, chunk], mass[own, chunk] = log_sums[:, :few], sums[:, :few]
                weights[own, chunk] = factors[:, :few] * more
                attended = torch.bmm(scores[:, :few], part.values, out=outputs[own, chunk])
                attended.mul_((relative[:, :few] * more).unsqueeze(-1))
            importance[own] += (relative.square_().unsqueeze(1) @ scores.square_()).squeeze(1)
    return DenseAttention(log_mass, mass, outputs, weights, importance)


def take(
    states: Float[Tensor, "heads prefix head_dim"], slots: Int[Tensor, "heads slots"]
) -> Float[Tensor, "heads slots head_dim"]:
    """Keys or values at the given positions of each head."""
    heads, prefix, _ = states.shape
    rows = slots + prefix * torch.arange(heads, device=slots.device).unsqueeze(1)
    # on CPUs several times as fast as gather, which goes channel by channel
    return states.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, slots.shape)


def head_groups(
    trace: Trace, fitted: FittedQueries, sizes: Mapping[HeadIndex, int] | None = None
) -> list[list[HeadIndex]]:
    """Heads in groups of equal shape, solved together: as many as hold about 2^24 numbers at once, or a single one.

    These are the scores. With sizes, heads of a group get equally many slots, and it is the largest of the scores of
    these and of the fitted queries, the system of equations, and keys and values.
    """
    alike: dict[tuple[int, ...], list[HeadIndex]] = {}
    for layer, keys in enumerate(trace.keys):
        count = _group(trace, layer) * len(fitted.factors if sizes is None else fitted.boost)
        for example, row in enumerate(trace.counts(layer).tolist()):
            for head, slots in enumerate(row):
                index = layer, example, head
                shape = count, slots, keys.shape[3], trace.values[layer].shape[3], sizes[index] if sizes else 0
                alike.setdefault(shape, []).append(index)
    groups = []
    for (count, slots, key_dim, value_dim, size), heads in alike.items():
        held = max(count * size, size * size, slots * (key_dim + value_dim)) if sizes else count * slots
        step = max(1, _BATCH_ELEMENTS // held)
        groups += [heads[start : start + step] for start in range(0, len(heads), step)]
    return groups


def draw_queries(trace: Trace, fitted: FittedQueries, num_queries: int, seed: int) -> Drawn:
    """Which of a KV head's queries are used, drawn per example without replacement; places as in ``load_heads``."""
    drawn = {}
    for example, generator in enumerate(example_generators(trace, seed)):
        for layer, keys in enumerate(trace.keys):
            group, count = _group(trace, layer), len(fitted.factors)
            for head in range(keys.shape[1]):
                order = torch.randperm(group * count, generator=generator)[:num_queries]
                drawn[layer, example, head] = (order % count * group + order // count).sort().values
    return drawn


def load_heads(
    trace: Trace,
    fitted: FittedQueries,
    heads: list[HeadIndex],
    drawn: Drawn | None = None,
    *,
    only_fitted: bool = False,
) -> HeadBatch:
    """The tensors of one group of heads; their queries stand by position, those of one position by query head.

    With only_fitted, the queries that only choose keys are left out.
    """
    group = _group(trace, heads[0][0])
    keys, values, biases = zip(*(trace.head(*head) for head in heads), strict=True)
    count = len(fitted.boost if only_fitted and drawn is None else fitted.factors)
    rests: list[Tensor] = []
    queries = wide(keys[0]).new_empty(len(heads), count, group, keys[0].shape[-1])
    for (layer, example), of_layer in itertools.groupby(heads, key=lambda head: head[:2]):
        rows = [head * group + number for _, _, head in of_layer for number in range(group)]
        done, start = sum(map(len, rests)), 0
        rests.append(fitted.log_rest[layer][example, rows, :count].unflatten(0, (-1, group)).mT)
        for part in fitted.parts(layer, example, rows, count):
            turned = wide(part).unflatten(0, (-1, group)).transpose(1, 2)
            place = queries[done : done + len(turned), start : start + turned.shape[1]]
            torch.mul(turned, trace.scales[layer], out=place)
            start += turned.shape[1]
    queries, log_rest = queries.flatten(1, 2), torch.cat(rests).flatten(1, 2)
    # behind a compact cache, only the last slots of a prefix that supervises itself have queries
    last = torch.arange(len(keys[0]) - count, len(keys[0]), device=queries.device).repeat_interleave(group)
    factors = fitted.factors[:count].to(queries).repeat_interleave(group)
    factors, last = (x.expand(len(heads), -1) for x in (factors, last))
    if drawn is not None:
        rows = torch.stack([drawn[head] for head in heads]).to(queries.device)
        queries, (factors, log_rest, last) = take(queries, rows), (x.gather(1, rows) for x in (factors, log_rest, last))
    bias = None if trace.log_bias is None else wide(torch.stack([b for b in biases if b is not None]))
    states = wide(torch.stack(keys)), wide(torch.stack(values))
    boost = None if drawn else fitted.boost.to(factors).repeat_interleave(group).expand(len(heads), -1)
    return HeadBatch(queries, factors, log_rest, *states, bias, last if fitted.causal else None, boost)


def _group(trace: Trace, layer: int) -> int:
    """Query heads of a KV head."""
    return trace.prefix_queries[layer].shape[1] // trace.keys[layer].shape[1]
