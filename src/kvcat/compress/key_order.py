"""The order in which a head's keys are taken: by importance, or by what those before leave over."""

from dataclasses import dataclass

import torch

from kvcat.types import Float, Int, Tensor

SKETCH_ROWS = 256
_SEED = 0
_TINY = 1e-30


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

    The columns are those of a sketch (``Sketch``), scaled to the keys' importance.

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
        heads = torch.arange(num_heads, device=sketch.device)
        of_sketch = sketch.square().sum(1).clamp_min(_TINY)
        scale = (importance / of_sketch).sqrt()
        columns = (sketch * scale.unsqueeze(1)).mT.contiguous()  # (heads, keys, rows)
        # (I + sum over S of a a^T / (r |a|^2))^-1, by which the residual is r |a|^2 + a^T (...) a
        inverse = torch.eye(num_rows).to(columns).repeat(num_heads, 1, 1)
        residual = (1 + self.ridge) * importance
        num_taken = min(self.num_keys, num_keys)
        taken = torch.empty(num_heads, num_taken, dtype=torch.long, device=sketch.device)
        for step in range(num_taken):
            best = residual.argmax(1)
            taken[:, step] = best
            column = columns[heads, best].unsqueeze(2)  # (heads, rows, 1)
            image = inverse @ column
            pivot = self.ridge * importance[heads, best] + (column * image).sum((1, 2))
            image /= pivot.clamp_min(_TINY).sqrt().view(-1, 1, 1)
            residual -= (columns @ image).squeeze(2).square_()
            residual[heads, best] = -torch.inf
            inverse -= image * image.mT
        others = order_by_importance(importance.scatter(1, taken, -torch.inf))
        return torch.cat([taken, others[:, : num_keys - num_taken]], dim=1)


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
