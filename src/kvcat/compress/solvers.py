"""Box-constrained and ridge least squares for many attention heads at once."""

import math

import torch

from kvcat.errors import InputError
from kvcat.types import Float, Tensor

_MAX_ITERATIONS = 100
_POWER_ITERATIONS = 200


def fit_log_bias(
    kept_scores: Float[Tensor, "*heads queries slots"],
    dense_scores: Float[Tensor, "*heads queries tokens"],
    *,
    bounds: tuple[float, float] = (-3.0, 3.0),
    num_iters: int | None = None,
) -> Float[Tensor, "*heads slots"]:
    """Log-bias per kept slot so that the kept slots carry the attention mass of the whole prefix.

    Minimises, for every head, sum_i (sum_j A_ij w_j - b_i)^2 with exp(bounds[0]) <= w_j <= exp(bounds[1]), where
    A_ij = exp(kept_scores_ij - m_i), b_i = sum_t exp(dense_scores_it - m_i), m_i = max_t dense_scores_it; returns
    log w.

    Args:
        kept_scores: scaled scores q.k / sqrt(head_dim) of the kept keys, nats; -inf where a query does not see a key.
        dense_scores: the same queries against the whole prefix, nats.
        bounds: box on the log-bias, nats, lower < upper.
        num_iters: projected-gradient steps from the clamped unconstrained solution; None solves to convergence.

    Raises:
        InputError: bounds not increasing, num_iters negative.

    References: KV-CAT, appendix "Attention-Matching"; Zweiger et al. 2026, arXiv:2602.16284.
    """
    check_log_bias_options(bounds, num_iters)
    top = dense_scores.amax(-1, keepdim=True)
    mass = (dense_scores - top).exp().sum(-1).double()
    design = (kept_scores - top).exp().double()
    gram = design.mT @ design
    target = (design.mT @ mass.unsqueeze(-1)).squeeze(-1)
    weights = solve_box(gram, target, mass.square().sum(-1), bounds=bounds, num_iters=num_iters)
    return weights.log().to(kept_scores.dtype)


def check_log_bias_options(bounds: tuple[float, float], num_iters: int | None) -> None:
    """Refuses options no log-bias can be fitted with.

    Raises:
        InputError: bounds not increasing, num_iters negative.
    """
    if not bounds[0] < bounds[1]:
        raise InputError(f"bounds must increase, not {bounds}")
    if num_iters is not None and num_iters < 0:
        raise InputError(f"num_iters must not be negative, not {num_iters}")


def solve_box(
    gram: Float[Tensor, "*heads slots slots"],
    target: Float[Tensor, "*heads slots"],
    scale: Float[Tensor, "*heads"],
    *,
    bounds: tuple[float, float],
    num_iters: int | None = None,
    tolerance: float = 1e-13,
) -> Float[Tensor, "*heads slots"]:
    """Weights w that minimise w.G w / 2 - t.w with exp(bounds[0]) <= w <= exp(bounds[1]).

    Args:
        gram: A^T A, in float64.
        target: A^T b.
        scale: b.b, the size against which convergence is judged.
        bounds: logarithms of the box's sides.
        num_iters: projected-gradient steps from the clamped unconstrained solution; None: interior points until the
            duality gap is at most tolerance * scale.
        tolerance: relative duality gap.
    """
    shape, slots = target.shape, target.shape[-1]
    gram, target = gram.reshape(-1, slots, slots), target.reshape(-1, slots)
    low, high = math.exp(bounds[0]), math.exp(bounds[1])
    if num_iters is None:
        return _interior_point(gram, target, scale.reshape(-1), low, high, tolerance).reshape(shape)
    size = gram.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(torch.finfo(gram.dtype).tiny)
    factor = torch.linalg.cholesky(_add_diagonal(gram, (1e-10 * size)[:, None]))
    weights = _solve(factor, target.unsqueeze(-1)).squeeze(-1).clamp(low, high)
    step = (1 / largest_eigenvalue(gram)).unsqueeze(-1)
    for _ in range(num_iters):
        weights = (weights - step * (_apply(gram, weights) - target)).clamp(low, high)
    return weights.reshape(shape)


def _interior_point(
    gram: Float[Tensor, "heads slots slots"],
    target: Float[Tensor, "heads slots"],
    scale: Float[Tensor, " heads"],
    low: float,
    high: float,
    tolerance: float,
) -> Float[Tensor, "heads slots"]:
    """Mehrotra's predictor-corrector method, one Cholesky factorisation per step, for all heads at once.

    Heads that have converged leave the batch. The last iterate is clamped to the box.
    """
    unit = gram.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(torch.finfo(gram.dtype).tiny)
    gram, target, scale = gram / unit[:, None, None], target / unit[:, None], scale / unit
    result = torch.full_like(target, math.sqrt(low * high))
    gradient = _apply(gram, result) - target
    floor = 0.1 * gradient.abs().mean(-1, keepdim=True) + 1e-3
    point = torch.stack([result, gradient.clamp(min=0) + floor, (-gradient).clamp(min=0) + floor])
    alive = torch.arange(len(target), device=target.device)
    for _ in range(_MAX_ITERATIONS):
        point = _newton_step(gram, target, point, low, high)
        result[alive] = point[0]
        weights, below, above = point
        gap = (below * (weights - low) + above * (high - weights)).sum(-1)
        slack = (_apply(gram, weights) - target - below + above).abs().sum(-1) * high
        rounding = 1e-14 * high * (target.abs() + below + above).sum(-1)
        going = gap + slack > tolerance * scale + rounding
        if not going.any():
            break
        if not going.all():
            alive, point = alive[going], point[:, going]
            gram, target, scale = gram[going], target[going], scale[going]
    return result.clamp(low, high)


