"""Every erratum shows a failure, counted against an independent recomputation."""

import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import pytest
import torch

from kvcat.theory.definitions import FunctionTable, parity, random_function
from kvcat.theory.errata import (
    doubled_blocks,
    errata,
    misplaced_counts,
    nearest_in_simplex,
    nilpotent_output,
    obvious_repair_error,
    printed_incompressible,
    unmoved_output,
    vacuous_budgets,
)
from kvcat.theory.histogram import histogram

TOKENS = torch.tensor([0, 0, 1, 2])


def test_each_erratum_shows_the_known_numbers():
    shown = {erratum.place: erratum.shown for erratum in errata()}
    assert len(shown) == 9
    numbers = {
        "Theorem, item 2": "0 of 6 budgets",
        "Note behind Proposition 1": "(0.0038 at N = 12), which looks at n = N - 1; compressibility asks for every n, "
        "and there the optimum is 0.1414 for all N, at n = 2",
        "Proposition 1, W_V = W_O": "(0, 0, 0)",
        "Proposition 1, the bound": "0.1250 at m = 2, n = 3, k = r = 1, where the optimum is 0.1768",
        "Proposition 2, W_V and W_O = I": "block 1 holds (0.5, 0.25, 1.25)",
        "Proposition 2, the policy": "(0, 0.25, 0.25) instead of (0.5, 0.25, 0.25)",
        "Lemma 2, rho-bar": "26 of 30 sequences are sent to u_0, 30 with te(b_i, i)",
        "Lemma 2, the obvious repair": "n = 2, k = 1, one slot of value 0: error 0",
        "Hull lemma": "0.1768 for e_1, e_2, e_3 and alpha = 1.25, where 0.2041 is attained",
    }
    for place, number in numbers.items():
        assert number in shown[place]


@pytest.mark.parametrize("transposed", [False, True])
def test_the_printed_first_construction_gives_nothing(transposed: bool) -> None:
    assert nilpotent_output(TOKENS, 3, transposed=transposed).tolist() == [0, 0, 0]


def test_the_printed_value_matrix_moves_nothing_and_transposed_it_counts_two_blocks_twice() -> None:
    assert unmoved_output(TOKENS, 3).tolist() == [0, 0, 0]
    assert doubled_blocks(TOKENS, 3).tolist() == [0.5, 0.25, 1.25, 6.5, 2, 0, 0.5, 0.25, 0.25, 0, 0, 0]


@pytest.mark.parametrize(("prefix", "suffix"), [([0, 0, 1], [2]), ([1], [1, 1, 0]), ([0, 1, 2, 0, 1], [0])])
def test_the_printed_slot_leaves_the_prefix_out_of_the_average(prefix: list[int], suffix: list[int]) -> None:
    computed = misplaced_counts(torch.tensor(prefix), torch.tensor(suffix), 3)
    expected = histogram(torch.tensor(suffix), 3) * len(suffix) / (len(prefix) + len(suffix))
    torch.testing.assert_close(computed, expected, rtol=0, atol=1e-12)


Split = tuple[tuple[int, ...], tuple[int, ...]]


def ambiguous_inputs(
    table: FunctionTable, positions: Sequence[Sequence[int]], code: Callable[[int, int], Sequence[int]]
) -> list[tuple[Split, ...]]:
    """Splits with one input to Lemma 1's last map that want different outputs, exhaustively and exactly.

    A whole sequence of j symbols has z = 0 and y = S/j, a split into n and k has z = p_n/(k + 1) and y = S/(k + 1).
    """
    wanted: dict[tuple[tuple[Fraction, ...], ...], dict[tuple[float, ...], Split]] = {}
    for j in range(1, table.longest + 1):
        for tokens in itertools.product(range(table.num_symbols), repeat=j):
            codes = [code(symbol, i) for i, symbol in enumerate(tokens, 1)]
            total = [sum(column) for column in zip(*codes, strict=True)]
            output = tuple(table(torch.tensor(tokens)).tolist())
            for n in range(j):
                slots = j - n + 1 if n else j
                length = positions[n - 1] if n else (0,) * len(positions[0])
                parts = ((codes[-1], 1), (positions[j - 1], 1), (total, slots), (length, slots))
                rows = tuple(tuple(Fraction(number, by) for number in numbers) for numbers, by in parts)
                wanted.setdefault(rows, {}).setdefault(output, (tokens[:n], tokens[n:]))
    return [tuple(outputs.values()) for outputs in wanted.values() if len(outputs) > 1]


def binary_code(symbol: int, position: int) -> tuple[int]:
    return (symbol * 2 ** (position - 1),)


def test_without_a_condition_on_positions_two_splits_give_lemma_1_one_input_and_want_two_outputs() -> None:
    conflicts = ambiguous_inputs(parity(2, 3), [(3,), (2,), (1,)], binary_code)
    assert len(conflicts) == 2
    assert conflicts[0] == (((0, 0), (1,)), ((0,), (1, 1)))


@pytest.mark.parametrize("positions", [[(1, 0, 0), (0, 1, 0), (0, 0, 1)], [(5, 0), (3, 4), (4, 3)]])
def test_equal_norms_of_the_positions_leave_no_input_ambiguous(positions: list[tuple[int, ...]]) -> None:
    assert ambiguous_inputs(random_function(2, 3), positions, binary_code) == []


@pytest.mark.parametrize(
    ("m", "N", "n", "k", "wrong", "total"), [(2, 4, 2, 2, 26, 30), (2, 5, 3, 2, 58, 62), (3, 4, 2, 2, 111, 120)]
)
def test_the_printed_rho_bar_is_wrong_on_almost_every_sequence_for_every_prefix(
    m: int, N: int, n: int, k: int, wrong: int, total: int
) -> None:
    for prefix in itertools.product(range(m), repeat=n):
        shifted = printed_incompressible(m, N, prefix, k)
        assert (shifted.num_wrong, len(shifted.distances)) == (wrong, total)
        beyond = shifted.distances >= shifted.delta
        assert float(shifted.distances[~beyond].max()) < shifted.delta / 2
        printed = printed_incompressible(m, N, prefix, k, shifted=False)
        assert printed.num_wrong == total


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
        printed_incompressible(2, 4, (0, 0), 3)
    with pytest.raises(ValueError, match="got n = 0, k = 1"):
        printed_incompressible(2, 4, (), 1)


@pytest.mark.parametrize("N", [2, 3, 5])
def test_with_a_slot_at_least_no_budget_is_below_n_everywhere(N: int) -> None:
    num_budgets, num_below, kept_error = vacuous_budgets(parity(2, N))
    assert (num_budgets, num_below) == (math.factorial(N - 1), 0)
    assert kept_error <= 1e-12
