"""Policies sought against the incompressible network, and the theorem's report."""

import pytest
import torch

from kvcat.theory.detectors import (
    compressible_network,
    incompressible_network,
)
from kvcat.theory.detectors_bound import (
    certified_bound,
    verify_incompressible,
)
from kvcat.theory.detectors_checks import (
    widths,
)
from kvcat.theory.detectors_report import theorem_report
from kvcat.theory.detectors_search import search_policies, smallest_error
from kvcat.theory.functions import FUNCTIONS, majority, parity, random_function

LARGEST = [(2, 6), (3, 5), (4, 4)]
BUDGETS = {"none": lambda n: 0, "one": lambda n: 1, "half": lambda n: n // 2, "all but one": lambda n: n - 1}


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_policy_found_by_search_falls_below_the_certified_error(name: str, budget: str) -> None:
    network = incompressible_network(FUNCTIONS[name](2, 3), constant=2.0)
    for n, k in [(1, 1), (1, 2), (2, 1)]:
        r = BUDGETS[budget](n)
        if r < n:
            draw = torch.Generator().manual_seed(n)
            found = smallest_error(network, n, k, r, num_starts=2, num_steps=20, generator=draw)
            assert found.error >= certified_bound(network, n, k, r) * (1 - 1e-12)
            assert found.error > 2.2


def test_a_searched_policy_attains_the_certified_error_for_majority() -> None:
    network = incompressible_network(majority(2, 3), constant=2.0)
    found = search_policies(network, lambda n: 1, num_starts=2, num_steps=20)
    assert found.error == pytest.approx(verify_incompressible(network, 2.0, lambda n: 1).bound, rel=1e-9)
    assert (found.num_slots, found.suffix_len) == (1, 1)


def test_a_searched_policy_is_close_to_the_certified_error_where_detectors_cannot_help() -> None:
    network = incompressible_network(parity(2, 4), constant=2.0)
    found = search_policies(network, lambda n: n - 1, num_starts=2, num_steps=40)
    bound = verify_incompressible(network, 2.0, lambda n: n - 1).bound
    assert bound * (1 - 1e-12) <= found.error <= bound + 0.75


def test_the_search_finds_the_one_slot_policy_s_sum_on_the_compressible_network() -> None:
    network = compressible_network(random_function(2, 4))
    assert search_policies(network, lambda n: 1, num_starts=0, num_steps=0).error <= 1e-12


def test_gradient_descent_finds_policies_that_the_starts_and_the_scan_do_not() -> None:
    network = incompressible_network(random_function(2, 3), constant=1.0)
    errors = [search_policies(network, lambda n: 1, num_starts=4, num_steps=steps, seed=1).error for steps in (0, 60)]
    assert errors[1] < 0.95 * errors[0]


def test_the_report_tells_the_whole_theorem_for_one_function() -> None:
    report = theorem_report(majority(2, 3), 2.0, lambda n: 1, num_starts=1, num_steps=5)
    assert (report.num_sequences, report.num_splits) == (14, 20)
    assert report.compressible_values <= 1e-12
    assert report.incompressible_values <= 1e-12
    assert report.one_slot.error <= 1e-12
    assert report.units.num_inputs == 34
    assert report.certificate.bound > 2.0
    assert report.found.error >= report.certificate.bound * (1 - 1e-12)
    assert report.rows == {"block 2 W_2": tuple(range(28, 34))}
    assert report.gain == 64.0
    assert report.widths == widths(2, 3, 2)


def test_the_same_seed_gives_the_same_search() -> None:
    network = incompressible_network(random_function(2, 3), constant=1.0)
    first, second, other = (
        search_policies(network, lambda n: 1, num_starts=4, num_steps=40, seed=seed) for seed in (1, 1, 2)
    )
    assert first == second
    assert first.error != other.error


@pytest.mark.slow
@pytest.mark.parametrize(("m", "N"), LARGEST)
def test_the_largest_sizes_are_verified_unit_by_unit_and_searched(m: int, N: int) -> None:
    table = random_function(m, N, d_out=2, seed=4)
    report = theorem_report(table, 1.0, lambda n: n // 2, num_starts=1, num_steps=20)
    assert report.units.whole <= 1e-12
    assert report.units.one_slot <= 1e-12
    assert report.units.alarm == 0.0
    assert report.compressible_values <= 1e-12
    assert report.incompressible_values <= 1e-12
    assert report.one_slot.error <= 1e-12
    assert report.found.error >= report.certificate.bound > 1.1
