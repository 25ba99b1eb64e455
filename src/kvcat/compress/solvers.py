"""Least squares for many attention heads at once: box-constrained, and with a ridge."""

import math

import torch

from kvcat.errors import InputError
from kvcat.types import Float, Tensor

_TOLERANCE = 1e-5
_EXACT_TOLERANCE = 1e-11
_POWER_STEPS = 60
_STEPS_PER_CHECK = 4
_MAX_STEPS = 20_000
_SINGLE_PRECISION_RIDGE = 1e-5


def fit_log_bias(
    kept_scores: Float[Tensor, "*heads queries slots"],
    dense_scores: Float[Tensor, "*heads queries tokens"],
    *,
    bounds: tuple[float, float] = (-3.0, 3.0),
    num_iters: int | None = None,
    pull: float = 0.0,
    weights: Float[Tensor, "*heads queries"] | None = None,
) -> Float[Tensor, "*heads slots"]:
    """Log-bias per kept slot so that the kept slots carry the attention mass of the whole prefix.

    Minimises, for every head, |A w - b|^2 + pull |A|_2^2 |w - 1|^2 with exp(bounds[0]) <= w_j <=
    exp(bounds[1]), where A_ij = c_i exp(kept_scores_ij - m_i), b_i = c_i sum_t exp(dense_scores_it
    - m_i), m_i = max_t dense_scores_it and c_i = weights_i; returns log w. Accelerated projected
    gradient on the normal equations, whose condition number is at most 1 + 1 / pull, until no
    weight moves by more than 1e-5 in a step; without a pull in float64, by 1e-11.

    Args:
        kept_scores: scaled scores q.k / sqrt(head_dim) of the kept keys, nats; -inf where a query
            does not see a key.
        dense_scores: the same queries against the whole prefix, nats; a single column holds the log
            of the whole mass.
        bounds: box on the log-bias, nats, lower < upper.
        num_iters: plain projected-gradient steps without pull from the clamped least-squares
            solution (``least_squares``: minimum norm, no ridge), as in the paper; None solves to
            the tolerance.
        pull: towards w = 1, relative to the squared spectral norm of A, at least 0.
        weights: factor on the error of each query; None: 1.

    Raises:
        InputError: bounds that do not increase, a negative num_iters or pull, or both of them.

    References: KV-CAT, appendix "Attention-Matching"; Zweiger et al. 2026, arXiv:2602.16284;
        restarts of the acceleration: O'Donoghue and Candes 2015, arXiv:1204.3982.
    """
    _check_log_bias_options(bounds, num_iters, pull)
    largest = dense_scores.amax(-1, keepdim=True)
    design = (kept_scores - largest).exp_()
    mass = (dense_scores - largest).exp().sum(-1)
    if weights is not None:
        design.mul_(weights.unsqueeze(-1))
        mass = mass * weights
    low = math.exp(bounds[0])
    high = math.exp(bounds[1])
    if num_iters is not None:
        solution = _projected_steps(design, mass, low, high, num_iters)
    elif pull:
        solution = _pulled_weights(design, mass, low, high, pull, _TOLERANCE)
    else:
        # without a pull the equations may be nearly singular
        solution = _pulled_weights(design.double(), mass.double(), low, high, 0.0, _EXACT_TOLERANCE)
    return solution.log().to(kept_scores.dtype)


