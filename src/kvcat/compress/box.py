"""Least squares in a box for many attention heads at once."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from kvcat.compress.symmetric import add_diagonal, apply, largest_eigenvalue, solve_factored
from kvcat.types import Float, Int, Tensor

_MAX_ITERATIONS = 100
_JITTER = {torch.float64: 1e-10, torch.float32: 1e-5}
Solve = Callable[[Float[Tensor, "heads slots"]], Float[Tensor, "heads slots"]]


@dataclass(frozen=True)
class TallSystem:
    """|A w - b|^2 through its normal equations: for more rows than columns, or rows that come in chunks.

    Args:
        gram: A^T A.
        target: A^T b.
    """

    gram: Float[Tensor, "heads slots slots"]
    target: Float[Tensor, "heads slots"]

    def select(self, rows: Int[Tensor, " rows"]) -> "TallSystem":
        """Some of the heads."""
        return TallSystem(self.gram[rows], self.target[rows])

    def divided(self, unit: Float[Tensor, " heads"]) -> "TallSystem":
        """The objective divided by a number per head."""
        return TallSystem(self.gram / unit[:, None, None], self.target / unit[:, None])

    def size(self) -> Float[Tensor, " heads"]:
        """Mean of the squared lengths of A's columns."""
        return self.gram.diagonal(dim1=-2, dim2=-1).mean(-1)

    def apply(self, weights: Float[Tensor, "heads slots"]) -> Float[Tensor, "heads slots"]:
        """A^T A w."""
        return apply(self.gram, weights)

    def norm(self) -> Float[Tensor, " heads"]:
        """Largest eigenvalue of A^T A."""
        return largest_eigenvalue(self.gram)

    def unbounded(self, jitter: Float[Tensor, " heads"]) -> Float[Tensor, "heads slots"]:
        """(A^T A + jitter I)^-1 A^T b."""
        return self.factored(jitter.unsqueeze(-1).expand_as(self.target))(self.target)

    def factored(self, diagonal: Float[Tensor, "heads slots"]) -> Solve:
        """Solves (A^T A + diag) x = r for any r."""
        factor = torch.linalg.cholesky(add_diagonal(self.gram, diagonal))
        return lambda right: solve_factored(factor, right.unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True)
class WideSystem:
    """|A w - b|^2 through A itself: for far fewer rows than columns, where A^T A would be large and singular.

    Args:
        design: A.
        mass: b.
    """

    design: Float[Tensor, "heads queries slots"]
    mass: Float[Tensor, "heads queries"]

    @property
    def target(self) -> Float[Tensor, "heads slots"]:
        """A^T b."""
        return self._gathered(self.mass)

    @cached_property
    def products(self) -> Float[Tensor, "heads queries queries"]:
        """A A^T, whose largest eigenvalue is that of A^T A."""
        return self.design @ self.design.mT

    def select(self, rows: Int[Tensor, " rows"]) -> "WideSystem":
        """Some of the heads."""
        return WideSystem(self.design[rows], self.mass[rows])

    def divided(self, unit: Float[Tensor, " heads"]) -> "WideSystem":
        """The objective divided by a number per head."""
        root = unit.sqrt()
        return WideSystem(self.design / root[:, None, None], self.mass / root[:, None])

    def size(self) -> Float[Tensor, " heads"]:
        """Mean of the squared lengths of A's columns."""
        return self.design.square().sum(-2).mean(-1)

    def apply(self, weights: Float[Tensor, "heads slots"]) -> Float[Tensor, "heads slots"]:
        """A^T A w."""
        return self._gathered(self._spread(weights))

    def norm(self) -> Float[Tensor, " heads"]:
        """Largest eigenvalue of A^T A."""
        return largest_eigenvalue(self.products)

    def unbounded(self, jitter: Float[Tensor, " heads"]) -> Float[Tensor, "heads slots"]:
        """(A^T A + jitter I)^-1 A^T b."""
        factor = torch.linalg.cholesky(add_diagonal(self.products, jitter.unsqueeze(-1)))
        return self._gathered(solve_factored(factor, self.mass.unsqueeze(-1)).squeeze(-1))

    def factored(self, diagonal: Float[Tensor, "heads slots"]) -> Solve:
        """Solves (A^T A + diag) x = r for any r, by the identity of Sherman, Morrison and Woodbury."""
        scaled = self.design / diagonal.unsqueeze(-2)
        inner = add_diagonal(scaled @ self.design.mT, torch.ones_like(self.mass[:, :1]))
        factor = torch.linalg.cholesky(inner)

        def solve(right: Float[Tensor, "heads slots"]) -> Float[Tensor, "heads slots"]:
            first = right / diagonal
            inside = solve_factored(factor, self._spread(first).unsqueeze(-1)).squeeze(-1)
            return first - self._gathered(inside) / diagonal

        return solve

    def _spread(self, weights: Float[Tensor, "heads slots"]) -> Float[Tensor, "heads queries"]:
        return (self.design * weights.unsqueeze(1)).sum(-1)

    def _gathered(self, mass: Float[Tensor, "heads queries"]) -> Float[Tensor, "heads slots"]:
        return (mass.unsqueeze(1) @ self.design).squeeze(1)


