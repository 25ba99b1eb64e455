"""How many slots each head deserves, at a given total."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvcat.cache import Layer
from kvcat.compress.common import Fit, fitted_layer
from kvcat.compress.heads import Head
from kvcat.compress.tracing import Trace
from kvcat.types import Float, Int, Tensor

GRID = (0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
_AT_FIRST = 2.0


@dataclass(frozen=True)
class HeadFit:
    """One head with some number of slots.

    Args:
        positions: of the kept keys, among the slots that the head has of the prefix.
        values: of the slots.
        log_bias: of the slots, nats; None: none.
        error: what the fit leaves, at least 0, in units that are the same for all heads.
    """

    positions: Int[Tensor, " slots"]
    values: Float[Tensor, "slots value_dim"]
    log_bias: Float[Tensor, " slots"] | None
    error: float


def share_out(
    trace: Trace, num_slots: int, fit: Callable[[int], dict[Head, HeadFit]], *, by_layer: bool = False
) -> list[Layer]:
    """Layers whose heads have slots by need, ``num_slots`` per head on average at most, in every example.

    All heads are fitted with each of several numbers of slots, and those whose errors fall fastest get more. More than
    twice the average, which costs most to fit, is tried only where some head gets all that was tried before.

    Args:
        trace: of the windows.
        num_slots: average, in [1, slots of the prefix].
        fit: all heads with a given number of slots; heads that have no more keep all.
        by_layer: all heads of a layer get equally many.
    """
    every = slot_sizes(num_slots, trace.num_slots)
    fits: dict[int, dict[Head, HeadFit]] = {}
    plain: dict[Head, Fit] = {}
    for example in range(trace.batch_size):
        count = sum(size <= max(num_slots, round(_AT_FIRST * num_slots)) for size in every)
        while True:
            sizes = every[:count]
            fits |= {size: fit(size) for size in sizes if size not in fits}
            chosen = _chosen([(size, fits[size]) for size in sizes], example, num_slots, by_layer=by_layer)
            if count == len(every) or sizes[-1] not in chosen.values():
                break
            count += 1
        found = {head: fits[size][head] for head, size in chosen.items()}
        plain |= {head: (fit.positions, fit.values, fit.log_bias) for head, fit in found.items()}
    return [fitted_layer(trace, index, plain) for index in range(len(trace.keys))]


def _chosen(
    fits: list[tuple[int, dict[Head, HeadFit]]], example: int, num_slots: int, *, by_layer: bool
) -> dict[Head, int]:
    """The size of every head of an example."""
    heads = sorted(head for head in fits[0][1] if head[1] == example)
    errors = torch.tensor([[fit[head].error for head in heads] for _, fit in fits], dtype=torch.float64)
    costs = torch.tensor([[len(fit[head].positions) for head in heads] for _, fit in fits])
    parts = torch.tensor([layer if by_layer else index for index, (layer, _, _) in enumerate(heads)])
    costs, errors = (x.new_zeros(len(fits), int(parts.max()) + 1).index_add_(1, parts, x) for x in (costs, errors))
    found = allocate(costs, errors, num_slots * len(heads))[parts].tolist()
    return {head: fits[index][0] for head, index in zip(heads, found, strict=True)}


def slot_sizes(num_slots: int, prefix_len: int) -> list[int]:
    """Numbers of slots that a head may get where heads have ``num_slots`` on average, ascending.

    From an eighth of the average to four times it, the average among them.

    Args:
        num_slots: average per head, in [1, prefix_len].
        prefix_len: most slots of a head.
    """
    return sorted({min(prefix_len, max(1, round(factor * num_slots))) for factor in GRID})


def allocate(
    costs: Int[Tensor, "sizes heads"], errors: Float[Tensor, "sizes heads"], total: int
) -> Int[Tensor, " heads"]:
    """Which size every head gets so that the sum of the heads' errors is as small as the total of slots allows.

    Every head starts with the smallest size; then the steps along the lower convex hull of each head's error are taken,
    the largest gain per slot first, as long as the total holds them (while all fit, no choice of as many slots has a
    smaller sum). What is left goes to the single steps that gain most per slot. Where errors are so uneven that the
    same size for every head is better, that is taken.

    Args:
        costs: slots that every head takes in each size, ascending; equal ones are one and the same size.
        errors: error of every head in that size, at least 0.
        total: most slots in all, at least what the smallest size takes.
    """
    sizes, curves = costs.T.tolist(), errors.T.tolist()
    steps = [step for head in range(len(curves)) for step in _hull_steps(head, sizes[head], curves[head])]
    chosen = [0] * len(curves)
    left = total - int(costs[0].sum())
    for gain, head, start, stop in sorted(steps, key=lambda step: -step[0]):
        cost = sizes[head][stop] - sizes[head][start]
        if gain > 0 and cost <= left and chosen[head] == start:
            chosen[head], left = stop, left - cost
    while (step := _best_step(sizes, curves, chosen, left)) is not None:
        head, stop = step
        left -= sizes[head][stop] - sizes[head][chosen[head]]
        chosen[head] = stop
    equal = int((costs.sum(1) <= total).sum()) - 1
    if sum(curve[equal] for curve in curves) < sum(curve[i] for curve, i in zip(curves, chosen, strict=True)):
        chosen = [equal] * len(chosen)
    return torch.tensor(chosen)


def _best_step(
    sizes: list[list[int]], curves: list[list[float]], chosen: list[int], left: int
) -> tuple[int, int] | None:
    """Head and new size of the largest gain per slot among the steps that fit; None where none gains."""
    best, found = 0.0, None
    for head, (own, curve) in enumerate(zip(sizes, curves, strict=True)):
        now = chosen[head]
        for stop in range(now + 1, len(own)):
            gain = _gain(own, curve, now, stop)
            if own[stop] - own[now] <= left and gain > best:
                best, found = gain, (head, stop)
    return found


def _hull_steps(head: int, sizes: list[int], curve: list[float]) -> list[tuple[float, int, int, int]]:
    """Steps (gain per slot, head, from, to) along the lower convex hull of a head's error, gains descending."""
    steps, start = [], 0
    while start < len(sizes) - 1:
        # of equal gains the farthest, so that points on the hull's edges cost no step of their own
        gain, stop = max((_gain(sizes, curve, start, stop), stop) for stop in range(start + 1, len(sizes)))
        steps.append((gain, head, start, stop))
        start = stop
    return steps


def _gain(sizes: list[int], curve: list[float], start: int, stop: int) -> float:
    """Error saved per slot; 0 where a head has no more slots to take."""
    more = sizes[stop] - sizes[start]
    return (curve[start] - curve[stop]) / more if more else 0.0
