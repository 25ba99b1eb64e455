"""The smallest enclosing ball, and the paper's hull lemma with its sharp constant.

H = conv{x_1, ..., x_k}, alpha > 1. The lemma: for every v some i has
dist(alpha x_i + v, H) >= (alpha - 1) diam(H) / 2. The sharp constant is (alpha - 1) R, with R the
radius of the smallest ball around the points and c its centre. Proof: v = -(alpha - 1) c attains
it, since alpha x_i + v lies (alpha - 1)(x_i - c) from x_i in H. Conversely c = sum_i mu_i x_i with
mu in the simplex and mu_i > 0 only where |x_i - c| = R. Project onto the unit vector along x_i - c:
the distance of alpha x_i + v is at least (alpha - 1) R + <v + (alpha - 1) c, x_i - c> / R, since
<x - c, x_i - c> <= R^2 on H. The mu-mean of the last term is 0, so for some i it is not negative.
By Jung's theorem R <= diam sqrt(d / (2 (d + 1))): the lemma is loose by less than sqrt 2.

References: KV-CAT, appendix "Compressible Transformers for General Functions", the lemma on convex
hulls; Jung 1901.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize, nnls

from kvcat.types import Float, Tensor


@dataclass(frozen=True, eq=False)
class Ball:
    """A centre c, the radius max_i w_i ||c - x_i||, and a lower bound on the radius of every ball.

    The bound: for mu in the simplex and every centre the largest w_i^2 ||c - x_i||^2 is at least
    sum_i mu_i ||c - x_i||^2 / sum_i mu_i w_i^-2, which is least at c = sum_i mu_i x_i.
    """

    center: Float[Tensor, " d"]
    radius: float
    lower_bound: float


def enclosing_ball(points: Float[Tensor, "points d"], weights: Float[Tensor, " points"] | None = None) -> Ball:
    """The ball of least radius max_i w_i ||c - x_i|| over centres c.

    SciPy's SLSQP on the few points that matter: the farthest point is added until none is outside.

    Args:
        points: x_i, at least one, finite; duplicates and affinely dependent points are allowed.
        weights: w_i > 0, default 1.

    Raises:
        ArithmeticError: the radius exceeds its lower bound by more than 1e-8 of itself.
    """
    _check_points(points)
    if weights is not None and not (weights.isfinite().all() and (weights > 0).all()):
        raise ValueError(f"weights must be positive and finite, got {weights.min()} to {weights.max()}")
    origin, w = points.mean(0), np.ones(len(points)) if weights is None else weights.numpy()
    spread, heaviest = float((points - origin).abs().max()) or 1.0, float(w.max())
    x, w = ((points - origin) / spread).numpy(), w / heaviest
    center, held = x[w.argmax()], [int(w.argmax())]
    while True:
        distances = w * np.linalg.norm(x - center, axis=1)
        farthest, inside = int(distances.argmax()), distances[held].max()
        if farthest in held or distances[farthest] <= inside * (1 + 1e-13):
            break
        held.append(farthest)
        center = _center(x[held], w[held], center)
    radius = float(distances.max())
    touching = np.flatnonzero(distances >= radius * (1 - 1e-6))
    offsets = (x[touching] - center).T / (radius or 1.0)
    mu = np.zeros(len(x))
    mu[touching], _ = nnls(np.vstack([offsets, np.ones(len(touching))]), np.append(np.zeros(len(center)), 1.0))
    mu /= mu.sum()
    bound = float(mu @ ((x - mu @ x) ** 2).sum(1) / (mu @ w**-2)) ** 0.5
    if not radius - bound <= 1e-8 * radius:
        raise ArithmeticError(f"the ball of {len(x)} points was found only to {radius - bound:.0e} of {radius:.0e}")
    scale = spread * heaviest
    return Ball(spread * torch.from_numpy(center) + origin, radius * scale, bound * scale)


def _center(x: np.ndarray, w: np.ndarray, start: np.ndarray) -> np.ndarray:
    """The centre of the ball around these points: minimise t with w_i^2 ||c - x_i||^2 <= t."""
    squares = w[:, None] ** 2
    inside = {
        "type": "ineq",
        "fun": lambda z: z[-1] - (squares * (z[:-1] - x) ** 2).sum(1),
        "jac": lambda z: np.column_stack([-2 * squares * (z[:-1] - x), np.ones(len(x))]),
    }
    first = np.append(start, (squares * (start - x) ** 2).sum(1).max())
    slope = np.append(np.zeros(len(start)), 1.0)
    options = {"ftol": 1e-16, "maxiter": 200}
    found = minimize(lambda z: z[-1], first, jac=lambda _: slope, constraints=inside, method="SLSQP", options=options)
    return found.x[:-1]


def hull_lemma_bound(points: Float[Tensor, "points d"], alpha: float) -> float:
    """(alpha - 1) / 2 diam(H): for every v some alpha x_i + v is at least this far from H.

    Args:
        points: x_i, at least one, finite.
        alpha: the stretch, above 1; in Lemma 2 it is (n + k) / (r + k).
    """
    _check_points(points, alpha)
    return (alpha - 1) / 2 * float(torch.linalg.vector_norm(points[:, None] - points, dim=-1).max())


def sharp_constant(points: Float[Tensor, "points d"], alpha: float) -> float:
    """(alpha - 1) R = min_v max_i dist(alpha x_i + v, H); arguments as :func:`hull_lemma_bound`."""
    _check_points(points, alpha)
    return (alpha - 1) * enclosing_ball(points).radius


def _check_points(points: Tensor, alpha: float = 2.0) -> None:
    if points.shape[0] < 1 or points.dtype != torch.float64 or not points.isfinite().all():
        raise ValueError(f"a hull needs finite float64 points, one at least, got {points.shape[0]}")
    if not (math.isfinite(alpha) and alpha > 1):
        raise ValueError(f"alpha must be finite and above 1, got {alpha}")
