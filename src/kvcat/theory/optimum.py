"""The exact optimum over every policy for the incompressible histogram, and the hull lemma.

After r slots whose values have the sum s, a suffix b of k symbols gives an error of

    || s - (r + k) / (n + k) S_a + (n - r) / (n + k) S_b || / (r + k),

where S_a and S_b are the counts of prefix and suffix. It is convex in S_b, so suffixes of one
repeated symbol are the worst of their length, and the best s is the centre of an enclosing ball of
m points for every k, with weight 1 / (r + k). It is convex in (s, S_a) together, so its minimum
over s is convex in S_a: prefixes of one repeated symbol are the worst of their length.

Arguments throughout: ``num_symbols`` m >= 2, ``longest`` N >= 2, ``prefix_len`` n >= 1,
``suffix_len`` k >= 1, ``num_slots`` r and ``budget`` r(n), 0 to n. Others raise ValueError.

The hull lemma, with H = conv{x_1, ..., x_k}, alpha > 1. The lemma: for every v some i has
dist(alpha x_i + v, H) >= (alpha - 1) diam(H) / 2. The sharp constant is (alpha - 1) R, with R the
radius of the smallest ball around the points and c its centre. Proof: v = -(alpha - 1) c attains
it, since alpha x_i + v lies (alpha - 1)(x_i - c) from x_i in H. Conversely c = sum_i mu_i x_i with
mu in the simplex and mu_i > 0 only where |x_i - c| = R. Project onto the unit vector along x_i - c:
the distance of alpha x_i + v is at least (alpha - 1) R + <v + (alpha - 1) c, x_i - c> / R, since
<x - c, x_i - c> <= R^2 on H. The mu-mean of the last term is 0, so for some i it is not negative.
By Jung's theorem R <= diam sqrt(d / (2 (d + 1))): the lemma is loose by less than sqrt 2.

References: KV-CAT, Proposition "hist_non_compressible", its proof in appendix "Motivating example";
appendix "Compressible Transformers for General Functions", lemma on convex hulls; Jung 1901.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from scipy.optimize import minimize, nnls

from kvcat.errors import whole
from kvcat.theory.definitions import Budget, KeysValues, Policy
from kvcat.types import Float, Int, Tensor


@dataclass(frozen=True, eq=False)
class Ball:
    """A centre c and the radius max_i w_i ||c - x_i||."""

    center: Float[Tensor, " d"]
    radius: float


def enclosing_ball(
    points: Float[Tensor, "points d"], weights: Float[Tensor, " points"] | None = None
) -> Ball:
    """The ball of least radius max_i w_i ||c - x_i|| over centres c.

    Computed by SciPy's SLSQP on a subset of the points: the farthest point is added until none is
    outside. A lower bound on every ball's radius proves it: for mu in the simplex and every centre
    the largest w_i^2 ||c - x_i||^2 is at least sum_i mu_i ||c - x_i||^2 / sum_i mu_i w_i^-2, which
    is least at c = sum_i mu_i x_i.

    ``points`` x_i, one at least, may be duplicates or affinely dependent; ``weights`` w_i > 0,
    default 1.
    ArithmeticError where the radius exceeds its lower bound by more than 1e-6 of itself.
    """
    _check_points(points)
    if weights is not None and not (weights.isfinite().all() and (weights > 0).all()):
        raise ValueError(
            f"weights must be positive and finite, got {weights.min()} to {weights.max()}"
        )
    origin = points.mean(0)
    w = np.ones(len(points)) if weights is None else weights.numpy()
    spread = float((points - origin).abs().max()) or 1.0
    heaviest = float(w.max())
    x = ((points - origin) / spread).numpy()
    w = w / heaviest
    center = x[w.argmax()]
    held = [int(w.argmax())]
    while True:
        distances = w * np.linalg.norm(x - center, axis=1)
        farthest = int(distances.argmax())
        inside = distances[held].max()
        # the ball of a subset is no larger than that of all points, so without a point outside it
        # is theirs
        if farthest in held or distances[farthest] <= inside * (1 + 1e-13):
            break
        held.append(farthest)
        center = _center(x[held], w[held], center)
    radius = float(distances.max())
    # mu of the lower bound: the centre of the least ball is a mean of the points that it touches
    touching = np.flatnonzero(distances >= radius * (1 - 1e-6))
    offsets = (x[touching] - center).T / (radius or 1.0)
    mu = np.zeros(len(x))
    mu[touching], _ = nnls(
        np.vstack([offsets, np.ones(len(touching))]), np.append(np.zeros(len(center)), 1.0)
    )
    mu /= mu.sum()
    bound = float(mu @ ((x - mu @ x) ** 2).sum(1) / (mu @ w**-2)) ** 0.5
    if not radius - bound <= 1e-6 * radius:
        raise ArithmeticError(
            f"the ball of {len(x)} points was found only to {radius - bound:.0e} of {radius:.0e}"
        )
    scale = spread * heaviest
    return Ball(spread * torch.from_numpy(center) + origin, radius * scale)


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
    solution = minimize(
        lambda z: z[-1],
        first,
        jac=lambda _: slope,
        constraints=inside,
        method="SLSQP",
        options=options,
    )
    return solution.x[:-1]


def hull_lemma_bound(points: Float[Tensor, "points d"], alpha: float) -> float:
    """(alpha - 1) / 2 diam(H): for every v some alpha x_i + v is at least this far from H.

    ``points`` x_i, one at least; ``alpha`` > 1 is the stretch, (n + k) / (r + k) in Lemma 2.
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


