"""The paper's hull lemma, with the constant that is sharp, and the distance to a convex hull that it speaks of.

H = conv{x_1, ..., x_k}, alpha > 1. The lemma: for every v some i has dist(alpha x_i + v, H) >= (alpha - 1) diam(H) / 2.
The sharp constant is (alpha - 1) R, R the radius of the smallest ball that holds the points and c its centre:

- v = -(alpha - 1) c attains it: alpha x_i + v = x_i + (alpha - 1) (x_i - c) is at most (alpha - 1) R from x_i, in H.
- No v does better. c is a mean sum_i lambda_i x_i of points with ||x_i - c|| = R (else the ball could shrink). Put
  u_i = (x_i - c) / R. Since <u_i, x - c> <= R on H, the distance of alpha x_i + v from H is at least
  <u_i, alpha x_i + v - c> - R = (alpha - 1) R + <u_i, v + (alpha - 1) c>. The last terms have mean zero under lambda,
  as sum_i lambda_i u_i = 0, so one of them is not negative.

With R >= diam / 2 this proves the lemma anew; the two agree just when a longest segment is a diameter of the ball, and
by Jung's theorem R <= diam sqrt(d / (2 (d + 1))) in d dimensions, so the lemma is loose by less than sqrt 2. "Distinct"
is not needed: of points all equal both constants are 0.

References: KV-CAT, appendix "Compressible Transformers for General Functions", the lemma on convex hulls; Jung 1901;
Wolfe 1976, Finding the nearest point in a polytope.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from kvcat.theory.enclosing import enclosing_ball
from kvcat.types import Float, Tensor

_ROUNDING = 1e-13  # relative to the largest distance: gaps below are rounding


@dataclass(frozen=True, eq=False)
class HullDistance:
    """The distance of a point from a hull, the nearest point, and a lower bound that proves the distance.

    ``lower_bound`` = <u, x> - max_j <u, x_j> for the unit vector u from the nearest point to x: no point of the hull is
    closer, whatever way ``nearest`` was found. Inside the hull it is 0.
    """

    distance: float
    lower_bound: float
    nearest: Float[Tensor, " d"]


def distance_to_hull(x: Float[Tensor, " d"], points: Float[Tensor, "points d"]) -> HullDistance:
    """dist(x, conv{x_1, ..., x_k}), Euclidean, by Wolfe's active-set method, which is finite.

    The error is rounding for points in general position, and up to 1e-8 of the largest distance where they are nearly
    dependent; ``lower_bound`` holds whatever the rounding.

    Args:
        x: the point.
        points: x_i, at least one; duplicates and points inside the hull of others are allowed.

    Raises:
        ValueError: no points, of another width than x, or anything that is not finite.
    """
    _check_points(points)
    if x.shape != points.shape[1:]:
        raise ValueError(f"the point has {len(x)} coordinates, the hull's points {points.shape[1]}")
    if not x.isfinite().all():
        raise ValueError("the point must be finite")
    shifted = (points - x).numpy()
    unit = float(np.abs(shifted).max())  # squares of the rest neither overflow nor vanish
    if unit == 0.0 or not math.isfinite(unit):
        if unit:
            raise ValueError("the points lie too far apart")
        return HullDistance(0.0, 0.0, x.clone())
    shifted = shifted / unit
    nearest = _smallest_of_hull(shifted)
    distance = float(np.linalg.norm(nearest))
    reach = float(np.linalg.norm(shifted, axis=1).max())
    if distance <= _ROUNDING * reach:
        return HullDistance(0.0, 0.0, x.clone())
    bound = float((shifted @ (nearest / distance)).min())
    return HullDistance(unit * distance, max(unit * bound, 0.0), x + unit * torch.from_numpy(nearest))


def _smallest_of_hull(points: np.ndarray) -> np.ndarray:
    """The point of least norm in the hull: the least point of a face, entered point by point, left when outside."""
    norms = np.linalg.norm(points, axis=1)
    held, weights = [int(norms.argmin())], np.ones(1)
    best = points[held[0]]
    while True:
        length = float(np.linalg.norm(best))
        along = points @ best
        entering = int(along.argmin())
        close = length * length - along[entering] <= _ROUNDING * norms.max() * length
        if length <= _ROUNDING * norms.max() or close or entering in held:
            return best
        held, weights = [*held, entering], np.append(weights, 0.0)
        while True:
            affine = _affine_weights(points[held])
            if (affine > 0).all():
                weights = affine
                break
            leaving = affine <= 0
            part = float((weights[leaving] / (weights[leaving] - affine[leaving])).min()) if leaving.any() else 1.0
            weights = (1 - part) * weights + part * affine
            weights[leaving & (weights <= _ROUNDING)] = 0
            held, weights = [i for i, w in zip(held, weights, strict=True) if w > 0], weights[weights > 0]
        shorter = weights @ points[held]
        if np.linalg.norm(shorter) >= length:  # the descent is strict but for rounding
            return best
        best = shorter


def _affine_weights(points: np.ndarray) -> np.ndarray:
    """Weights, of either sign and sum 1, of the point of least norm in the points' affine hull."""
    others = np.linalg.lstsq((points[1:] - points[0]).T, -points[0], rcond=None)[0]
    return np.concatenate([[1 - others.sum()], others])


def hull_lemma_bound(points: Float[Tensor, "points d"], alpha: float) -> float:
    """(alpha - 1) / 2 diam(H): a distance from H that, for every v, some alpha x_i + v has or exceeds.

    Args:
        points: x_i, at least one.
        alpha: the stretch, above 1; in Lemma 2 it is (n + k) / (r + k).

    Raises:
        ValueError: alpha not above 1, no points, or anything that is not finite.
    """
    _check_alpha(alpha)
    _check_points(points)
    apart = torch.linalg.vector_norm(points[:, None] - points, dim=-1)
    return (alpha - 1) / 2 * float(apart.max())


def sharp_constant(points: Float[Tensor, "points d"], alpha: float) -> float:
    """(alpha - 1) R = min_v max_i dist(alpha x_i + v, H), R the radius of the smallest ball that holds the points.

    The largest constant with which the hull lemma holds; arguments and errors as :func:`hull_lemma_bound`.
    """
    _check_alpha(alpha)
    _check_points(points)
    return (alpha - 1) * enclosing_ball(points).radius


def best_shift(points: Float[Tensor, "points d"], alpha: float) -> Float[Tensor, " d"]:
    """The shift v = -(alpha - 1) c, c the ball's centre, for which max_i dist(alpha x_i + v, H) is the sharp constant.

    Arguments and errors as :func:`hull_lemma_bound`.
    """
    _check_alpha(alpha)
    _check_points(points)
    return -(alpha - 1) * enclosing_ball(points).center


def largest_distance(points: Float[Tensor, "points d"], alpha: float, shift: Float[Tensor, " d"]) -> float:
    """The maximum over i of dist(alpha x_i + v, H), what the hull lemma bounds from below for every v."""
    _check_alpha(alpha)
    return max(distance_to_hull(alpha * point + shift, points).distance for point in points)


def _check_alpha(alpha: float) -> None:
    if not (math.isfinite(alpha) and alpha > 1):
        raise ValueError(f"alpha must be finite and above 1, got {alpha}")


def _check_points(points: Tensor) -> None:
    if points.shape[0] < 1 or points.dtype != torch.float64 or not points.isfinite().all():
        raise ValueError(f"a hull needs float64 points that are finite, one at least, got {points.shape[0]}")