def fit_values(
    weights: Float[Tensor, "*heads queries slots"],
    targets: Float[Tensor, "*heads queries value_dim"],
    *,
    ridge: float | None = 1e-6,
    towards: Float[Tensor, "*heads slots value_dim"] | None = None,
) -> Float[Tensor, "*heads slots value_dim"]:
    """Values C that minimise |weights C - targets|^2 + ridge * |weights|_2^2 * |C - towards|^2
    (middle norm spectral).

    Solved through the smaller of the two normal equations, over slots or over queries; in float64,
    or in the weights' own precision where the ridge is at least 1e-5.

    Args:
        weights: attention weights of the kept slots.
        targets: attention outputs of the dense prefix.
        ridge: relative to the squared spectral norm, larger than 0; None: minimum-norm least
            squares without ridge, like the default solver of the original implementation.
        towards: where the ridge pulls the values; None: 0.

    Raises:
        InputError: ridge not larger than 0.

    References: KV-CAT, appendix "Attention-Matching"; Zweiger et al. 2026, arXiv:2602.16284.
    """
    check_ridge(ridge)
    if towards is not None:
        product = weights @ towards
        residual = torch.sub(targets, product, out=product)
        return towards + fit_values(weights, residual, ridge=ridge)
    if ridge is None:
        return least_squares(weights, targets)
    design = weights
    wanted = targets
    if ridge < _SINGLE_PRECISION_RIDGE:
        design = weights.double()
        wanted = targets.double()
    num_queries, num_slots = weights.shape[-2:]
    if num_queries < num_slots:
        values = design.mT @ _solve_ridge(design @ design.mT, wanted, ridge)
    else:
        values = _solve_ridge(design.mT @ design, design.mT @ wanted, ridge)
    return values.to(targets.dtype)


def least_squares(
    design: Float[Tensor, "*heads queries slots"], targets: Float[Tensor, "*heads queries columns"]
) -> Float[Tensor, "*heads slots columns"]:
    """The X of smallest norm among those that minimise |design X - targets|^2, without any ridge.

    Singular values below the rounding of float64 count as 0. Solved in float64 by LAPACK's gelsd on
    the CPU, whatever the device: the other drivers of torch need a design of full rank, and GPUs
    have no other driver than those.
    """
    solution = torch.linalg.lstsq(
        design.double().cpu(), targets.double().cpu(), driver="gelsd"
    ).solution
    return solution.to(targets)


def check_ridge(ridge: float | None) -> None:
    """Reject a ridge that is not larger than 0."""
    if ridge is not None and not 0 < ridge < math.inf:
        raise InputError(f"ridge must be larger than 0 and finite, or None, not {ridge}")


def largest_eigenvalue(gram: Float[Tensor, "*heads rows rows"]) -> Float[Tensor, "*heads"]:
    """Largest eigenvalue of positive semi-definite matrices by the power method from the row sums.

    For matrices without negative entries, such as attention weights', it is exact to 1e-6; else a
    lower bound.
    """
    tiny = torch.finfo(gram.dtype).tiny
    vector = gram.abs().sum(-1)
    value = torch.zeros_like(gram[..., 0, 0])
    for step in range(_POWER_STEPS):
        vector = vector / vector.norm(dim=-1, keepdim=True).clamp_min(tiny)
        product = _times(gram, vector)
        if step % _STEPS_PER_CHECK == 0:
            new_value = (vector * product).sum(-1)
            if (new_value - value <= 1e-6 * new_value).all():
                return new_value
            value = new_value
        vector = product
    return value


def _check_log_bias_options(
    bounds: tuple[float, float], num_iters: int | None, pull: float
) -> None:
    if not -50 <= bounds[0] < bounds[1] <= 50:
        raise InputError(f"bounds must increase and lie within 50 nats of 0, not {bounds}")
    if num_iters is not None and num_iters < 0:
        raise InputError(f"num_iters must not be negative, not {num_iters}")
    if not 0 <= pull < math.inf:
        raise InputError(f"pull must be at least 0 and finite, not {pull}")
    if pull and num_iters is not None:
        raise InputError(f"num_iters={num_iters} steps are without a pull, not with pull={pull}")


def _pulled_weights(
    design: Tensor, mass: Tensor, low: float, high: float, pull: float, tolerance: float
) -> Tensor:
    """Weights that minimise |A w - b|^2 with a pull towards 1, solved to a tolerance."""
    gram = design.mT @ design
    target = _times(design.mT, mass)
    return solve_box(gram, target, low, high, pull=pull, tolerance=tolerance)