def _newton_step(
    gram: Float[Tensor, "heads slots slots"],
    target: Float[Tensor, "heads slots"],
    point: Float[Tensor, "three heads slots"],
    low: float,
    high: float,
) -> Float[Tensor, "three heads slots"]:
    """One step for weights and the multipliers of lower and upper bound, strictly inside all their bounds."""
    weights, below, above = point
    room_below, room_above = weights - low, high - weights
    gradient = _apply(gram, weights) - target
    factor = torch.linalg.cholesky(_add_diagonal(gram, below / room_below + above / room_above))
    rooms = torch.stack([room_below, room_above, below, above])

    def direction(below_target: Tensor | float, above_target: Tensor | float) -> Tensor:
        right = -gradient + below_target / room_below - above_target / room_above
        move = _solve(factor, right.unsqueeze(-1)).squeeze(-1)
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


def fit_values(
    weights: Float[Tensor, "*heads queries slots"],
    targets: Float[Tensor, "*heads queries value_dim"],
    *,
    ridge: float | None = 1e-6,
) -> Float[Tensor, "*heads slots value_dim"]:
    """Values C that minimise |weights C - targets|^2 + ridge * |weights|_2^2 * |C|^2, the middle norm spectral.

    Solved in float64 through the smaller of the two normal equations, over slots or over queries.

    Args:
        weights: attention weights of the kept slots.
        targets: attention outputs of the dense prefix.
        ridge: relative to the squared spectral norm, larger than 0; None gives the minimum-norm least squares without
            ridge, as the original implementation's default solver does.

    Raises:
        InputError: ridge not larger than 0.

    References: KV-CAT, appendix "Attention-Matching"; Zweiger et al. 2026, arXiv:2602.16284.
    """
    check_ridge(ridge)
    design, wanted = weights.double(), targets.double()
    if ridge is None:
        # only LAPACK's gelsd handles rank deficiency, and it runs on the CPU
        solution = torch.linalg.lstsq(design.cpu(), wanted.cpu(), driver="gelsd").solution
        return solution.to(targets)
    if weights.shape[-2] < weights.shape[-1]:
        gram = design @ design.mT
        return (design.mT @ solve_ridge(gram, wanted, ridge)).to(targets.dtype)
    return solve_ridge(design.mT @ design, design.mT @ wanted, ridge).to(targets.dtype)


def check_ridge(ridge: float | None) -> None:
    """Refuses a ridge that is not larger than 0.

    Raises:
        InputError: ridge not larger than 0.
    """
    if ridge is not None and not ridge > 0:
        raise InputError(f"ridge must be larger than 0, or None, not {ridge}")


def solve_ridge(
    gram: Float[Tensor, "*heads rows rows"], right: Float[Tensor, "*heads rows value_dim"], ridge: float
) -> Float[Tensor, "*heads rows value_dim"]:
    """(G + ridge * |G|_2 I)^-1 right by Cholesky; 0 where G is 0.

    Args:
        gram: positive semi-definite.
        right: right-hand sides.
        ridge: relative to the largest eigenvalue of G, larger than 0.
    """
    largest = largest_eigenvalue(gram)
    shift = torch.where(largest > 0, ridge * largest, torch.ones_like(largest))
    return _solve(torch.linalg.cholesky(_add_diagonal(gram, shift.unsqueeze(-1))), right)


def largest_eigenvalue(gram: Float[Tensor, "*heads rows rows"]) -> Float[Tensor, "*heads"]:
    """Largest eigenvalue of positive semi-definite matrices by power iteration from the row sums.

    Args:
        gram: symmetric, positive semi-definite; exact to rounding for the non-negative matrices of attention weights,
            a lower bound otherwise.
    """
    vector = gram.abs().sum(-1, keepdim=True)
    value = vector.new_zeros(vector.shape[:-2])
    for _ in range(_POWER_ITERATIONS):
        vector = gram @ (vector / vector.norm(dim=-2, keepdim=True).clamp_min(torch.finfo(gram.dtype).tiny))
        before, value = value, vector.norm(dim=-2).squeeze(-1)
        if (value - before <= 1e-7 * value).all():
            break
    return value


def _apply(gram: Tensor, vector: Tensor) -> Tensor:
    return (gram @ vector.unsqueeze(-1)).squeeze(-1)


def _solve(factor: Tensor, right: Tensor) -> Tensor:
    # torch.cholesky_solve is several times slower on batches
    half = torch.linalg.solve_triangular(factor, right, upper=False)
    return torch.linalg.solve_triangular(factor.mT, half, upper=True)


def _add_diagonal(gram: Tensor, diagonal: Tensor) -> Tensor:
    result = gram.clone()
    result.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    return result
