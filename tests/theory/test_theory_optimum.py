"""The optimum over all policies: known answers, brute force over suffixes, SciPy, random policies,
the network."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from kvcat.theory.definitions import compressibility
from kvcat.theory.histogram import incompressible_histogram, multisets
from kvcat.theory.optimum import (
    definition_optimum,
    joint_optimum,
    optimal_error,
    optimal_policy,
    paper_bound,
    scaling_curve,
)

ROOT = 2**0.5
# A ball is found to 1e-8 of its radius or rejected; SLSQP converges quadratically, to far less.
CONVERGED = 1e-9


def errors_of(s, counts, longest_suffix, num_slots):
    """The error behind slots of sum s for every multiset of suffix symbols, from the two averages
    themselves."""
    errors = []
    for k in range(1, longest_suffix + 1):
        for suffix in multisets(len(counts), k):
            added = np.bincount(suffix, minlength=len(counts))
            errors.append(
                np.linalg.norm(
                    (s + added) / (num_slots + k) - (counts + added) / (counts.sum() + k)
                )
            )
    return np.array(errors)


def test_the_optimum_and_the_papers_bound_have_their_known_values():
    for m, n, k, r, optimum, bound in (
        (2, 3, 1, 1, 0.1767766953, 0.125),
        (4, 7, 3, 3, 0.1732050808, 0.1),
    ):
        assert optimal_error(m, n, k, r) == pytest.approx(optimum, abs=5e-11)
        assert paper_bound(n, k, r) == pytest.approx(bound, rel=1e-14)
    for counts, longest_suffix, num_slots, error in (
        ((2, 2), 4, 1, 1 / 3 / ROOT),
        ((3, 1), 4, 1, 13 / 35 / ROOT),
        ((4, 2), 6, 3, 5 / 28 / ROOT),
        ((4, 0, 0), 2, 1, 0.31010205144336),
        ((1, 0), 1, 0, 0.5**0.5),
    ):
        optimum = joint_optimum(torch.tensor(counts), longest_suffix, num_slots).error
        assert optimum == pytest.approx(error, rel=CONVERGED)
    known = [1 / 6, 1 / 4, 8 / 25, 2 / 5, 16 / 35, 1 / 2, 5 / 9, 3 / 5]
    errors = [definition_optimum(2, longest, lambda n: 1).error for longest in range(3, 11)]
    assert errors == pytest.approx([value / ROOT for value in known], rel=CONVERGED)
    assert (
        definition_optimum(3, 128, lambda n: max(1, n - 1)).error > 0
    )  # SciPy's solver stops a little early here


@pytest.mark.parametrize(
    ("counts", "longest_suffix", "num_slots"),
    [((4, 0), 4, 1), ((3, 1, 0), 4, 2), ((2, 2, 1, 1), 3, 3), ((2, 1, 0), 3, 0)],
)
def test_no_suffix_at_all_is_worse_than_those_of_one_symbol_and_scipy_finds_no_better(
    counts, longest_suffix, num_slots
):
    best = joint_optimum(torch.tensor(counts), longest_suffix, num_slots)
    arguments = (np.array(counts), longest_suffix, num_slots)
    assert errors_of(best.sum.numpy(), *arguments).max() == pytest.approx(best.error, rel=CONVERGED)
    if num_slots:
        constraint = {"type": "ineq", "fun": lambda z: z[-1] - errors_of(z[:-1], *arguments) ** 2}
        start = np.append(np.array(counts) / 2, 10.0)
        solution = minimize(
            lambda z: z[-1], start, constraints=constraint, method="SLSQP", options={"ftol": 1e-14}
        )
        assert errors_of(solution.x[:-1], *arguments).max() >= best.error * (1 - CONVERGED)


def test_prefixes_of_one_symbol_are_the_worst_of_their_length():
    for m, n, longest_suffix, r in [(2, 5, 3, 2), (3, 4, 3, 1), (3, 4, 2, 0)]:
        errors = [
            joint_optimum(torch.bincount(row, minlength=m), longest_suffix, r).error
            for row in multisets(m, n)
        ]
        assert max(errors) == pytest.approx(errors[0], rel=CONVERGED)


@pytest.mark.parametrize(
    ("m", "longest", "blocks", "budget"),
    [(3, 4, 4, lambda _: 1), (3, 4, 2, lambda n: max(1, n - 1)), (2, 5, 2, lambda _: 0)],
)
def test_the_optimal_policy_run_through_the_network_has_the_optimal_error(
    m, longest, blocks, budget
):
    model = incompressible_histogram(m, longest, num_blocks=blocks)
    policy = optimal_policy(m, longest, budget)
    best = definition_optimum(m, longest, budget)
    for mapping in (model, replace(model, causal=True)):
        assert compressibility(mapping, policy, budget).error == pytest.approx(
            best.error, rel=CONVERGED
        )


def test_at_the_last_prefix_length_the_bound_falls_as_the_square_of_n_but_the_optimum_not_at_all():
    lengths = [8, 16]
    rows = scaling_curve(2, lengths, lambda n: n - 1)
    assert rows.last_bound.tolist() == pytest.approx(
        [1 / (2 * n * (n - 1)) for n in lengths], rel=1e-13
    )
    assert rows.definition_optimum.tolist() == pytest.approx([0.5**0.5] * 2, rel=1e-13)
    assert rows.definition_prefix_len.tolist() == [1, 1]
    slotted = scaling_curve(2, lengths, lambda n: max(1, n - 1))
    assert slotted.definition_prefix_len.tolist() == [2, 2]
    assert slotted.definition_optimum[0] == pytest.approx(
        slotted.definition_optimum[1], rel=CONVERGED
    )
