"""The smallest enclosing ball of weighted points, with the multipliers that prove it smallest.

Every exact optimum over cache policies in this room is such a ball: where attention is uniform, the error behind a
cache is the weighted distance of one vector, chosen by the policy, from points that the suffixes fix.

References: KV-CAT, appendix "Motivating example" (the inequality of Proposition 1 that the ball sharpens).
"""

from dataclasses import dataclass

import numpy as np
import torch

from kvcat.types import Float, Tensor

_TIGHT = 1e-14  # a constraint's relative slack below this is round-off
_DEPENDENT = 1e-11  # the part of a unit vector outside a span below this is round-off
_LEAST_RATIO = 1e-12  # the squares of lighter points would be lost beside the heaviest


@dataclass(frozen=True, eq=False)
class Ball:
    """A centre c, the radius max_i w_i ||c - x_i|| that it attains, and multipliers mu that bound it from below.

    mu lies in the simplex. For every centre, max_i w_i^2 ||c - x_i||^2 is at least the mean of ||c - x_i||^2 under mu
    over the mean of w_i^-2, which is least at sum_i mu_i x_i: ``lower_bound`` is the root of that value. The radius
    is the one at the centre before that was rounded to float64, which counts beside a point of very large weight.
    """

    center: Float[Tensor, " d"]
    radius: float
    lower_bound: float
    multipliers: Float[Tensor, " points"]

    @property
    def gap(self) -> float:
        """By how much the radius may exceed the smallest one, relative to it: (radius - lower_bound) / radius."""
        return 0.0 if self.radius == 0 else (self.radius - self.lower_bound) / self.radius


def enclosing_ball(
    points: Float[Tensor, "points d"],
    weights: Float[Tensor, " points"] | None = None,
) -> Ball:
    """The ball of least radius max_i w_i ||c - x_i|| over centres c.

    An active-set ascent on the dual max_mu sum_i mu_i ||x_i - sum_j mu_j x_j||^2 / sum_i mu_i w_i^-2: a point that
    lies outside is taken in, the ratio maximised over the points held, those whose multiplier reaches 0 are let go.

    Args:
        points: x_i, float64; duplicates and affinely dependent points are allowed.
        weights: w_i >= 0, default 1. Points of weight 0 are ignored; the others may differ by a factor of 1e12.

    Raises:
        ValueError: no point, no positive weight, a weight that is negative or too small beside the largest, or
            anything that is not finite.
    """
    if points.shape[0] < 1:
        raise ValueError("an enclosing ball needs at least one point")
    x = points.detach().numpy().astype(np.float64)
    w = np.ones(len(x)) if weights is None else weights.detach().numpy().astype(np.float64)
    if not (np.isfinite(x).all() and np.isfinite(w).all()):
        raise ValueError("points and weights must be finite")
    if w.min() < 0 or w.max() == 0:
        raise ValueError(f"weights must be non-negative and one of them positive, got {w.min()} to {w.max()}")
    kept = np.flatnonzero(w > 0)
    if w[kept].min() < _LEAST_RATIO * w.max():
        raise ValueError(f"weights must lie within a factor of 1e12 of each other, got {w[kept].min()} and {w.max()}")
    origin = x[w.argmax()]  # the heaviest point is the one whose distance must be known best
    spread = float(np.abs(x[kept] - origin).max()) or 1.0
    x_kept, w_kept = (x[kept] - origin) / spread, w[kept] / w.max()
    held, mu = _ascend(x_kept, w_kept)
    mu = _polish(x_kept[held], w_kept[held], mu)
    center, squared = _dual(x_kept[held], w_kept[held], mu)
    multipliers = np.zeros(len(x))
    multipliers[kept[held]] = mu
    scale = spread * float(w.max())
    return Ball(
        center=torch.from_numpy(center * spread + origin),
        radius=float((w_kept * np.linalg.norm(x_kept - center, axis=1)).max()) * scale,
        lower_bound=squared**0.5 * scale,
        multipliers=torch.from_numpy(multipliers),
    )


def _dual(x: np.ndarray, w: np.ndarray, mu: np.ndarray) -> tuple[np.ndarray, float]:
    """The centre sum_i mu_i x_i and the dual value, the first point being the heaviest of those held."""
    center = x[0] + mu[1:] @ (x[1:] - x[0])
    value = (mu @ ((x - center) ** 2).sum(1)) / (mu @ w**-2)
    return center, float(value)


