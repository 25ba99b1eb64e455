"""How many slots each head deserves, at a given total."""

import torch

from kvcat.types import Float, Int, Tensor

GRID = (0.125, 0.25, 0.35, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 2.8, 4.0)


def slot_sizes(num_slots: int, prefix_len: int) -> list[int]:
    """Numbers of slots that a head may get where heads have ``num_slots`` on average, ascending.

    From an eighth of the average to four times it, in steps of a fifth to two fifths.

    Args:
        num_slots: average per head, in [1, prefix_len].
        prefix_len: most slots of a head.
    """
    return sorted({min(prefix_len, max(1, round(factor * num_slots))) for factor in GRID})


def allocate(sizes: list[int], errors: Float[Tensor, "sizes heads"], total: int) -> Int[Tensor, " heads"]:
    """Slots per head so that the sum of the heads' errors is as small as the total allows.

    Every head starts with the smallest size; then the steps along the lower convex hull of each head's error are taken,
    the largest gain per slot first, as long as the total holds them. Where every step fits, no other choice of sizes
    with as many slots in all has a smaller sum of errors (the hulls are convex); the last steps may leave a rest of
    the total unused, smaller than the largest step between two sizes.

    Args:
        sizes: numbers of slots a head may get, strictly ascending.
        errors: error of every head with so many slots, at least 0.
        total: most slots in all, at least the smallest size for every head.
    """
    steps = sorted(
        (step for head, curve in enumerate(errors.T.tolist()) for step in _hull_steps(head, sizes, curve)),
        key=lambda step: -step[0],
    )
    chosen = [0] * errors.shape[1]
    left = total - sizes[0] * len(chosen)
    for gain, head, start, stop in steps:
        cost = sizes[stop] - sizes[start]
        if gain > 0 and cost <= left and chosen[head] == start:
            chosen[head], left = stop, left - cost
    return torch.tensor([sizes[index] for index in chosen])


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
