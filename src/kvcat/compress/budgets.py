"""How many slots each head deserves, at a given total."""

import itertools
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch.nn.functional import pad

from kvcat.compress.queries import DenseAttention, HeadBatch, HeadIndex, take
from kvcat.types import Float, Int, Tensor

GRID = (0.03125, 0.0625, 0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
NUM_QUERIES = 128
_MORE_ROWS = 8
_LEAST_RIDGE = 1e-6
Curve = dict[int, float]
"""Error of one head by its number of slots, ascending."""


def error_curves(batch: HeadBatch, dense: DenseAttention, sizes: Iterable[int], ridge: float) -> list[Curve]:
    """Per head, an estimate of the squared error of the attention outputs for several numbers of slots, in one pass.

    The slots are nested: in the order of their importance. With P the dense attention weights of the first s slots, O
    the outputs, both times the queries' weights, V the slots' own values and R = O - P V what these leave, the estimate
    is the least of |P C - O|^2 + lambda |C - V|^2 over C, which is lambda tr R^T (P P^T + lambda I)^-1 R; lambda is
    ``ridge`` times |P|^2 over the whole prefix, and at least what single precision needs. P P^T and R grow from size to
    size. At most 128 queries, drawn with a fixed seed, stand for all. Where slots are no more than these, the least is
    |O|^2 + lambda |V|^2 - |L^-1 B|^2 with L L^T = P^T P + lambda I and B = P^T O + lambda V, whose first s rows are
    those of s slots: one factorisation serves all such sizes.
    """
    prefix, queries = batch.keys.shape[1], dense.weights.shape[1]
    sizes = sorted({min(size, prefix) for size in sizes})
    order = dense.importance.sort(dim=-1, descending=True, stable=True).indices[:, : sizes[-1]]
    # no even spacing: the query heads take turns among the rows
    some = torch.randperm(queries, generator=torch.Generator().manual_seed(0))[:NUM_QUERIES].to(order.device)
    weights = dense.weights[:, some].unsqueeze(-1)
    attention = batch.scores(some, order).sub_(dense.log_mass[:, some].unsqueeze(-1)).exp_().mul_(weights)
    left, values = dense.outputs[:, some], take(batch.values, order)
    few = [size for size in sizes if size <= len(some)]
    at = few[-1] if few else 0
    shift = ridge * len(some) / queries * dense.importance.sum(-1).clamp_min(1e-30)
    shift = shift.maximum(_LEAST_RIDGE * attention.square().sum((1, 2)).clamp_min(1e-30))
    errors = _errors_of_few(attention[:, :, :at], left, values[:, :at], shift, few)
    # rows of zeros change nothing, but MKL's Cholesky of a batch of up to 128 rows is several times slower
    attention, left = (pad(rows, (0, 0, 0, _MORE_ROWS)) for rows in (attention, left))
    gram = torch.diag_embed(shift.unsqueeze(-1).expand(-1, attention.shape[1]))
    for start, stop in itertools.pairwise(sorted({0, at, *sizes[len(few) :]})):
        more = attention[:, :, start:stop]
        gram, left = gram + more @ more.mT, left - more @ values[:, start:stop]
        if stop > at:
            half = torch.linalg.solve_triangular(torch.linalg.cholesky(gram).mT, left.mT, upper=True, left=False)
            errors.append(shift * half.square().sum((1, 2)))
    found = torch.stack(errors, 1).double() * (queries / len(some))
    return [dict(zip(sizes, row, strict=True)) for row in found.tolist()]


def _errors_of_few(
    attention: Float[Tensor, "heads queries slots"],
    outputs: Float[Tensor, "heads queries value_dim"],
    values: Float[Tensor, "heads slots value_dim"],
    shift: Float[Tensor, " heads"],
    sizes: list[int],
) -> list[Float[Tensor, " heads"]]:
    """The errors of sizes that are no larger than the queries; in float64, because they are small differences."""
    attention, outputs, values, shift = (x.double() for x in (attention, outputs, values, shift.view(-1, 1, 1)))
    gram = attention.mT @ attention
    gram.diagonal(dim1=-2, dim2=-1).add_(shift.squeeze(-1))
    half = torch.linalg.solve_triangular(
        torch.linalg.cholesky(gram), attention.mT @ outputs + shift * values, upper=False
    )
    saved = (half.square() - shift * values.square()).sum(-1).cumsum(-1)
    return [(outputs.square().sum((1, 2)) - saved[:, size - 1]).clamp_min(0) for size in sizes]


def slot_sizes(num_slots: int, prefix_len: int) -> list[int]:
    """Numbers of slots that a head may get where heads have ``num_slots`` on average, ascending."""
    return sorted({min(prefix_len, max(1, round(factor * num_slots))) for factor in GRID})


def share_out(
    curves: Mapping[HeadIndex, Curve], num_slots: int, prefix_len: int, *, by_layer: bool
) -> dict[HeadIndex, int]:
    """Slots of every head, ``num_slots`` on average in every example (by layer at most), of a small sum of errors.

    Args:
        curves: by (layer, example, KV head), the error at each of ``slot_sizes(num_slots, prefix_len)``, or of all
            slots that the head has where it has fewer.
        num_slots: average, in [1, prefix_len].
        prefix_len: most slots of a head.
        by_layer: all heads of a layer get equally many.
    """
    sizes, found = slot_sizes(num_slots, prefix_len), {}
    for example in sorted({example for _, example, _ in curves}):
        heads = sorted(head for head in curves if head[1] == example)
        most = [max(curves[head]) for head in heads]
        costs = torch.tensor([[min(size, top) for top in most] for size in sizes])
        errors = torch.tensor(
            [[curves[head][size] for head, size in zip(heads, row, strict=True)] for row in costs.tolist()]
        )
        parts = torch.tensor([layer if by_layer else index for index, (layer, _, _) in enumerate(heads)])
        grouped = [x.new_zeros(len(sizes), int(parts.max()) + 1).index_add_(1, parts, x) for x in (costs, errors)]
        chosen, at = allocate(grouped[0], grouped[1], num_slots * len(heads))[parts], torch.arange(len(heads))
        counts, left = costs[chosen, at].tolist(), num_slots * len(heads) - int(costs[chosen, at].sum())
        # what no step to a larger size used goes to the heads with the largest error
        for index in errors[chosen, at].argsort(descending=True).tolist() if not by_layer else ():
            more = min(left, costs[-1, index].item() - counts[index])
            counts[index], left = counts[index] + more, left - more
        found |= dict(zip(heads, counts, strict=True))
    return found


def allocate(
    costs: Int[Tensor, "sizes heads"], errors: Float[Tensor, "sizes heads"], total: int
) -> Int[Tensor, " heads"]:
    """Which size every head gets so that the sum of the heads' errors is as small as the total of slots allows.

    Every head starts with the smallest size. Then comes, as long as one gains and fits, the step to a larger size that
    gains most per slot (while the best step fits, no choice of as many slots has a smaller sum). Where errors are so
    uneven that the same size for every head is better, that is taken.

    Args:
        costs: slots that every head takes in each size, ascending; equal ones are one and the same size.
        errors: error of every head in that size, at least 0.
        total: most slots in all, at least what the smallest size takes.
    """
    slots, losses = costs.numpy(), errors.numpy()  # numpy is faster in many steps on small arrays
    heads = np.arange(slots.shape[1])
    chosen, left = np.zeros_like(heads), total - slots[0].sum()
    while True:
        more = slots - slots[chosen, heads]
        gains = (losses[chosen, heads] - losses) / np.maximum(more, 1)
        gains[(more <= 0) | (more > left)] = 0.0
        size, head = divmod(int(gains.argmax()), len(heads))
        if gains[size, head] <= 0:
            break
        chosen[head], left = size, left - more[size, head]
    equal = (slots.sum(1) <= total).sum() - 1
    better = losses[equal].sum() < losses[chosen, heads].sum()
    return torch.from_numpy(np.full_like(chosen, equal) if better else chosen)
