"""Smallest enclosing balls, distances to a hull, and the hull lemma: exact answers, brute force,
the sharp constant."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from kvcat.theory.optimum import enclosing_ball, hull_lemma_bound, sharp_constant

# A ball is found to 1e-8 of its radius or rejected; SLSQP converges quadratically, to far less.
CONVERGED = 1e-9
KINDS = ("general", "duplicates", "collinear", "grid")


def cloud(seed, kind="general"):
    draw = torch.Generator().manual_seed(seed)
    count, width = (int(torch.randint(1, 8, (), generator=draw)) for _ in range(2))
    width = min(width, 4)
    points = torch.randn(count, width, generator=draw, dtype=torch.float64)
    if kind == "duplicates":
        points = points[torch.randint(0, count, (2 * count,), generator=draw)]
    if kind == "collinear":
        points = (
            points[:1] + torch.randn(count, 1, generator=draw, dtype=torch.float64) * points[-1:]
        )
    return points.round() if kind == "grid" else points


def distance_to_hull(x, points):
    """min ||sum_i w_i (x_i - x)|| over the simplex: u >= 0 minimises its square + (sum u - 1)^2, w
    = u / sum u."""
    shifted = (points - x).numpy()
    unit = float(np.abs(shifted).max()) or 1.0
    weights, _ = nnls(
        np.vstack([shifted.T / unit, np.ones(len(shifted))]), np.append(np.zeros(len(x)), 1.0)
    )
    return unit * float(np.linalg.norm(weights / weights.sum() @ (shifted / unit)))


def largest_distance(points, alpha, shift):
    return max(distance_to_hull(alpha * point + shift, points) for point in points)


def test_the_ball_of_a_simplex_has_its_circumradius():
    for count in (1, 2, 3, 20):
        ball = enclosing_ball(torch.eye(count, dtype=torch.float64))
        assert ball.radius == pytest.approx((1 - 1 / count) ** 0.5, rel=CONVERGED)
        torch.testing.assert_close(
            ball.center, torch.full((count,), 1 / count, dtype=torch.float64), rtol=0, atol=1e-6
        )


@pytest.mark.parametrize("kind", KINDS)
def test_the_ball_encloses_all_and_is_found_to_be_the_smallest(kind):
    for seed in range(12):
        points = cloud(seed, kind)
        draw = torch.Generator().manual_seed(seed)
        for weights in (None, 10 ** torch.rand(len(points), generator=draw, dtype=torch.float64)):
            ball = enclosing_ball(points, weights)
            distances = (points - ball.center).norm(dim=1) * (1.0 if weights is None else weights)
            assert ball.radius == pytest.approx(float(distances.max()), rel=1e-10, abs=1e-13)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    kind=st.sampled_from(KINDS),
    alpha=st.floats(1.001, 10),
    near=st.sampled_from([0.0, 1e-3, 0.1, 1.0]),
)
def test_no_shift_escapes_the_sharp_constant_nor_the_lemma_below_it(seed, kind, alpha, near):
    points = cloud(seed, kind)
    shift = torch.randn(
        points.shape[1], generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64
    )
    best = -(alpha - 1) * enclosing_ball(points).center
    attained = largest_distance(points, alpha, best + near * shift)
    sharp = sharp_constant(points, alpha)
    lemma = hull_lemma_bound(points, alpha)
    rounding = CONVERGED * alpha * float(points.abs().max() + 1)
    assert attained >= sharp - rounding
    assert near or attained <= sharp + rounding
    assert sharp >= lemma - rounding
    dimension = min(points.shape[1], points.shape[0] - 1)
    assert sharp <= lemma * (2 * dimension / (dimension + 1)) ** 0.5 + rounding  # Jung