def paper_bound(prefix_len: int, suffix_len: int, num_slots: int) -> float:
    """The paper's lower bound k (n - r) / (2 (n + k)(r + k)), for every number of symbols."""
    n = whole("prefix_len", prefix_len)
    k = whole("suffix_len", suffix_len)
    r = whole("num_slots", num_slots)
    if n < 1 or k < 1:
        raise ValueError(f"prefix and suffix need at least one symbol, got lengths {n} and {k}")
    if not 0 <= r <= n:
        raise ValueError(f"the number of slots must lie in 0 to {n}, got {r}")
    return k * (n - r) / (2 * (n + k) * (r + k))


def optimal_error(num_symbols: int, prefix_len: int, suffix_len: int, num_slots: int) -> float:
    """The least worst-case error at one suffix length, the same for every prefix of n symbols.

    k (n - r) / ((n + k)(r + k)) sqrt(1 - 1/m), r >= 1 (for r = 0 there is no sum to choose).
    """
    if whole("num_symbols", num_symbols) < 2 or whole("num_slots", num_slots) < 1:
        raise ValueError(
            f"the optimum needs 2 symbols and 1 slot at least, got {num_symbols} and {num_slots}"
        )
    return 2 * paper_bound(prefix_len, suffix_len, num_slots) * (1 - 1 / num_symbols) ** 0.5


@dataclass(frozen=True, eq=False)
class JointOptimum:
    """The least worst-case error of a prefix over suffixes of 1 to K symbols.

    Args:
        prefix_len: length of the prefix.
        error: the least worst-case error.
        sum: the s that attains it; 0 without slots.
    """

    prefix_len: int
    error: float
    sum: Float[Tensor, " m"]


