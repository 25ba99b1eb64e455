"""Allocation of slots to heads under a total budget."""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch.nn.functional import pad

from kvcat.compress.head_attention import DenseAttention, SampledAttention
from kvcat.compress.heads import HeadIndex, Heads, with_progress
from kvcat.memory import return_freed_memory
from kvcat.models import output_gains
from kvcat.types import Float, Int, Tensor

GRID = (0.03125, 0.0625, 0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
_PADDING_ROWS = 8
CURVE_RIDGE = 1e-4
_LEAST_RIDGE = 1e-6
_TINY = 1e-30
PEAK_SHARE = 0.2
"""Share of the slots that is kept for their peaks, up to ``PEAK_RATIO`` slots for each token."""
PEAK_RATIO = 0.05
Curve = dict[int, float]
"""The error of one head by its number of slots, ascending."""


def measure_segments(
    segments: Sequence[Heads], sizes: Collection[int]
) -> tuple[list[dict[HeadIndex, DenseAttention]], list[dict[HeadIndex, Curve]]]:
    """``attention_and_curves`` of every segment of a prefix.

    If there are several, only the order and peaks of a segment's slots are kept of its attention.
    """
    attentions = []
    curves = []
    for heads in segments:
        dense, of_segment = attention_and_curves(heads, sizes)
        if len(segments) > 1:
            dense = {head: attention.order_alone() for head, attention in dense.items()}
        attentions.append(dense)
        curves.append(of_segment)
        return_freed_memory()  # what stays of every head lies between what was freed
    return attentions, curves


def attention_and_curves(
    heads: Heads, sizes: Collection[int]
) -> tuple[dict[HeadIndex, DenseAttention], dict[HeadIndex, Curve]]:
    """Every head's attention over the prefix, and its error by number of slots.

    The error is relative to the residual stream that the head's output is added to.

    Args:
        heads: with the queries to fit to.
        sizes: numbers of slots; with none there are no curves.
    """
    trace = heads.prefix.trace
    dense: dict[HeadIndex, DenseAttention] = {}
    curves: dict[HeadIndex, Curve] = {}
    kv_heads = [keys.shape[1] for keys in trace.keys]
    holds_rounded = any(each.is_rounded for each in heads.queries)
    gains = output_gains(trace.model, kv_heads, trace.layer_numbers) if sizes else []
    for group in with_progress(heads.groups_for_scores(), "attention of the prefix"):
        batch, attention = heads.fitted_attention(group)
        # of a long document the outputs of all heads are as large as its cache
        held = attention.in_16_bits() if holds_rounded else attention
        dense.update(zip(group, held.split(), strict=True))
        if not sizes:
            continue
        sampled = attention.sampled(batch, max(sizes))
        group_curves = error_curves(sampled, sizes, CURVE_RIDGE)
        for (layer, example, head), curve in zip(group, group_curves, strict=True):
            gain = gains[layer][head].item() / trace.layers[layer].stream[example].item()
            scaled = {size: gain * error for size, error in curve.items()}
            curves[layer, example, head] = scaled
    return dense, curves


def error_curves(sampled: SampledAttention, sizes: Iterable[int], ridge: float) -> list[Curve]:
    """An estimate of the squared error of the attention outputs, per head and number of slots.

    A size s uses the first s slots. With P, O and V of ``SampledAttention``, the estimate is the
    minimum of |P C - O|^2 + lambda |C - V|^2 over C. lambda is ``ridge`` times |P|^2 of all queries
    over the whole prefix, and at least as large as single precision requires.

    For sizes up to the number of queries, one factorisation over slots gives all errors
    (``_errors_by_slots``). Each larger size needs a factorisation over queries
    (``_errors_by_queries``).

    Args:
        sampled: attention of some queries to at least as many slots as the largest size, or to all.
        sizes: numbers of slots.
        ridge: strength of the regularisation relative to |P|^2, at least 0.
    """
    attention, outputs, values, energy = sampled
    num_queries, num_slots = attention.shape[1:]
    sizes = sorted({min(size, num_slots) for size in sizes})
    shift = ridge * energy.clamp_min(_TINY)
    least_shift = _LEAST_RIDGE * attention.square().sum((1, 2)).clamp_min(_TINY)
    shift = shift.maximum(least_shift)

    small = [size for size in sizes if size <= num_queries]
    large = sizes[len(small) :]
    errors = _errors_by_slots(attention, outputs, values, shift, small)
    errors += _errors_by_queries(attention, outputs, values, shift, large)
    of_heads = torch.stack(errors, 1).tolist()
    return [dict(zip(sizes, row, strict=True)) for row in of_heads]


def _errors_by_slots(
    attention: Float[Tensor, "heads queries slots"],
    outputs: Float[Tensor, "heads queries value_dim"],
    values: Float[Tensor, "heads slots value_dim"],
    shift: Float[Tensor, " heads"],
    sizes: list[int],
) -> list[Float[Tensor, " heads"]]:
    """The errors for sizes up to the number of queries.

    The minimum is |O|^2 + lambda |V|^2 - |L^-1 B|^2 with L L^T = P^T P + lambda I and B = P^T O +
    lambda V. The first s rows of L^-1 B are those for s slots, so one factorisation serves all
    sizes. The computation is in float64, because the errors are small differences.
    """
    if not sizes:
        return []
    largest = sizes[-1]
    attention = attention[:, :, :largest].double()
    outputs = outputs.double()
    values = values[:, :largest].double()
    shift = shift.double().unsqueeze(-1)
    gram = attention.mT @ attention
    gram.diagonal(dim1=-2, dim2=-1).add_(shift)
    right = attention.mT @ outputs + shift.unsqueeze(-1) * values
    solved = torch.linalg.solve_triangular(torch.linalg.cholesky(gram), right, upper=False)
    saved_by_slot = (solved.square() - shift.unsqueeze(-1) * values.square()).sum(-1)
    saved = saved_by_slot.cumsum(-1)
    energy = outputs.square().sum((1, 2))
    return [(energy - saved[:, size - 1]).clamp_min(0) for size in sizes]


def _errors_by_queries(
    attention: Float[Tensor, "heads queries slots"],
    outputs: Float[Tensor, "heads queries value_dim"],
    values: Float[Tensor, "heads slots value_dim"],
    shift: Float[Tensor, " heads"],
    sizes: list[int],
) -> list[Float[Tensor, " heads"]]:
    """The errors for sizes larger than the number of queries.

    The minimum is lambda tr R^T (P P^T + lambda I)^-1 R with R = O - P V. P P^T and R are updated
    from size to size.
    """
    if not sizes:
        return []
    # rows of zeros do not change the result; MKL's Cholesky for a batch of up to 128 rows is
    # several times slower
    attention = pad(attention, (0, 0, 0, _PADDING_ROWS))
    residual = pad(outputs, (0, 0, 0, _PADDING_ROWS))
    num_rows = attention.shape[1]
    gram = torch.diag_embed(shift.unsqueeze(-1).expand(-1, num_rows))
    errors = []
    for start, stop in pairwise([0, *sizes]):
        added = attention[:, :, start:stop]
        gram = gram + added @ added.mT
        residual = residual - added @ values[:, start:stop]
        upper = torch.linalg.cholesky(gram).mT
        solved = torch.linalg.solve_triangular(upper, residual.mT, upper=True, left=False)
        errors.append(shift * solved.square().sum((1, 2)))
    return errors


def slot_sizes(num_slots: float | int, prefix_len: int) -> list[int]:
    """The numbers of slots that a head may get if the average is ``num_slots``, ascending."""
    return sorted({min(prefix_len, max(1, round(factor * num_slots))) for factor in GRID})


def share_out_segments(
    curves: Sequence[Mapping[HeadIndex, Curve]],
    num_slots: int,
    sizes: list[int],
    *,
    by_head: bool,
) -> list[dict[HeadIndex, int]]:
    """The number of slots of every head in every segment, chosen so that the total error is small.

    Args:
        curves: of every segment, by head, the error at each of the sizes; for a head with fewer
            slots, the error at all its slots.
        num_slots: average number of slots of an example's heads, of all segments together.
        sizes: numbers of slots to choose from, ascending.
        by_head: every head gets the same number; False: slots are allocated to the heads of an
            example and its segments together.
    """
    slots: list[dict[HeadIndex, int]] = [{} for _ in curves]
    sharing: dict[Hashable, list[tuple[int, HeadIndex]]] = {}
    for number, of_segment in enumerate(curves):
        for head in sorted(of_segment):
            sharing.setdefault(head if by_head else head[1], []).append((number, head))
    for units in sharing.values():
        of_units = [curves[number][head] for number, head in units]
        total = num_slots * len({head for _, head in units})
        counts = _share_out_example(of_units, sizes, total)
        for (number, head), count in zip(units, counts.tolist(), strict=True):
            slots[number][head] = count
    return slots


def num_peaks(num_slots: int, prefix_len: int) -> int:
    """How many of a head's slots, on average, are kept for their peaks (``add_peaks``).

    The share falls with the square of the keep ratio: where slots are many, errors leave few such
    tokens out.
    """
    twentieths = max(1.0, num_slots / prefix_len / PEAK_RATIO)
    return int(PEAK_SHARE * num_slots / twentieths**2)


def add_peaks(
    attentions: Sequence[Mapping[HeadIndex, DenseAttention]],
    slots: Sequence[Mapping[HeadIndex, int]],
    count: int,
) -> tuple[list[dict[HeadIndex, DenseAttention]], list[dict[HeadIndex, int]]]:
    """More slots for the heads: those with the largest peaks of all that are not kept yet.

    Errors are sums over all queries, to which the few that ask for one fact contribute little. A
    token that a repetition of the prefix attends to sharply, in any head, is what answers are read
    from. (KVzip, arXiv:2505.23416, keeps slots by the largest attention of a repetition.)

    Args:
        attentions: of every segment, by head.
        slots: of every segment, the number of slots of each head.
        count: slots to add for each head of an example, on average.

    Returns:
        The attentions with these slots next in the order, and the numbers of slots.
    """
    added: list[dict[HeadIndex, DenseAttention]] = [{} for _ in slots]
    counts: list[dict[HeadIndex, int]] = [{} for _ in slots]
    units = [(number, head) for number, of_segment in enumerate(slots) for head in of_segment]
    for example in {head[1] for _, head in units}:
        of_example = [unit for unit in units if unit[1][1] == example]
        peaks = []
        for number, head in of_example:
            attention = attentions[number][head]
            of_head = attention.peaks.clone()
            of_head[attention.order[: slots[number][head]]] = -1.0
            peaks.append(of_head)
        joined = torch.cat(peaks)
        total = min(count * len({head for _, head in of_example}), int((joined >= 0).sum()))
        first = joined.sort(descending=True, stable=True).indices[:total]
        is_next = torch.zeros_like(joined, dtype=torch.bool)
        is_next[first] = True
        of_heads = is_next.split([len(of_head) for of_head in peaks])
        for (number, head), of_head in zip(of_example, of_heads, strict=True):
            attention = attentions[number][head]
            kept, others = attention.order.tensor_split([slots[number][head]])
            is_added = of_head[others]
            order = torch.cat([kept, others[is_added], others[~is_added]])
            added[number][head] = attention._replace(order=order)
            counts[number][head] = len(kept) + int(is_added.sum())
    return added, counts


def _share_out_example(
    curves: list[Curve], sizes: list[int], total: int
) -> Int[np.ndarray, " heads"]:
    """The number of slots of every head of an example.

    Slots that are of no use go to the heads with the largest errors.

    Args:
        curves: errors of every head by size.
        sizes: numbers of slots to choose from.
        total: number of slots in all heads together.
    """
    # (sizes, heads)
    costs = np.array([[min(size, max(curve)) for curve in curves] for size in sizes])
    errors = np.array(
        [[curve[cost] for curve, cost in zip(curves, row, strict=True)] for row in costs.tolist()],
        dtype=np.float32,
    )
    chosen = allocate(torch.from_numpy(costs), torch.from_numpy(errors), total).numpy()
    all_heads = np.arange(len(curves))
    counts = costs[chosen, all_heads]
    unused = total - counts.sum()
    for head in np.argsort(-errors[chosen, all_heads], kind="stable"):
        added = min(unused, costs[-1, head] - counts[head])
        counts[head] += added
        unused -= added
    return counts


def allocate(
    costs: Int[Tensor, "sizes heads"], errors: Float[Tensor, "sizes heads"], total: int
) -> Int[Tensor, " heads"]:
    """The index of every head's size, chosen so that the sum of errors is small within the total.

    Every head starts with the smallest size. The algorithm repeatedly makes the step to a larger
    size that lowers the error most per slot, until no step lowers the error and fits. As long as
    the best step fits, no allocation of the same number of slots has a smaller sum. If the same
    size for every head has a smaller sum, that allocation is returned.

    Args:
        costs: number of slots of every head for each size, ascending; equal numbers are the same
            size.
        errors: error of every head for each size, at least 0.
        total: largest number of slots in all heads, at least that of the smallest sizes.
    """
    slots = costs.numpy()  # numpy is faster for many steps on small arrays
    losses = errors.numpy()
    heads = np.arange(slots.shape[1])
    chosen = np.zeros_like(heads)
    unused = total - slots[0].sum()
    while True:
        added = slots - slots[chosen, heads]
        gains = (losses[chosen, heads] - losses) / np.maximum(added, 1)
        gains[(added <= 0) | (added > unused)] = 0.0
        size, head = divmod(int(gains.argmax()), len(heads))
        if gains[size, head] <= 0:
            break
        chosen[head] = size
        unused -= added[size, head]
    fits_for_all = slots.sum(1) <= total
    equal_size = fits_for_all.sum() - 1
    if losses[equal_size].sum() < losses[chosen, heads].sum():
        chosen = np.full_like(chosen, equal_size)
    return torch.from_numpy(chosen)