def _ascend(x: np.ndarray, w: np.ndarray) -> tuple[list[int], np.ndarray]:
    """Indices of the points that the optimal ball touches and their multipliers."""
    held, mu = [int(w.argmax())], np.ones(1)
    best = -1.0
    while True:
        held, mu = _maximise(x, w, held, mu)
        center, value = _dual(x[held], w[held], mu)
        distances = w * np.linalg.norm(x - center, axis=1)
        outside = int(distances.argmax())
        if value <= best or outside in held or distances[outside] <= value**0.5 * (1 + _TIGHT):
            return held, mu
        best = value
        held, mu = _take_in(x, held, mu, outside)


def _polish(x: np.ndarray, w: np.ndarray, mu: np.ndarray) -> np.ndarray:
    """Newton's method on w_i ||c - x_i|| = t for centre and t at once, while the multipliers stay positive.

    The ascent equalises ||c - x_i||^2 - t^2 / w_i^2, where a light point's round-off drowns a heavy point's distance.
    """
    for _ in range(3):
        if len(mu) == 1:
            break
        center, _ = _dual(x, w, mu)
        offsets, edges = center - x, x[1:] - x[0]
        distances = np.linalg.norm(offsets, axis=1)
        jacobian = np.column_stack([(w / distances)[:, None] * (offsets @ edges.T), -np.ones(len(w))])
        columns = np.append(mu[1:], (w * distances).max())
        step = np.linalg.solve(jacobian * columns, -w * distances) * columns
        moved = mu[1:] + step[:-1]
        if moved.min() <= 0 or moved.sum() >= 1:
            break
        mu = np.append(1 - moved.sum(), moved)
    return mu


def _take_in(x: np.ndarray, held: list[int], mu: np.ndarray, new: int) -> tuple[list[int], np.ndarray]:
    """Hold one more point; if it is an affine combination of those held, exchange it for one of them."""
    edges, edge = x[held[1:]] - x[held[0]], x[new] - x[held[0]]
    combination, *_ = np.linalg.lstsq(edges.T, edge, rcond=None)
    outside_span = np.linalg.norm(edge - combination @ edges)
    held, mu = [*held, new], np.append(mu, 0.0)
    if outside_span > _DEPENDENT * np.linalg.norm(edge):
        return held, mu
    # along this direction the centre stays where it is, so the dual value rises until a multiplier reaches 0
    return _step(held, mu, np.concatenate([[combination.sum() - 1], -combination, [1.0]]), np.inf)


def _step(held: list[int], mu: np.ndarray, move: np.ndarray, longest: float) -> tuple[list[int], np.ndarray]:
    """The largest step t <= longest with mu + t move >= 0, taken; points whose multiplier reaches 0 are let go."""
    falling = np.flatnonzero(move < 0)
    ratios = mu[falling] / -move[falling]
    if ratios.size and ratios.min() < longest:
        mu = mu + ratios.min() * move
        mu[falling[ratios.argmin()]] = 0.0
    else:
        mu = mu + longest * move
    keep = mu > 0
    mu = mu[keep] / mu[keep].sum()
    return [i for i, kept in zip(held, keep, strict=True) if kept], mu


def _maximise(x: np.ndarray, w: np.ndarray, held: list[int], mu: np.ndarray) -> tuple[list[int], np.ndarray]:
    """The dual maximised over the held points, affinely independent: Newton's method on V(mu) - tau D(mu) = 0.

    V is the numerator, D the denominator, tau their ratio at the current mu. Each step goes to the maximum of the
    concave V - tau D, where all held points have one value of ||c - x_i||^2 - tau / w_i^2, or as far as mu >= 0.
    """
    previous, slack = -1.0, np.inf
    while True:
        order = np.argsort(-w[held], kind="stable")
        held, mu = [held[i] for i in order], mu[order]
        points, heights = x[held], w[held]
        center, value = _dual(points, heights, mu)
        scaled, root = heights * np.linalg.norm(points - center, axis=1), value**0.5
        worst = float(np.abs(scaled - root).max())
        stalled = value <= previous * (1 + _TIGHT) and worst > slack / 2
        if (mu > 0).all() and (worst <= _TIGHT * root or stalled):
            return held, mu
        previous, slack = value, worst
        residual = (scaled - root) * (scaled + root) / heights**2
        _, r = np.linalg.qr((points[1:] - points[0]).T)
        half = np.linalg.solve(r.T, (residual[1:] - residual[0]) / 2)
        change = np.linalg.solve(r, half)
        before = len(held)
        held, mu = _step(held, mu, np.concatenate([[-change.sum()], change]), 1.0)
        if len(held) < before:
            slack = np.inf
