"""Box-constrained and ridge least squares for many attention heads at once."""

import math

import torch

from kvcat.compress.box import TallSystem, WideSystem, is_wide, solve_box
from kvcat.compress.symmetric import add_diagonal, largest_eigenvalue, solve_factored
from kvcat.errors import InputError
from kvcat.types import Float, Tensor

_SINGLE_PRECISION_RIDGE = 1e-5


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
    mass, design = mass.reshape(-1, mass.shape[-1]), design.reshape(-1, *design.shape[-2:])
    if is_wide(design.shape[1], design.shape[2], num_iters):
        system = WideSystem(design, mass)
    else:
        system = TallSystem(design.mT @ design, (design.mT @ mass.unsqueeze(-1)).squeeze(-1))
    weights = solve_box(system, mass.square().sum(-1), bounds=bounds, num_iters=num_iters)
    return weights.log().to(kept_scores.dtype).reshape(*kept_scores.shape[:-2], -1)


def check_log_bias_options(bounds: tuple[float, float], num_iters: int | None) -> None:
    """Refuses options no log-bias can be fitted with.

    Raises:
        InputError: bounds not increasing or beyond 50 nats, num_iters negative.
    """
    if not -50 <= bounds[0] < bounds[1] <= 50:
        raise InputError(f"bounds must increase and lie within 50 nats of 0, not {bounds}")
    if num_iters is not None and num_iters < 0:
        raise InputError(f"num_iters must not be negative, not {num_iters}")


def fit_values(
    weights: Float[Tensor, "*heads queries slots"],
    targets: Float[Tensor, "*heads queries value_dim"],
    *,
    ridge: float | None = 1e-6,
) -> Float[Tensor, "*heads slots value_dim"]:
    """Values C that minimise |weights C - targets|^2 + ridge * |weights|_2^2 * |C|^2, the middle norm spectral.

    Solved through the smaller of the two normal equations, over slots or over queries; in float64, or in the weights'
    own precision where the ridge is at least 1e-5.

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
    single = ridge is not None and ridge >= _SINGLE_PRECISION_RIDGE
    design, wanted = (weights, targets) if single else (weights.double(), targets.double())
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
    if ridge is not None and not 0 < ridge < math.inf:
        raise InputError(f"ridge must be larger than 0 and finite, or None, not {ridge}")


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
    return solve_factored(torch.linalg.cholesky(add_diagonal(gram, shift.unsqueeze(-1))), right)
