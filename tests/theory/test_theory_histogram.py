"""Propositions 1 and 2: both networks are the histogram, and the second needs one slot, for every
prefix and suffix."""

from dataclasses import replace

import pytest
import torch

from kvcat.theory import histogram as h
from kvcat.theory.definitions import compressibility, sequences
from kvcat.theory.optimum import definition_optimum, optimal_policy
from kvcat.theory.theorem import differing_rows

SIZES = [(2, 2), (3, 5), (4, 4)]


def rounding(longest):
    """Bound on the error of rho_2: it adds values of up to Lambda N <= N^3 with slopes of up to 1,
    2 for each mass."""
    return 4 * len(h.mass_ratios(longest)) * longest**3 * 2**-52


def constructions(num_symbols, longest):
    return [
        h.incompressible_histogram(num_symbols, longest),
        h.incompressible_histogram(num_symbols, longest, num_blocks=4),
        h.compressible_histogram(num_symbols, longest),
    ]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("num_symbols", "longest"), SIZES)
def test_every_network_returns_the_histogram_of_every_sequence(num_symbols, longest, causal):
    for model in constructions(num_symbols, longest):
        for n in range(1, longest + 1):
            tokens = sequences(num_symbols, n)
            counts = torch.stack([(tokens == a).sum(1) for a in range(num_symbols)], 1).double()
            torch.testing.assert_close(
                replace(model, causal=causal)(tokens), counts / n, rtol=0, atol=1e-15
            )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("num_symbols", "longest"), SIZES)
def test_one_slot_is_enough_for_every_prefix_and_every_suffix(num_symbols, longest, causal):
    model = replace(h.compressible_histogram(num_symbols, longest), causal=causal)
    assert compressibility(model, h.histogram_policy(num_symbols), lambda n: 1).error <= rounding(
        longest
    )


@pytest.mark.parametrize(("num_symbols", "longest"), [(2, 5), (3, 4)])
def test_pairs_of_count_vectors_are_all_that_matters(num_symbols, longest):
    _, hard, easy = constructions(num_symbols, longest)
    best = optimal_policy(num_symbols, longest, lambda _: 1)
    for model, policy in ((hard, best), (easy, h.histogram_policy(num_symbols))):
        check = h.check_histogram(model, policy)
        whole = compressibility(model, policy, lambda _: 1).error
        assert check["worst_error"] == pytest.approx(whole, abs=rounding(longest))
        assert check["task_error"] <= rounding(longest)
    optimum = definition_optimum(num_symbols, longest, lambda _: 1).error
    assert h.check_histogram(hard, best)["worst_error"] == pytest.approx(optimum, rel=1e-9)


@pytest.mark.parametrize(("num_symbols", "longest"), SIZES)
def test_both_constructions_have_one_architecture_and_differ_in_the_last_map_and_m_rows_of_w_o(
    num_symbols, longest
):
    _, first, second = constructions(num_symbols, longest)
    rows = differing_rows(first, second)
    assert set(rows) <= {"block 2 W_O", "block 2 W_1", "block 2 b_1", "block 2 W_2"}
    assert rows["block 2 W_O"] == tuple(range(3 * num_symbols, 4 * num_symbols))
