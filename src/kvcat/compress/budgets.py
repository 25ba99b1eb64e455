"""How many slots each head deserves, at a given total."""

from collections.abc import Mapping

import torch

from kvcat.compress.queries import DenseAttention, HeadBatch, HeadIndex, take
from kvcat.compress.solvers import largest_eigenvalue
from kvcat.types import Float, Int, Tensor

GRID = (0.03125, 0.0625, 0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
RIDGE = 1e-2
NUM_QUERIES = 512


def error_curves(batch: HeadBatch, dense: DenseAttention, largest: int) -> list[Float[Tensor, " slots"]]:
    """Per head, an estimate of the squared error of the attention outputs with 1, 2, ... slots, in one pass.

    The slots are nested: in the order of their importance. With P the dense attention weights of the first s slots and
    O the outputs, both times the queries' weights, and V the slots' own values, the estimate is the least of
    |P C - O|^2 + lambda |C - V|^2 over C. All s follow from one Cholesky factor L of P^T P + lambda I, since the
    leading blocks of L are the factors of fewer slots: |O|^2 + lambda |V_s|^2 - |(L^-1 (P^T O + lambda V))_s|^2.
    At most 512 queries, evenly spaced, stand for all.
    """
    order = dense.importance.sort(dim=-1, descending=True, stable=True).indices[:, :largest]
    some = slice(None, None, -(-dense.weights.shape[1] // NUM_QUERIES))
    weights = dense.weights[:, some].unsqueeze(-1)
    attention = batch.scores(some, order).sub_(dense.log_mass[:, some].unsqueeze(-1)).exp_().mul_(weights)
    outputs, values = dense.outputs[:, some] * weights, take(batch.values, order).double()
    gram, target = (attention.mT @ attention).double(), (attention.mT @ outputs).double()
    shift = RIDGE * largest_eigenvalue(gram).clamp_min(1e-30)
    gram.diagonal(dim1=-2, dim2=-1).add_(shift.unsqueeze(-1))
    found = torch.linalg.solve_triangular(
        torch.linalg.cholesky(gram), target + shift[:, None, None] * values, upper=False
    )
    saved = (found.square() - shift[:, None, None] * values.square()).sum(-1).cumsum(-1)
    errors = outputs.double().square().sum((1, 2)).unsqueeze(-1) - saved
    return list(errors.clamp_min(0.0))


def slot_sizes(num_slots: int, prefix_len: int) -> list[int]:
    """Numbers of slots that a head may get where heads have ``num_slots`` on average, ascending."""
    return sorted({min(prefix_len, max(1, round(factor * num_slots))) for factor in GRID})


def share_out(
    curves: Mapping[HeadIndex, Float[Tensor, " slots"]], num_slots: int, prefix_len: int, *, by_layer: bool
) -> dict[HeadIndex, int]:
    """Slots of every head, ``num_slots`` on average in every example (by layer at most), of a small sum of errors.

    Args:
        curves: by (layer, example, KV head), the error with 1, 2, ... slots, as far as the largest size or all slots
            that the head has of the prefix.
        num_slots: average, in [1, prefix_len].
        prefix_len: most slots of a head.
        by_layer: all heads of a layer get equally many.
    """
    sizes, found = slot_sizes(num_slots, prefix_len), {}
    for example in sorted({example for _, example, _ in curves}):
        heads = sorted(head for head in curves if head[1] == example)
        costs = torch.tensor([[min(size, len(curves[head])) for head in heads] for size in sizes])
        errors = torch.stack([curves[head][costs[:, i] - 1].double().cpu() for i, head in enumerate(heads)], 1)
        parts = torch.tensor([layer if by_layer else index for index, (layer, _, _) in enumerate(heads)])
        grouped = [x.new_zeros(len(sizes), int(parts.max()) + 1).index_add_(1, parts, x) for x in (costs, errors)]
        chosen, at = allocate(grouped[0], grouped[1], num_slots * len(heads))[parts], torch.arange(len(heads))
        counts, left = costs[chosen, at].tolist(), num_slots * len(heads) - int(costs[chosen, at].sum())
        # what no step to a larger size used goes to the heads with the largest error
        for index in errors[chosen, at].argsort(descending=True).tolist() if not by_layer else ():
            more = min(left, len(curves[heads[index]]) - counts[index])
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
    heads = torch.arange(costs.shape[1])
    chosen, left = torch.zeros_like(heads), total - int(costs[0].sum())
    while True:
        more = costs - costs[chosen, heads]
        gains = (errors[chosen, heads] - errors) / more.clamp(min=1)
        gains[(more <= 0) | (more > left)] = 0.0
        best = int(gains.argmax())
        size, head = divmod(best, len(heads))
        if gains[size, head] <= 0:
            break
        chosen[head], left = size, left - int(more[size, head])
    equal = int((costs.sum(1) <= total).sum()) - 1
    return torch.full_like(chosen, equal) if errors[equal].sum() < errors[chosen, heads].sum() else chosen