@dataclass(frozen=True)
class PulledSystem:
    """|A w - b|^2 + strength |w - 1|^2: weights for which A says little stay near 1.

    Args:
        system: A and b.
        strength: of the pull, at least 0.
    """

    system: TallSystem | WideSystem
    strength: Float[Tensor, " heads"]

    @property
    def target(self) -> Float[Tensor, "heads slots"]:
        """Right-hand side of the normal equations."""
        return self.system.target + self.strength.unsqueeze(-1)

    def select(self, rows: Int[Tensor, " rows"]) -> "PulledSystem":
        """Some of the heads."""
        return PulledSystem(self.system.select(rows), self.strength[rows])

    def divided(self, unit: Float[Tensor, " heads"]) -> "PulledSystem":
        """The objective divided by a number per head."""
        return PulledSystem(self.system.divided(unit), self.strength / unit)

    def size(self) -> Float[Tensor, " heads"]:
        """Mean of the diagonal of the normal equations."""
        return self.system.size() + self.strength

    def apply(self, weights: Float[Tensor, "heads slots"]) -> Float[Tensor, "heads slots"]:
        """(A^T A + strength I) w."""
        return self.system.apply(weights) + self.strength.unsqueeze(-1) * weights

    def norm(self) -> Float[Tensor, " heads"]:
        """Largest eigenvalue of the normal equations."""
        return self.system.norm() + self.strength

    def unbounded(self, jitter: Float[Tensor, " heads"]) -> Float[Tensor, "heads slots"]:
        """Solution of the normal equations with a jitter on their diagonal."""
        return self.factored(jitter.unsqueeze(-1).expand_as(self.target))(self.target)

    def factored(self, diagonal: Float[Tensor, "heads slots"]) -> Solve:
        """Solves (A^T A + strength I + diag) x = r for any r."""
        return self.system.factored(diagonal + self.strength.unsqueeze(-1))


System = TallSystem | WideSystem | PulledSystem


def is_wide(num_rows: int, num_columns: int, num_iters: int | None) -> bool:
    """Whether ``WideSystem`` takes fewer operations than ``TallSystem``.

    Args:
        num_rows: of A.
        num_columns: of A.
        num_iters: as in ``solve_box``; only one system is solved where it is given.
    """
    return num_columns > num_rows * (2.5 if num_iters is None else 1.0)


