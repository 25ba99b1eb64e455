"""Dense linear algebra on batches of symmetric systems."""

import torch

from kvcat.types import Float, Tensor

_MAX_STEPS = 60
_STEPS_PER_CHECK = 4


def largest_eigenvalue(gram: Float[Tensor, "*heads rows rows"]) -> Float[Tensor, "*heads"]:
    """Largest eigenvalue of positive semi-definite matrices by Lanczos' method from the row sums.

    Args:
        gram: symmetric, positive semi-definite; exact to 1e-7 for the non-negative matrices of attention weights,
            a lower bound otherwise.
    """
    rows = gram.shape[-1]
    tiny = torch.finfo(gram.dtype).tiny
    vector, before = gram.abs().sum(-1), torch.zeros_like(gram[..., 0])
    size = vector.amax(-1)
    vector = vector / vector.norm(dim=-1, keepdim=True).clamp_min(tiny)
    diagonal: list[Tensor] = []
    beside: list[Tensor] = [torch.zeros_like(size)]
    value = torch.zeros_like(size)
    for step in range(1, _MAX_STEPS + 1):
        after = apply(gram, vector) - beside[-1].unsqueeze(-1) * before
        diagonal.append((after * vector).sum(-1))
        after = after - diagonal[-1].unsqueeze(-1) * vector
        beside.append(after.norm(dim=-1))
        if step % _STEPS_PER_CHECK == 0 or step >= rows:
            small = torch.diag_embed(torch.stack(diagonal, -1))
            if step > 1:
                side = torch.diag_embed(torch.stack(beside[1:-1], -1), offset=1)
                small = small + side + side.mT
            found = torch.linalg.eigvalsh(small)[..., -1]
            if step >= rows or (found - value <= 1e-6 * found).all():
                return found
            value = found
        # a direction of rounding errors alone would only add noise
        ended = beside[-1] <= 1e-13 * size
        beside[-1] = beside[-1].masked_fill(ended, 0.0)
        vector, before = (
            (after / beside[-1].clamp_min(tiny).unsqueeze(-1)).masked_fill(ended.unsqueeze(-1), 0.0),
            vector,
        )
    return value


def apply(
    gram: Float[Tensor, "*heads rows rows"], vector: Float[Tensor, "*heads rows"]
) -> Float[Tensor, "*heads rows"]:
    """Symmetric matrix times vector."""
    # as row times matrix: batched products with a single column are several times slower on CPUs
    return (vector.unsqueeze(-2) @ gram).squeeze(-2)


def solve_factored(
    factor: Float[Tensor, "*heads rows rows"], right: Float[Tensor, "*heads rows columns"]
) -> Float[Tensor, "*heads rows columns"]:
    """(L L^T)^-1 right, given the Cholesky factor L."""
    # torch.cholesky_solve is several times slower on batches
    half = torch.linalg.solve_triangular(factor, right, upper=False)
    return torch.linalg.solve_triangular(factor.mT, half, upper=True)


def add_diagonal(
    gram: Float[Tensor, "*heads rows rows"], diagonal: Float[Tensor, "*heads #rows"]
) -> Float[Tensor, "*heads rows rows"]:
    """The matrix with something added to its diagonal, as a copy."""
    result = gram.clone()
    result.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    return result
