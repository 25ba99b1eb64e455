"""The curves of the optimum: above the bound at every budget, and with the exponents in N that are claimed."""

import itertools

import pytest
import torch

from kvcat.theory.histogram_curves import budget_curve, scaling_curve
from kvcat.theory.histogram_optimum import definition_optimum, fitted_exponent, joint_optimum, paper_bound


def test_the_curve_against_slots_lies_above_the_bound_and_falls_to_zero() -> None:
    rows = budget_curve(3, 10)
    assert [row.num_slots for row in rows] == list(range(1, 10))
    for row, after in itertools.pairwise(rows):
        assert row.optimum > after.optimum
        assert row.optimum >= row.single_length * (1 - 1e-12)
        assert row.single_length == pytest.approx(2 * (2 / 3) ** 0.5 * row.paper_bound, rel=1e-12)
        best = definition_optimum(3, 10, lambda n, r=row.num_slots: min(n, r))
        assert (row.optimum, row.optimum_prefix_len) == (best.error, best.prefix_len)
        pairs = [(n, k) for n in range(1, 10) for k in range(1, 11 - n)]
        bounds = {(n, k): paper_bound(n, k, min(n, row.num_slots)) for n, k in pairs}
        assert row.paper_bound == max(bounds.values()) == bounds[row.bound_prefix_len, row.bound_suffix_len]
    assert (rows[-1].optimum, rows[-1].paper_bound) == (0, 0)
    single = budget_curve(2, 8, prefix_len=4)
    assert [row.optimum for row in single] == [
        joint_optimum(torch.tensor([4, 0]), 4, r).error if r < 4 else 0 for r in range(1, 5)
    ]


def test_at_the_last_prefix_length_the_optimum_falls_as_the_square_of_n_but_not_over_all_lengths() -> None:
    lengths = [16, 32, 64]
    rows = scaling_curve(2, lengths, lambda n: n - 1)
    assert fitted_exponent(lengths, [row.last_optimum for row in rows]) == pytest.approx(-2, abs=0.04)
    assert fitted_exponent(lengths, [row.last_bound for row in rows]) == pytest.approx(-2, abs=0.04)
    for row in rows:
        assert row.last_bound == pytest.approx(1 / (2 * row.longest * (row.longest - 1)), rel=1e-13)
        assert (row.definition_optimum, row.definition_prefix_len) == (pytest.approx(0.5**0.5, rel=1e-13), 1)
    slotted = scaling_curve(2, lengths[:2], lambda n: max(1, n - 1))
    assert [row.definition_prefix_len for row in slotted] == [2, 2]
    assert slotted[0].definition_optimum == pytest.approx(slotted[1].definition_optimum, rel=1e-12)


def test_with_a_constant_number_of_slots_nothing_falls() -> None:
    rows = scaling_curve(2, [16, 32, 64], lambda n: min(n, 2))
    assert all(row.last_optimum < after.last_optimum for row, after in itertools.pairwise(rows))
    assert rows[-1].last_optimum == pytest.approx(61 / 64 / 3 / 2**0.5, rel=1e-12)
    assert all(row.definition_optimum > 1.5 * row.last_optimum for row in rows)


def test_an_exponent_is_the_slope_in_the_logarithms() -> None:
    assert fitted_exponent([2, 4, 8], [12.0, 3.0, 0.75]) == pytest.approx(-2, rel=1e-13)
    with pytest.raises(ValueError, match="2 lengths at least"):
        fitted_exponent([4], [1.0])
    with pytest.raises(ValueError, match="positive values"):
        fitted_exponent([4, 5], [1.0, 0.0])


def test_a_prefix_longer_than_the_sequences_allow_is_refused() -> None:
    with pytest.raises(ValueError, match="1 to 5 symbols, got 6"):
        budget_curve(2, 6, prefix_len=6)
    with pytest.raises(ValueError, match="N >= 2, got 1"):
        budget_curve(2, 1)