def _projected_steps(
    design: Tensor, mass: Tensor, low: float, high: float, num_iters: int
) -> Tensor:
    """Projected-gradient steps on |A w - b|^2 from the clamped least-squares solution, as in the
    paper.
    """
    num_queries, num_slots = design.shape[-2:]
    gram = design @ design.mT if num_queries < num_slots else design.mT @ design
    squared_norm = largest_eigenvalue(gram)
    step_size = 1 / squared_norm.clamp_min(torch.finfo(squared_norm.dtype).tiny).unsqueeze(-1)
    start = least_squares(design, mass.unsqueeze(-1)).squeeze(-1)
    weights = start.clamp(low, high)
    for _ in range(num_iters):
        error = _times(design, weights) - mass
        weights = (weights - step_size * _times(design.mT, error)).clamp(low, high)
    return weights


def solve_box(
    gram: Float[Tensor, "*heads slots slots"],
    target: Float[Tensor, "*heads slots"],
    low: float,
    high: float,
    *,
    pull: float,
    tolerance: float,
) -> Float[Tensor, "*heads slots"]:
    """Weights w within [low, high] that minimise w.Gw / 2 - target.w + pull |G|_2 |w - 1|^2 / 2.

    Projected gradient with momentum, which is reset when a step points against it. Each head ends
    when a step moves none of its weights by more than ``tolerance``, or after 20,000 steps.
    """
    scale = torch.ones_like(target)
    if not pull:
        # columns of equal length converge in far fewer steps, and a scaled box is still a box
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        scale = torch.where(diagonal > 0, diagonal, 1.0).sqrt()
        gram = gram / (scale.unsqueeze(-1) * scale.unsqueeze(-2))
        target = target / scale
    lower = low * scale
    upper = high * scale
    tiny = torch.finfo(gram.dtype).tiny
    largest = largest_eigenvalue(gram).clamp_min(tiny).unsqueeze(-1)
    shift = pull * largest
    step_size = 1 / (1.001 * largest + shift)
    # a gradient step without its box is w (I - step_size (G + shift I)) + step_size (target +
    # shift)
    step_matrix = -step_size.unsqueeze(-1) * gram
    step_matrix.diagonal(dim1=-2, dim2=-1).add_(1 - step_size * shift)
    step_offset = step_size * (target + shift)

    # each weight in units of its column's scale
    result = scale
    weights = scale
    extrapolated = scale
    steps_with_momentum = torch.zeros_like(largest)
    has_ended = torch.zeros_like(largest, dtype=torch.bool)
    for index in range(_MAX_STEPS):
        new_weights = _times(step_matrix, extrapolated).add_(step_offset).clamp_(lower, upper)
        moved = new_weights - weights
        if index % _STEPS_PER_CHECK == 0:
            result = torch.where(has_ended, result, new_weights)
            displacement = new_weights - extrapolated
            is_small = displacement.abs() <= tolerance * scale
            has_ended = has_ended | is_small.all(-1, keepdim=True)
            if has_ended.all():
                break
            against_momentum = (displacement * moved).sum(-1, keepdim=True) < 0
            steps_with_momentum.masked_fill_(against_momentum, 0.0)
        momentum = steps_with_momentum / (steps_with_momentum + 3)
        weights = new_weights
        extrapolated = torch.addcmul(new_weights, momentum, moved)
        steps_with_momentum += 1
    return result / scale


def _solve_ridge(gram: Tensor, right: Tensor, ridge: float) -> Tensor:
    """(G + ridge * |G|_2 I)^-1 right by Cholesky; 0 where G is 0."""
    largest = largest_eigenvalue(gram)
    shift = torch.where(largest > 0, ridge * largest, torch.ones_like(largest))
    gram.diagonal(dim1=-2, dim2=-1).add_(shift.unsqueeze(-1))
    factor = torch.linalg.cholesky(gram)
    # on batches in single precision, CPUs solve for rows twice as fast as for columns, or as
    # torch.cholesky_solve
    half = torch.linalg.solve_triangular(factor.mT, right.mT, upper=True, left=False)
    return torch.linalg.solve_triangular(factor, half, upper=False, left=False).mT


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    """Matrix times vector: as row times matrix, since products with one column are several times
    slower on CPUs.
    """
    return (vector.unsqueeze(-2) @ matrix.mT).squeeze(-2)