def solve_box(
    system: System,
    scale: Float[Tensor, " heads"],
    *,
    bounds: tuple[float, float],
    num_iters: int | None = None,
    tolerance: float = 1e-13,
) -> Float[Tensor, "heads slots"]:
    """Weights w that minimise |A w - b|^2 with exp(bounds[0]) <= w <= exp(bounds[1]).

    Args:
        system: A and b, in float64 unless num_iters is given.
        scale: b.b, the size against which convergence is judged.
        bounds: logarithms of the box's sides.
        num_iters: projected-gradient steps from the clamped unconstrained solution; None: interior points until the
            duality gap is at most tolerance * scale.
        tolerance: relative duality gap.
    """
    low, high = math.exp(bounds[0]), math.exp(bounds[1])
    tiny = torch.finfo(scale.dtype).tiny
    if num_iters is None:
        return _interior_point(system, scale, low, high, tolerance)
    norm, target = system.norm().clamp_min(tiny), system.target
    weights = system.unbounded(_JITTER[scale.dtype] * norm).clamp(low, high)
    step = (1 / norm).unsqueeze(-1)
    for _ in range(num_iters):
        weights = (weights - step * (system.apply(weights) - target)).clamp(low, high)
    return weights


def _interior_point(
    system: System,
    scale: Float[Tensor, " heads"],
    low: float,
    high: float,
    tolerance: float,
) -> Float[Tensor, "heads slots"]:
    """Mehrotra's predictor-corrector method, one Cholesky factorisation per step, for all heads at once.

    Heads that have converged leave the batch. The last iterate is clamped to the box.
    """
    unit = system.size().clamp_min(torch.finfo(scale.dtype).tiny)
    system, scale = system.divided(unit), scale / unit
    target = system.target
    result = torch.full_like(target, math.sqrt(low * high))
    gradient = system.apply(result) - target
    floor = 0.1 * gradient.abs().mean(-1, keepdim=True) + 1e-3
    point = torch.stack([result, gradient.clamp(min=0) + floor, (-gradient).clamp(min=0) + floor])
    alive = torch.arange(len(target), device=target.device)
    for _ in range(_MAX_ITERATIONS):
        point = _newton_step(system, target, point, low, high)
        result[alive] = point[0]
        weights, below, above = point
        gap = (below * (weights - low) + above * (high - weights)).sum(-1)
        slack = (system.apply(weights) - target - below + above).abs().sum(-1) * high
        rounding = 1e-14 * high * (target.abs() + below + above).sum(-1)
        going = gap + slack > tolerance * scale + rounding
        if not going.any():
            break
        if not going.all():
            alive, point = alive[going], point[:, going]
            system, target, scale = system.select(going.nonzero().flatten()), target[going], scale[going]
    return result.clamp(low, high)


def _newton_step(
    system: System,
    target: Float[Tensor, "heads slots"],
    point: Float[Tensor, "three heads slots"],
    low: float,
    high: float,
) -> Float[Tensor, "three heads slots"]:
    """One step for weights and the multipliers of lower and upper bound, strictly inside all their bounds."""
    weights, below, above = point
    room_below, room_above = weights - low, high - weights
    gradient = system.apply(weights) - target
    solve = system.factored(below / room_below + above / room_above)
    rooms = torch.stack([room_below, room_above, below, above])

    def direction(below_target: Tensor | float, above_target: Tensor | float) -> Tensor:
        right = -gradient + below_target / room_below - above_target / room_above
        move = solve(right)
        to_below = (below_target - below * move) / room_below - below
        to_above = (above_target + above * move) / room_above - above
        return torch.stack([move, to_below, to_above])

    def length(moves: Tensor) -> Tensor:
        change = torch.stack([moves[0], -moves[0], moves[1], moves[2]])
        return torch.where(change < 0, -rooms / change, torch.inf).amin((0, 2)).clamp(max=1.0).unsqueeze(-1)

    def gap(moves: Tensor, step: Tensor | float) -> Tensor:
        to = point + step * moves
        return (to[1] * (to[0] - low) + to[2] * (high - to[0])).mean(-1, keepdim=True) / 2

    predicted = direction(0.0, 0.0)
    now = gap(predicted, 0.0)
    centre = now * (gap(predicted, length(predicted)) / now).clamp(min=0) ** 3
    moves = direction(centre - predicted[1] * predicted[0], centre + predicted[2] * predicted[0])
    plain = direction(0.3 * now, 0.3 * now)
    step, plain_step = 0.995 * length(moves), 0.995 * length(plain)
    # the second-order correction alone can cycle
    better = gap(moves, step) <= gap(plain, plain_step)
    return point + torch.where(better, step * moves, plain_step * plain)
