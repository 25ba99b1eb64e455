"""The hull lemma and its sharp constant, against faces one by one and against shifts of every kind."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcat.theory.hull import best_shift, distance_to_hull, hull_lemma_bound, largest_distance, sharp_constant


def distance_by_faces(x: Tensor, points: Tensor) -> float:
    """The least distance over every affinely independent subset whose nearest point has no negative weight."""
    shifted, found = (points.unique(dim=0) - x).numpy(), []
    for size in range(1, min(points.shape[0], points.shape[1] + 1) + 1):
        for rows in itertools.combinations(range(len(shifted)), size):
            face = shifted[list(rows)]
            others = np.linalg.lstsq((face[1:] - face[0]).T, -face[0], rcond=None)[0]
            weights = np.concatenate([[1 - others.sum()], others])
            if (weights >= -1e-12).all():
                found.append(float(np.linalg.norm(weights @ face)))
    return min(found)


def cloud(seed: int, kind: str) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    count, width = (int(torch.randint(1, 8, (), generator=draw)) for _ in range(2))
    width = min(width, 4)
    points = torch.randn(count, width, generator=draw, dtype=torch.float64)
    if kind == "duplicates":
        points = points[torch.randint(0, count, (2 * count,), generator=draw)]
    if kind == "collinear":
        points = points[:1] + torch.randn(count, 1, generator=draw, dtype=torch.float64) * points[-1:]
    if kind == "grid":
        points = points.round()
    return points


KINDS = ("general", "duplicates", "collinear", "grid")


@pytest.mark.parametrize("kind", KINDS)
def test_the_distance_is_the_least_over_all_faces_and_its_bound_proves_it(kind: str) -> None:
    for seed in range(40):
        points = cloud(seed, kind)
        draw = torch.Generator().manual_seed(1000 + seed)
        x = 2 * torch.randn(points.shape[1], generator=draw, dtype=torch.float64)
        found = distance_to_hull(x, points)
        assert found.distance == pytest.approx(distance_by_faces(x, points), abs=1e-11)
        assert found.distance - found.lower_bound == pytest.approx(0, abs=1e-10)
        assert float((found.nearest - x).norm()) == pytest.approx(found.distance, abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mean_of_the_points_has_distance_zero(kind: str) -> None:
    for seed in range(30):
        points = cloud(seed, kind)
        weights = torch.rand(points.shape[0], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        assert distance_to_hull(weights / weights.sum() @ points, points).distance <= 1e-12


def test_distances_that_are_known() -> None:
    square = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    for x, distance in [
        ((2.0, 0.5), 1.0),
        ((4.0, 5.0), 5.0),
        ((0.25, 0.75), 0.0),
        ((1.0, 1.0), 0.0),
        ((-3.0, 0.0), 3.0),
    ]:
        assert distance_to_hull(torch.tensor(x, dtype=torch.float64), square).distance == pytest.approx(
            distance, abs=1e-14
        )


def test_the_simplex_of_three_has_the_known_constants() -> None:
    simplex = torch.eye(3, dtype=torch.float64)
    assert sharp_constant(simplex, 1.25) == pytest.approx(0.2041241452, abs=1e-10)
    assert hull_lemma_bound(simplex, 1.25) == pytest.approx(0.1767766953, abs=1e-10)
    assert largest_distance(simplex, 1.25, best_shift(simplex, 1.25)) == pytest.approx(0.2041241452, abs=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_shift_attains_the_sharp_constant(kind: str) -> None:
    for seed in range(20):
        points, alpha = cloud(seed, kind), 1 + 0.25 * (seed % 7 + 1)
        attained = largest_distance(points, alpha, best_shift(points, alpha))
        assert attained == pytest.approx(sharp_constant(points, alpha), abs=1e-11)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    kind=st.sampled_from(KINDS),
    alpha=st.floats(1.001, 10),
    near=st.sampled_from([0.0, 1e-3, 0.1, 1.0]),
)
def test_no_shift_escapes_the_sharp_constant_nor_the_lemma_below_it(
    seed: int, kind: str, alpha: float, near: float
) -> None:
    points = cloud(seed, kind)
    shift = torch.randn(points.shape[1], generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    attained = largest_distance(points, alpha, best_shift(points, alpha) + near * shift)
    sharp, lemma = sharp_constant(points, alpha), hull_lemma_bound(points, alpha)
    rounding = 1e-11 * alpha * float(points.abs().max() + 1)
    assert attained >= sharp - rounding
    assert sharp >= lemma - rounding
    dimension = min(points.shape[1], points.shape[0] - 1)
    assert sharp <= lemma * (2 * dimension / (dimension + 1)) ** 0.5 + rounding  # Jung


def test_a_search_over_shifts_does_not_beat_the_sharp_constant() -> None:
    points, alpha = torch.tensor([[0.0, 0.0], [4.0, 0.0], [1.0, 3.0]], dtype=torch.float64), 1.5
    best = best_shift(points, alpha)
    found = min(
        largest_distance(points, alpha, best + torch.tensor([u, v], dtype=torch.float64))
        for u in np.linspace(-0.5, 0.5, 21)
        for v in np.linspace(-0.5, 0.5, 21)
    )
    assert found == pytest.approx(sharp_constant(points, alpha), abs=1e-12)
    assert largest_distance(points, alpha, best + 0.05) > found + 0.01


def test_for_two_points_and_on_a_line_the_lemma_is_sharp() -> None:
    for points in ([[0.0, 1.0], [3.0, 5.0]], [[0.0, 0.0], [1.0, 1.0], [4.0, 4.0], [4.0, 4.0]]):
        x = torch.tensor(points, dtype=torch.float64)
        assert sharp_constant(x, 2.0) == pytest.approx(hull_lemma_bound(x, 2.0), rel=1e-12)
        assert largest_distance(x, 2.0, best_shift(x, 2.0)) == pytest.approx(hull_lemma_bound(x, 2.0), rel=1e-12)


def test_a_regular_simplex_has_the_largest_ratio_that_jung_allows() -> None:
    for width in (2, 3, 6):
        simplex = torch.eye(width + 1, dtype=torch.float64)
        ratio = sharp_constant(simplex, 3.0) / hull_lemma_bound(simplex, 3.0)
        assert ratio == pytest.approx((2 * width / (width + 1)) ** 0.5, rel=1e-12)


def test_of_equal_points_both_constants_are_zero() -> None:
    same = torch.ones(3, 2, dtype=torch.float64)
    assert hull_lemma_bound(same, 2.0) == sharp_constant(same, 2.0) == 0
    assert largest_distance(same, 2.0, best_shift(same, 2.0)) == 0


def test_mistakes_are_refused_with_the_offending_value() -> None:
    points = torch.eye(2, dtype=torch.float64)
    for function in (hull_lemma_bound, sharp_constant, best_shift):
        with pytest.raises(ValueError, match=r"above 1, got 1\.0"):
            function(points, 1.0)
        with pytest.raises(ValueError, match="one at least, got 0"):
            function(points[:0], 2.0)
    with pytest.raises(ValueError, match="the point must be finite"):
        distance_to_hull(torch.tensor([0.0, torch.nan], dtype=torch.float64), points)


@pytest.mark.parametrize("unit", [1e-200, 1e-3, 1e200])
def test_distances_scale_with_the_unit_however_large_or_small(unit: float) -> None:
    points = unit * torch.eye(3, dtype=torch.float64)
    found = distance_to_hull(torch.zeros(3, dtype=torch.float64), points)
    assert found.distance == pytest.approx(unit / 3**0.5, rel=1e-12)
    assert found.lower_bound == pytest.approx(unit / 3**0.5, rel=1e-12)
