"""Smallest enclosing balls: exact answers, SciPy, circumscribed balls of every subset, and the certificate."""

import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from kvcat.theory.enclosing import enclosing_ball


def cloud(seed: int, *, spread_of_weights: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Points in 1 to 6 dimensions and weights over this many decades."""
    draw = torch.Generator().manual_seed(seed)
    num_points = int(torch.randint(1, 12, (1,), generator=draw))
    dimension = int(torch.randint(1, 7, (1,), generator=draw))
    points = torch.randn(num_points, dimension, generator=draw, dtype=torch.float64)
    decades = torch.rand(num_points, generator=draw, dtype=torch.float64) - 0.5
    return points, 10 ** (spread_of_weights * decades)


@pytest.mark.parametrize("count", [1, 2, 3, 6, 20])
def test_the_ball_of_a_simplex_has_its_circumradius(count: int) -> None:
    ball = enclosing_ball(torch.eye(count, dtype=torch.float64))
    assert ball.radius == pytest.approx((1 - 1 / count) ** 0.5, rel=1e-14, abs=1e-15)
    torch.testing.assert_close(ball.center, torch.full((count,), 1 / count, dtype=torch.float64), rtol=1e-13, atol=0)


@pytest.mark.parametrize(("left", "right"), [(1.0, 1.0), (3.0, 1.0), (1e-6, 9e5), (2.0, 1e-9)])
def test_two_weighted_points_share_their_distance_in_inverse_proportion(left: float, right: float) -> None:
    points = torch.tensor([[0.0, 1.0], [4.0, 4.0]], dtype=torch.float64)
    ball = enclosing_ball(points, torch.tensor([left, right], dtype=torch.float64))
    assert ball.radius == pytest.approx(5 * left * right / (left + right), rel=1e-13)
    center = (left * points[0] + right * points[1]) / (left + right)
    torch.testing.assert_close(ball.center, center, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("decades", [0.0, 2.0, 12.0])
def test_the_multipliers_prove_every_ball_optimal(decades: float) -> None:
    for seed in range(60):
        points, weights = cloud(seed, spread_of_weights=decades)
        ball = enclosing_ball(points, weights)
        mu = ball.multipliers
        assert float(mu.min()) >= 0
        assert float(mu.sum()) == pytest.approx(1, abs=1e-14)
        distances = weights * (points - ball.center).norm(dim=1)
        rounding = 4e-16 * float(weights.max() * points.abs().max())  # of the centre, times the weight it meets
        assert ball.radius == pytest.approx(float(distances.max()), rel=1e-12, abs=rounding)
        squared = (mu * ((points - mu @ points) ** 2).sum(1)).sum() / (mu / weights**2).sum()
        assert ball.lower_bound == pytest.approx(float(squared) ** 0.5, rel=1e-5)
        assert abs(ball.gap) <= 1e-13
        active = mu > 0
        touching = distances.max().expand(int(active.sum()))
        torch.testing.assert_close(distances[active], touching, rtol=1e-12, atol=2 * rounding)


@pytest.mark.parametrize("seed", range(12))
def test_scipy_finds_no_smaller_ball_and_comes_as_close(seed: int) -> None:
    points, weights = cloud(100 + seed, spread_of_weights=1.0)
    ball = enclosing_ball(points, weights)
    x, w = points.numpy(), weights.numpy()

    def slack(z: np.ndarray) -> np.ndarray:
        return z[-1] - w**2 * ((z[:-1] - x) ** 2).sum(1)

    start = np.append(x.mean(0), (w**2 * ((x - x.mean(0)) ** 2).sum(1)).max())
    constraints = {"type": "ineq", "fun": slack}
    found = minimize(lambda z: z[-1], start, constraints=constraints, method="SLSQP", options={"ftol": 1e-15})
    reached = float((w * np.linalg.norm(found.x[:-1] - x, axis=1)).max())
    assert ball.radius <= reached * (1 + 1e-12)
    assert ball.radius == pytest.approx(reached, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_the_ball_is_the_least_of_the_circumscribed_balls_that_enclose_all(seed: int) -> None:
    points, _ = cloud(200 + seed)
    x = points.numpy()
    best = np.inf
    for size in range(1, min(len(x), x.shape[1] + 1) + 1):
        for subset in itertools.combinations(range(len(x)), size):
            edges = x[list(subset[1:])] - x[subset[0]]
            center = x[subset[0]] + np.linalg.lstsq(2 * edges, (edges**2).sum(1), rcond=None)[0]
            best = min(best, np.linalg.norm(x - center, axis=1).max())
    assert enclosing_ball(points).radius == pytest.approx(best, rel=1e-12, abs=1e-15)


def test_duplicates_and_dependent_points_change_nothing() -> None:
    points, weights = cloud(8, spread_of_weights=1.0)
    ball = enclosing_ball(points, weights)
    inside = 0.5 * (points[0] + points[1])
    more = torch.cat([points, points, inside[None]])
    lightest = torch.cat([weights, weights, torch.minimum(weights[0], weights[1])[None]])
    again = enclosing_ball(torch.nn.functional.pad(more, (0, 3)), lightest)
    assert again.radius == pytest.approx(ball.radius, rel=1e-13)
    assert again.gap <= 1e-12
    torch.testing.assert_close(again.center[: points.shape[1]], ball.center, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("seed", range(15))
def test_repeated_coordinates_and_weights_far_apart_keep_the_certificate(seed: int) -> None:
    points, weights = cloud(300 + seed, spread_of_weights=12.0)
    for x, w in ((points.round(), weights), (points.round(), None), (points[:, :1], weights)):
        assert abs(enclosing_ball(x, w).gap) <= 1e-13


def test_points_of_a_lattice_give_a_certified_ball() -> None:
    grid = torch.cartesian_prod(*[torch.arange(4, dtype=torch.float64)] * 3)
    ball = enclosing_ball(torch.cat([grid, grid]))
    assert ball.radius == pytest.approx(1.5 * 3**0.5, rel=1e-14)
    assert abs(ball.gap) <= 1e-14


def test_points_without_weight_are_ignored_and_one_point_is_its_own_ball() -> None:
    points = torch.tensor([[0.0], [2.0], [100.0]], dtype=torch.float64)
    ball = enclosing_ball(points, torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64))
    assert (ball.radius, ball.center.tolist(), ball.multipliers.tolist()) == (1.0, [1.0], [0.5, 0.5, 0.0])
    alone = enclosing_ball(points[2:])
    assert (alone.radius, alone.lower_bound, alone.gap, alone.center.tolist()) == (0.0, 0.0, 0.0, [100.0])


@pytest.mark.parametrize("scale", [1e-80, 1e80])
def test_the_radius_scales_with_points_and_weights(scale: float) -> None:
    points, weights = cloud(8, spread_of_weights=1.0)
    ball = enclosing_ball(points, weights)
    assert enclosing_ball(points * scale, weights).radius == pytest.approx(ball.radius * scale, rel=1e-12)
    assert enclosing_ball(points, weights * scale).radius == pytest.approx(ball.radius * scale, rel=1e-12)


@pytest.mark.parametrize(
    ("points", "weights", "message"),
    [
        ([], [], "at least one point"),
        ([[0.0], [1.0]], [0.0, 0.0], "one of them positive"),
        ([[0.0], [1.0]], [1.0, -1.0], "non-negative.*-1"),
        ([[0.0], [1.0]], [1.0, 1e-13], "factor of 1e12"),
        ([[0.0], [float("nan")]], [1.0, 1.0], "finite"),
    ],
)
def test_what_has_no_ball_is_refused(points: list[list[float]], weights: list[float], message: str) -> None:
    table = torch.tensor(points, dtype=torch.float64).reshape(len(points), 1)
    with pytest.raises(ValueError, match=message):
        enclosing_ball(table, torch.tensor(weights, dtype=torch.float64))