def joint_optimum(counts: Int[Tensor, " m"], longest_suffix: int, num_slots: int) -> JointOptimum:
    """The optimum of the definition for one prefix: one cache, every suffix of 1 to K symbols.

    ``counts`` is S_a, ``longest_suffix`` K >= 1, N - n in the definition.
    """
    n = int(counts.sum())
    m = counts.shape[0]
    paper_bound(n, longest_suffix, num_slots)  # checks its arguments
    if num_slots == 0:  # n / (n + k) max_i || e_i - S_a / n ||, largest at k = 1
        distances = (torch.eye(m, dtype=torch.float64) - counts.double() / n).norm(dim=1)
        return JointOptimum(
            n, float(distances.max()) * n / (n + 1), torch.zeros(m, dtype=torch.float64)
        )
    k = torch.arange(1, longest_suffix + 1, dtype=torch.float64)[:, None, None]
    repeated = k * torch.eye(m, dtype=torch.float64)
    points = ((num_slots + k) * counts.double() - (n - num_slots) * repeated) / (n + k)
    weights = (1 / (num_slots + k)).expand(-1, m, 1)
    ball = enclosing_ball(points.reshape(-1, m), weights.reshape(-1))
    return JointOptimum(n, ball.radius, ball.center)


def definition_optimum(num_symbols: int, longest: int, budget: Budget) -> JointOptimum:
    """The least epsilon for which any policy of this budget shows (N, epsilon, r)-compressibility.

    The largest ``joint_optimum`` over n = 1, ..., N - 1 at prefixes of one repeated symbol.
    """
    counts = {n: torch.tensor([n] + [0] * (num_symbols - 1)) for n in range(1, longest)}
    optima = (joint_optimum(row, longest - n, budget(n)) for n, row in counts.items())
    return max(optima, key=lambda optimum: optimum.error)


def optimal_policy(num_symbols: int, longest: int, budget: Budget) -> Policy:
    """The policy that attains ``joint_optimum``: s in one slot, r(n) - 1 slots of value 0, keys 0.

    (One slot with value s would not be enough: all r slots count in the softmax. Any split of s
    is.)
    """
    m = num_symbols

    def nothing(keys: Tensor, values: Tensor) -> KeysValues:
        num_slots = budget(keys.shape[0])
        return 0 * keys[:num_slots], 0 * values[:num_slots]

    def best_sum(keys: Tensor, values: Tensor) -> KeysValues:
        keys, slots = nothing(keys, values)
        first = values.shape[1] // m // 2 * m  # y is the second of two blocks, the third of four
        counts = values[:, first : first + m].sum(0).round().to(torch.int64)
        if slots.shape[0]:
            slots[0, first : first + m] = joint_optimum(
                counts, longest - len(values), slots.shape[0]
            ).sum
        return keys, slots

    return nothing, best_sum


def budget_curve(num_symbols: int, longest: int) -> pd.DataFrame:
    """Optimum and bound for r = 1, ..., N - 1 slots, r(n) = min(r, n).

    ``optimum`` is the definition's, over suffixes of all lengths; ``paper_bound`` the paper's at
    the n and k where it is largest; ``single_length`` the exact optimum at these n and k.
    """
    rows = []
    for r in range(1, longest):
        best = definition_optimum(num_symbols, longest, lambda n, r=r: min(n, r))
        pairs = [(n, k) for n in range(1, longest) for k in range(1, longest - n + 1)]
        n, k = max(pairs, key=lambda pair: paper_bound(*pair, min(r, pair[0])))
        single = optimal_error(num_symbols, n, k, min(r, n))
        rows.append((r, best.error, single, paper_bound(n, k, min(r, n)), best.prefix_len, n, k))
    names = [
        "num_slots",
        "optimum",
        "single_length",
        "paper_bound",
        "optimum_prefix_len",
        "bound_prefix_len",
        "bound_suffix_len",
    ]
    return pd.DataFrame(rows, columns=names)


def scaling_curve(num_symbols: int, lengths: Sequence[int], budget: Budget) -> pd.DataFrame:
    """Optimum and bound against N, ``last`` at the paper's choice n = N - 1, k = 1."""
    rows = []
    for longest in lengths:
        best = definition_optimum(num_symbols, longest, budget)
        n = longest - 1
        last = optimal_error(num_symbols, n, 1, budget(n)), paper_bound(n, 1, budget(n))
        rows.append((longest, best.error, best.prefix_len, *last))
    names = "longest definition_optimum definition_prefix_len last_optimum last_bound"
    return pd.DataFrame(rows, columns=names.split())
