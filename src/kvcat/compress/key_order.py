"""The order in which a head's keys are taken: by importance, or by what those before leave over."""

from dataclasses import dataclass

import torch

from kvcat.types import Float, Int, Tensor

SKETCH_ROWS = 256
_SEED = 0
_TINY = 1e-30
_BLOCK_SIZE = 16
_CANDIDATES = 64


def order_by_importance(importance: Float[Tensor, "*heads keys"]) -> Int[Tensor, "*heads keys"]:
    """The keys with the largest importance first; of equal ones the earlier first."""
    return importance.sort(dim=-1, descending=True, stable=True).indices


@dataclass(frozen=True)
class KeysByResidual:
    """Keys are taken one after another, each time the one with the largest residual importance.

    Let a_j be the attention to key j of every query, times the queries' weights, so that key j has
    the importance |a_j|^2. Two keys to which all queries attend in the same proportion do as one
    for the fit. With the keys S taken so far, their columns A_S and the diagonal matrix D_S of
    their importance, the residual importance of key j is

        (1 + r) |a_j|^2 - a_j^T A_S (A_S^T A_S + r D_S)^-1 A_S^T a_j

    with the ridge r. This is a Cholesky factorisation with diagonal pivoting; r = 0 takes the keys
    as a QR factorisation with column pivoting does, and a large r by importance.

    The columns are those of a sketch (``Sketch``), scaled to the keys' importance. Keys are taken
    in blocks: the next 16 are chosen one after another among 64 candidates, the keys with the
    largest residuals at the beginning of the block. The order differs from one key at a time only
    where the best candidate left falls below a key that is no candidate.

    Args:
        ridge: r, larger than 0.
        num_keys: so many keys are taken by residual, the others after them by importance.
    """

    ridge: float
    num_keys: int

    def order(
        self,
        sketch: Float[Tensor, "heads rows keys"],
        importance: Float[Tensor, "heads keys"],
    ) -> Int[Tensor, "heads keys"]:
        """All keys of each head, those taken first in front."""
        num_heads, num_rows, num_keys = sketch.shape
        heads = torch.arange(num_heads, device=sketch.device).unsqueeze(1)
        of_sketch = sketch.square().sum(1).clamp_min(_TINY)
        scale = (importance / of_sketch).sqrt()
        columns = (sketch * scale.unsqueeze(1)).mT.contiguous()  # (heads, keys, rows)
        # (I + sum over S of a a^T / (r |a|^2))^-1, by which the residual is r |a|^2 + a^T (...) a
        inverse = torch.eye(num_rows).to(columns).repeat(num_heads, 1, 1)
        residual = (1 + self.ridge) * importance
        num_taken = min(self.num_keys, num_keys)
        taken = torch.empty(num_heads, 0, dtype=torch.long, device=sketch.device)
        while taken.shape[1] < num_taken:
            num_left = num_keys - taken.shape[1]
            candidates = residual.topk(min(_CANDIDATES, num_left), dim=1).indices
            images = columns[heads, candidates] @ inverse  # (heads, candidates, rows)
            products = images @ columns[heads, candidates].mT
            products += torch.diag_embed(self.ridge * importance.gather(1, candidates))
            block_size = min(_BLOCK_SIZE, num_taken - taken.shape[1])
            block, factor = _pivoted_cholesky(products, block_size)
            taken = torch.cat([taken, candidates.gather(1, block)], dim=1)
            directions = torch.linalg.solve_triangular(factor, images[heads, block], upper=False)
            residual -= (columns @ directions.mT).square().sum(2)
            residual.scatter_(1, taken, -torch.inf)
            inverse -= directions.mT @ directions
        others = order_by_importance(importance.scatter(1, taken, -torch.inf))
        return torch.cat([taken, others[:, : num_keys - num_taken]], dim=1)


def _pivoted_cholesky(
    matrices: Float[Tensor, "heads keys keys"], num_pivots: int
) -> tuple[Int[Tensor, "heads pivots"], Float[Tensor, "heads pivots pivots"]]:
    """The first pivots, each the largest left on the diagonal, and their lower triangular factor.

    The product of the factor and its transpose is the part of each matrix that belongs to the
    pivots.
    """
    num_heads, num_keys, _ = matrices.shape
    heads = torch.arange(num_heads, device=matrices.device)
    diagonal = matrices.diagonal(dim1=1, dim2=2).clone()
    pivots = torch.empty(num_heads, num_pivots, dtype=torch.long, device=matrices.device)
    columns = matrices.new_zeros(num_heads, num_keys, num_pivots)
    for step in range(num_pivots):
        pivot = diagonal.argmax(1)
        pivots[:, step] = pivot
        explained = columns @ columns[heads, pivot].unsqueeze(2)
        column = matrices[heads, pivot] - explained.squeeze(2)
        column /= diagonal[heads, pivot].clamp_min(_TINY).sqrt().unsqueeze(1)
        columns[:, :, step] = column
        diagonal -= column.square()
        diagonal[heads, pivot] = -torch.inf
    factor = columns[heads.unsqueeze(1), pivots].tril()
    return pivots, factor


@dataclass(frozen=True)
class Sketch:
    """The weighted attention of all queries, added up with random signs to a few rows.

    Products of two of its columns have the expectation of those of the whole columns (a count
    sketch: Charikar et al. 2002). Query q is added to row q modulo the number of rows.

    Args:
        rows: the sums so far.
        signs: 1 or -1 for every query.
    """

    rows: Float[Tensor, "heads rows keys"]
    signs: Float[Tensor, " queries"]

    @classmethod
    def empty(cls, num_heads: int, num_queries: int, keys: Float[Tensor, "..."]) -> "Sketch":
        """A sketch of no query, with the dtype and the device of ``keys`` (heads, keys, head_dim).

        The signs depend on the number of queries alone.
        """
        generator = torch.Generator().manual_seed(_SEED)
        signs = 1.0 - 2.0 * torch.randint(2, (num_queries,), generator=generator)
        rows = keys.new_zeros(num_heads, min(SKETCH_ROWS, num_queries), keys.shape[1])
        return cls(rows, signs.to(keys))

    def of(self, heads: slice) -> "Sketch":
        """The sketch of some heads, in the same memory."""
        return Sketch(self.rows[heads], self.signs)

    def add(self, attention: Float[Tensor, "heads some keys"], queries: slice) -> None:
        """Add the weighted attention of some of the queries."""
        signed = attention * self.signs[queries].view(1, -1, 1)
        first = queries.start
        places = torch.arange(first, first + signed.shape[1], device=signed.device)
        self.rows.index_add_(1, places % self.rows.shape[1], signed)
