"""How many slots each head deserves, at a given total."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvcat.cache import CompactLayer, RaggedLayer
from kvcat.compress.heads import Head
from kvcat.compress.tracing import Trace
from kvcat.types import Float, Int, Tensor

GRID = (0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)


@dataclass(frozen=True)
class HeadFit:
    """One head with some number of slots.

    Args:
        positions: of the kept keys.
        values: of the slots.
        log_bias: of the slots, nats; None: none.
        error: what the fit leaves, at least 0, in units that are the same for all heads.
    """

    positions: Int[Tensor, " slots"]
    values: Float[Tensor, "slots value_dim"]
    log_bias: Float[Tensor, " slots"] | None
    error: float


def share_out(
    trace: Trace, num_slots: int, fit: Callable[[int], dict[Head, HeadFit]]
) -> list[CompactLayer | RaggedLayer]:
    """Layers whose heads have slots by need, ``num_slots`` per head on average at most, in every example.

    All heads are fitted with each of several numbers of slots, and those whose errors fall fastest get more.

    Args:
        trace: of the windows.
        num_slots: average, in [1, slots of the prefix].
        fit: all heads with a given number of slots.
    """
    sizes = slot_sizes(num_slots, trace.num_slots)
    fits = {size: fit(size) for size in sizes}
    chosen: dict[Head, HeadFit] = {}
    for example in range(trace.batch_size):
        heads = sorted(head for head in fits[num_slots] if head[1] == example)
        errors = torch.tensor([[fits[size][head].error for head in heads] for size in sizes], dtype=torch.float64)
        counts = allocate(sizes, errors, num_slots * len(heads)).tolist()
        chosen |= {head: fits[count][head] for head, count in zip(heads, counts, strict=True)}
    return [_layer(trace, index, chosen) for index in range(len(trace.keys))]


def _layer(trace: Trace, index: int, chosen: dict[Head, HeadFit]) -> CompactLayer | RaggedLayer:
    keys = trace.keys[index]
    rows = [[chosen[index, example, head] for head in range(keys.shape[1])] for example in range(len(keys))]
    biases = [[fit.log_bias for fit in row if fit.log_bias is not None] for row in rows]
    return CompactLayer.ragged(
        [[keys[example, head, fit.positions] for head, fit in enumerate(row)] for example, row in enumerate(rows)],
        [[fit.values.to(trace.values[index].dtype) for fit in row] for row in rows],
        biases if biases[0] else None,
        None if trace.past_len else [[fit.positions for fit in row] for row in rows],
    )


def slot_sizes(num_slots: int, prefix_len: int) -> list[int]:
    """Numbers of slots that a head may get where heads have ``num_slots`` on average, ascending.

    From an eighth of the average to four times it, the average among them.

    Args:
        num_slots: average per head, in [1, prefix_len].
        prefix_len: most slots of a head.
    """
    return sorted({min(prefix_len, max(1, round(factor * num_slots))) for factor in GRID})


def allocate(sizes: list[int], errors: Float[Tensor, "sizes heads"], total: int) -> Int[Tensor, " heads"]:
    """Slots per head so that the sum of the heads' errors is as small as the total allows.

    Every head starts with the smallest size; then the steps along the lower convex hull of each head's error are taken,
    the largest gain per slot first, as long as the total holds them (while all fit, no choice of as many slots has a
    smaller sum). What is left goes to the single steps that gain most per slot. Where errors are so uneven that the
    same size for every head is better, that is taken.

    Args:
        sizes: numbers of slots a head may get, strictly ascending.
        errors: error of every head with so many slots, at least 0.
        total: most slots in all, at least the smallest size for every head.
    """
    curves = errors.T.tolist()
    steps = [step for head, curve in enumerate(curves) for step in _hull_steps(head, sizes, curve)]
    chosen = [0] * len(curves)
    left = total - sizes[0] * len(chosen)
    for gain, head, start, stop in sorted(steps, key=lambda step: -step[0]):
        cost = sizes[stop] - sizes[start]
        if gain > 0 and cost <= left and chosen[head] == start:
            chosen[head], left = stop, left - cost
    while (step := _best_step(sizes, curves, chosen, left)) is not None:
        head, stop = step
        left -= sizes[stop] - sizes[chosen[head]]
        chosen[head] = stop
    equal = max(index for index, size in enumerate(sizes) if size * len(chosen) <= total)
    if sum(curve[equal] for curve in curves) < sum(curve[i] for curve, i in zip(curves, chosen, strict=True)):
        chosen = [equal] * len(chosen)
    return torch.tensor([sizes[index] for index in chosen])


def _best_step(sizes: list[int], curves: list[list[float]], chosen: list[int], left: int) -> tuple[int, int] | None:
    """Head and new size of the largest gain per slot among the steps that fit; None where none gains."""
    best, found = 0.0, None
    for head, curve in enumerate(curves):
        now = chosen[head]
        for stop in range(now + 1, len(sizes)):
            cost = sizes[stop] - sizes[now]
            gain = (curve[now] - curve[stop]) / cost
            if cost <= left and gain > best:
                best, found = gain, (head, stop)
    return found


def _hull_steps(head: int, sizes: list[int], curve: list[float]) -> list[tuple[float, int, int, int]]:
    """Steps (gain per slot, head, from, to) along the lower convex hull of a head's error, gains descending."""
    steps, start = [], 0
    while start < len(sizes) - 1:
        gains = [(curve[start] - curve[stop]) / (sizes[stop] - sizes[start]) for stop in range(start + 1, len(sizes))]
        # of equal gains the farthest, so that points on the hull's edges cost no step of their own
        gain, stop = max((gain, start + 1 + index) for index, gain in enumerate(gains))
        steps.append((gain, head, start, stop))
        start = stop
    return steps
