"""The lemmas as printed: each failure found, and counted against an independent recomputation."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from kvcat.theory.functions import FunctionTable, mean, parity, random_function
from kvcat.theory.printed_lemmas import (
    ambiguous_inputs,
    binary_code,
    nearest_in_simplex,
    obvious_repair_error,
    printed_incompressible,
    vacuous_budgets,
)


def one_hot_code(symbol: int, position: int) -> tuple[int, ...]:
    return tuple(int((symbol, position) == (a, i)) for a in range(2) for i in range(1, 5))


def test_without_a_condition_on_positions_two_splits_give_one_input_and_want_two_outputs() -> None:
    table, positions = parity(2, 3), [(3,), (2,), (1,)]
    found = ambiguous_inputs(table, positions, binary_code)
    assert (found.num_inputs, found.num_ambiguous) == (31, 2)
    conflict = found.example
    assert conflict is not None
    rows, outputs = [], []
    for prefix, suffix in (conflict.first, conflict.second):
        tokens = prefix + suffix
        n, k = len(prefix), len(suffix)
        codes = [a * 2**i for i, a in enumerate(tokens)]
        rows.append((codes[-1], 3 - (len(tokens) - 1), sum(codes) / (k + 1), (4 - n) / (k + 1)))
        outputs.append(table(torch.tensor(tokens)).tolist())
    assert rows[0] == rows[1]
    assert outputs == [list(conflict.first_output), list(conflict.second_output)]
    assert outputs[0] != outputs[1]
    assert {(conflict.first, conflict.second)} == {(((0, 0), (1,)), ((0,), (1, 1)))}


@pytest.mark.parametrize("positions", [[(1, 0, 0), (0, 1, 0), (0, 0, 1)], [(5, 0), (3, 4), (4, 3)]])
def test_the_lemma_s_equal_norms_leave_no_input_ambiguous(positions: list[tuple[int, ...]]) -> None:
    assert ambiguous_inputs(random_function(2, 3), positions, binary_code).num_ambiguous == 0


def test_a_position_of_zero_makes_whole_sequences_and_splits_collide_but_not_at_the_first_token() -> None:
    # behind one token n + k and 1 + k averaged slots are equally many, so z = 0 misleads nobody
    assert ambiguous_inputs(random_function(2, 3), [(3,), (0,), (1,)], binary_code).num_ambiguous == 2
    assert ambiguous_inputs(random_function(2, 3), [(0,), (2,), (1,)], binary_code).num_ambiguous == 0


def test_a_code_that_tells_the_number_of_tokens_needs_no_condition() -> None:
    assert ambiguous_inputs(random_function(2, 3), [(3,), (2,), (1,)], one_hot_code).num_ambiguous == 0


def test_the_last_token_s_code_tells_apart_what_sums_alone_do_not() -> None:
    found = ambiguous_inputs(random_function(2, 2), [(1, 0), (0, 1)], lambda symbol, _: (symbol,))
    assert (found.num_inputs, found.num_ambiguous) == (10, 0)  # (0, 1) and (1, 0) differ in w


def test_a_function_that_wants_the_same_of_both_is_not_in_conflict() -> None:
    constant = FunctionTable(2, tuple(torch.ones(2**n, 1, dtype=torch.float64) for n in range(1, 4)))
    found = ambiguous_inputs(constant, [(3,), (2,), (1,)], binary_code)
    assert (found.num_ambiguous, found.example) == (0, None)
    with pytest.raises(ValueError, match="1 to 3 symbols need as many positions, got 2"):
        ambiguous_inputs(constant, [(3,), (2,)], binary_code)


@pytest.mark.parametrize(
    ("m", "N", "n", "k", "wrong", "total"), [(2, 4, 2, 2, 26, 30), (2, 5, 3, 2, 58, 62), (3, 4, 2, 2, 111, 120)]
)
def test_the_printed_rho_bar_is_wrong_on_almost_every_sequence_for_every_prefix(
    m: int, N: int, n: int, k: int, wrong: int, total: int
) -> None:
    table = random_function(m, N, seed=1)
    for prefix in itertools.product(range(m), repeat=n):
        shifted = printed_incompressible(table, prefix, k, constant=2.0)
        assert (shifted.num_wrong, shifted.num_sequences, shifted.num_open) == (wrong, total, 0)
        assert shifted.nearest > shifted.delta
        assert shifted.smallest_error >= 2.0 + 1
        printed = printed_incompressible(table, prefix, k, constant=2.0, shifted=False)
        assert (printed.num_wrong, printed.num_open) == (total, 0)


@pytest.mark.parametrize("shifted", [True, False])
def test_distances_from_the_printed_hull_are_those_of_a_quadratic_program(shifted: bool) -> None:
    m, N, prefix, k = 2, 4, (0, 1), 2
    n = len(prefix)

    def total(tokens: tuple[int, ...], start: int = 0) -> np.ndarray:
        codes = np.zeros((N, m))
        for i, a in enumerate(tokens):
            codes[start + i, a] += 1
        return codes.ravel()

    start = n if shifted else 0
    vertices = np.array([total(prefix) + total(b, start) for b in itertools.product(range(m), repeat=k)])
    diameter = max(np.linalg.norm(p - q) for p in vertices for q in vertices)
    distances = []
    for j in range(1, N + 1):
        for tokens in itertools.product(range(m), repeat=j):
            point = total(tokens)
            fit = minimize(
                lambda weights, point=point: float(((weights @ vertices - point) ** 2).sum()),
                np.full(len(vertices), 1 / len(vertices)),
                jac=lambda weights, point=point: 2 * vertices @ (weights @ vertices - point),
                method="SLSQP",
                bounds=[(0, 1)] * len(vertices),
                constraints={"type": "eq", "fun": lambda weights: weights.sum() - 1},
                options={"ftol": 1e-14},
            )
            distances.append(math.sqrt(max(fit.fun, 0.0)))
    found = printed_incompressible(parity(m, N), prefix, k, shifted=shifted)
    assert found.delta == pytest.approx(((n + k) / (n - 1 + k) - 1) * diameter / 2, rel=1e-12)
    beyond = [distance for distance in distances if distance >= found.delta]
    assert found.num_wrong == len(beyond) == (26 if shifted else 30)
    assert found.nearest == pytest.approx(min(beyond), abs=1e-6)


def test_the_value_given_to_wrong_sequences_is_farther_than_the_constant_from_all_that_is_wanted() -> None:
    table = mean(2, 4)
    for constant in (0.5, 40.0):
        found = printed_incompressible(table, (0, 0), 2, constant=constant)
        u_0, wanted = 1 + constant + 1, [float(v) for rows in table.values for v in rows]
        others = [u_0 - v for v in wanted[:-16] + wanted[-12:]]  # [0, 0, b] come first of length 4
        assert found.smallest_error == pytest.approx(min(others), rel=1e-14)


def test_points_of_a_simplex_are_their_own_nearest_and_others_project_to_its_face() -> None:
    draw = torch.Generator().manual_seed(0)
    inside = torch.softmax(torch.randn(5, 4, generator=draw, dtype=torch.float64), -1)
    torch.testing.assert_close(nearest_in_simplex(inside), inside)
    points = torch.tensor([[2.0, 0.0, 0.0], [1.0, 1.0, -5.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    expected = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [1 / 3, 1 / 3, 1 / 3]], dtype=torch.float64)
    torch.testing.assert_close(nearest_in_simplex(points), expected)


@pytest.mark.parametrize(("m", "n", "r"), [(2, 2, 1), (2, 3, 2), (3, 3, 2)])
def test_the_obvious_repair_has_a_policy_with_error_zero(m: int, n: int, r: int) -> None:
    assert obvious_repair_error(m, n, r) == 0


def test_where_a_slot_of_zero_does_not_fool_the_repair_its_error_says_so() -> None:
    # m = 2, n = 1, one token kept of one: 2/2 b m = b m, the right codes; without a slot 2 b m = 4 lies outside
    assert obvious_repair_error(2, 1, 1) == 0
    with pytest.raises(ValueError, match="outside the hull"):
        obvious_repair_error(2, 1, 0)


def test_lengths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="got n = 2, k = 3"):
        printed_incompressible(parity(2, 4), (0, 0), 3)
    with pytest.raises(ValueError, match="got n = 0, k = 1"):
        printed_incompressible(parity(2, 4), (), 1)


@pytest.mark.parametrize("N", [2, 3, 5])
def test_with_a_slot_at_least_no_budget_is_below_n_everywhere(N: int) -> None:
    found = vacuous_budgets(parity(2, N), constant=2.0)
    count = math.factorial(N - 1)
    assert (found.num_budgets, found.num_printed) == (count, 0)
    assert (found.num_somewhere, found.num_with_empty) == (count - 1, count)
    assert found.kept_error <= 1e-12
    assert found.empty_error > 2.0
