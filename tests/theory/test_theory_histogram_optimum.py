"""The optimum over all policies: known answers, brute force over suffixes and prefixes, SciPy, the network."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.optimize import linprog, minimize

from kvcat.theory.compression import Cache, answer, compressibility, suffix_error
from kvcat.theory.definitions import sequences
from kvcat.theory.histogram import count_vectors, histogram, incompressible_histogram
from kvcat.theory.histogram_optimum import (
    definition_optimum,
    empty_cache_error,
    joint_optimum,
    optimal_error,
    optimal_policy,
    optimal_sum,
    paper_bound,
    repeated_symbol,
    worst_suffix_len,
)

ROOT = 2**0.5


def errors_of(s: np.ndarray, counts: np.ndarray, longest_suffix: int, num_slots: int, shortest: int = 1) -> np.ndarray:
    """The error behind slots of sum s for every multiset of suffix symbols, from the two averages themselves."""
    found = []
    for k in range(shortest, longest_suffix + 1):
        for suffix in count_vectors(len(counts), k).numpy():
            short = (s + suffix) / (num_slots + k)
            found.append(np.linalg.norm(short - (counts + suffix) / (counts.sum() + k)))
    return np.array(found)


def cache_of(model_blocks: int, num_symbols: int, slots: torch.Tensor) -> Cache:
    """Slots (r, m) where y is read, in both blocks (the first does not attend)."""
    wide = torch.zeros(slots.shape[0], model_blocks * num_symbols, dtype=torch.float64)
    at = num_symbols * (model_blocks // 2)
    wide[:, at : at + num_symbols] = slots
    first = torch.zeros(slots.shape[0], num_symbols, dtype=torch.float64)
    return ((first, first),), ((torch.zeros_like(wide), wide),)


@pytest.mark.parametrize(
    ("m", "n", "k", "r", "optimum", "bound"),
    [
        (2, 3, 1, 1, 0.1767766953, 0.125),
        (3, 5, 1, 1, 0.2721655270, 1 / 6),
        (4, 7, 3, 3, 0.1732050808, 0.1),
        (5, 4, 2, 1, 0.2981423970, 1 / 6),
    ],
)
def test_the_optimum_at_one_suffix_length_and_the_papers_bound_have_their_known_values(
    m: int, n: int, k: int, r: int, optimum: float, bound: float
) -> None:
    assert optimal_error(m, n, k, r) == pytest.approx(optimum, abs=5e-11)
    assert paper_bound(n, k, r) == pytest.approx(bound, rel=1e-14)


@pytest.mark.parametrize(("m", "n", "k", "r"), [(2, 3, 1, 1), (3, 3, 2, 2), (4, 2, 2, 1), (3, 4, 1, 2), (5, 2, 1, 1)])
@pytest.mark.parametrize("num_blocks", [2, 4])
def test_the_closed_form_is_what_the_network_measures_and_no_other_sum_does_better(
    m: int, n: int, k: int, r: int, num_blocks: int
) -> None:
    model = incompressible_histogram(m, n + k, num_blocks=num_blocks)
    draw = torch.Generator().manual_seed(0)
    suffixes = sequences(m, k)
    for prefix in sequences(m, n)[:: max(1, m**n // 9)]:
        s = optimal_sum(torch.bincount(prefix, minlength=m), k, r)
        split = torch.randn(r, m, generator=draw, dtype=torch.float64)
        split += (s - split.sum(0)) / r
        errors = suffix_error(model, cache_of(num_blocks, m, split), prefix, suffixes)
        assert float(errors.max()) == pytest.approx(optimal_error(m, n, k, r), abs=1e-14)
        for _ in range(20):
            other = s + 0.1 * torch.randn(m, generator=draw, dtype=torch.float64)
            errors = suffix_error(model, cache_of(num_blocks, m, other.repeat(r, 1) / r), prefix, suffixes)
            assert float(errors.max()) > optimal_error(m, n, k, r)


def test_a_cache_of_one_entry_with_the_best_sum_is_not_the_best_cache_of_two() -> None:
    model, prefix = incompressible_histogram(2, 5), torch.tensor([0, 1, 0, 0])
    s = optimal_sum(torch.tensor([3, 1]), 1, 2)
    error = float(suffix_error(model, cache_of(2, 2, s[None]), prefix, sequences(2, 1)).max())
    assert error > 2 * optimal_error(2, 4, 1, 2)


@pytest.mark.parametrize(("m", "n", "k", "r"), [(2, 3, 1, 1), (3, 5, 1, 1), (4, 7, 3, 3), (5, 4, 2, 1), (6, 9, 4, 2)])
def test_the_papers_bound_is_exact_in_the_maximum_norm_and_loose_by_root_two_to_two_in_the_euclidean(
    m: int, n: int, k: int, r: int
) -> None:
    counts = np.bincount(np.arange(n) % m, minlength=m)
    rows, sides = [], []
    for i in range(m):  # minimise t over s and t with |short - whole| <= t in every coordinate, for suffixes i^k
        suffix = k * np.eye(m)[i]
        offset = suffix / (r + k) - (counts + suffix) / (n + k)
        for sign in (1, -1):
            rows.append(np.hstack([sign * np.eye(m) / (r + k), -np.ones((m, 1))]))
            sides.append(-sign * offset)
    program = linprog(
        np.append(np.zeros(m), 1), A_ub=np.vstack(rows), b_ub=np.concatenate(sides), bounds=(None, None), method="highs"
    )
    assert program.fun == pytest.approx(paper_bound(n, k, r), rel=1e-9)
    ratio = optimal_error(m, n, k, r) / paper_bound(n, k, r)
    assert ROOT - 1e-12 <= ratio < 2
    assert ratio == pytest.approx(2 * (1 - 1 / m) ** 0.5, rel=1e-14)


@pytest.mark.parametrize(
    ("counts", "longest_suffix", "num_slots", "error"),
    [
        ((2, 2), 4, 1, 1 / 3 / ROOT),
        ((3, 1), 4, 1, 13 / 35 / ROOT),
        ((4, 0), 4, 1, 3 / 7 / ROOT),
        ((3, 3), 6, 3, 6 / 35 / ROOT),
        ((4, 2), 6, 3, 5 / 28 / ROOT),
        ((5, 1), 6, 3, 37 / 182 / ROOT),
        ((6, 0), 6, 3, 3 / 13 / ROOT),
        ((1, 0), 1, 0, 0.5**0.5),
    ],
)
def test_the_optimum_over_all_suffix_lengths_has_its_known_values(
    counts: tuple[int, ...], longest_suffix: int, num_slots: int, error: float
) -> None:
    assert joint_optimum(torch.tensor(counts), longest_suffix, num_slots).error == pytest.approx(error, rel=1e-13)


def test_the_optimum_for_three_symbols_has_its_known_value() -> None:
    assert joint_optimum(torch.tensor([4, 0, 0]), 2, 1).error == pytest.approx(0.3101020514, abs=5e-11)


def test_the_definitions_optimum_has_its_known_values() -> None:
    known = [1 / 6, 1 / 4, 8 / 25, 2 / 5, 16 / 35, 1 / 2, 5 / 9, 3 / 5]
    found = [definition_optimum(2, longest, lambda n: 1).error for longest in range(3, 11)]
    assert found == pytest.approx([value / ROOT for value in known], rel=1e-13)


@pytest.mark.parametrize("longest", [5, 9, 24])
@pytest.mark.parametrize("num_slots", [1, 3])
def test_two_symbols_have_a_closed_form_over_all_lengths(longest: int, num_slots: int) -> None:
    # at the prefix 0^n the suffix 0 (x = r e_1, weight 1 / (r + 1)) and some 1^k touch the ball
    r = num_slots
    value = max(
        ROOT * k * (n - r) / ((n + k) * (2 * r + k + 1)) for n in range(r, longest) for k in range(1, longest - n + 1)
    )
    assert definition_optimum(2, longest, lambda n: min(n, r)).error == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("counts", "longest_suffix", "num_slots"),
    [((4, 0), 4, 1), ((3, 1, 0), 4, 2), ((2, 2, 1, 1), 3, 3), ((6, 0, 0), 5, 1), ((1, 4), 7, 4), ((2, 1, 0), 3, 0)],
)
def test_no_suffix_at_all_is_worse_than_those_of_one_symbol_and_scipy_finds_no_better_sum(
    counts: tuple[int, ...], longest_suffix: int, num_slots: int
) -> None:
    best = joint_optimum(torch.tensor(counts), longest_suffix, num_slots)
    arguments = (np.array(counts), longest_suffix, num_slots)
    errors = errors_of(best.sum.numpy(), *arguments)
    assert errors.max() == pytest.approx(best.error, rel=1e-12)
    assert abs(best.gap) < 1e-13
    assert best.suffix_lens
    for k in best.suffix_lens:
        at_this_length = errors_of(best.sum.numpy(), np.array(counts), k, num_slots, shortest=k)
        assert at_this_length.max() == pytest.approx(best.error, rel=1e-12)
    if num_slots == 0:
        return
    constraint = {"type": "ineq", "fun": lambda z: z[-1] - errors_of(z[:-1], *arguments) ** 2}
    start = np.append(np.array(counts) / 2, 10.0)
    found = minimize(lambda z: z[-1], start, constraints=constraint, method="SLSQP", options={"ftol": 1e-14})
    reached = errors_of(found.x[:-1], *arguments).max()
    assert best.error - 1e-12 <= reached == pytest.approx(best.error, rel=1e-5)


@pytest.mark.parametrize(("m", "n", "longest_suffix"), [(2, 6, 5), (3, 5, 4), (4, 4, 3)])
@pytest.mark.parametrize("num_slots", [0, 1, 2, 3])
def test_prefixes_of_one_symbol_are_the_worst_and_balanced_ones_the_best(
    m: int, n: int, longest_suffix: int, num_slots: int
) -> None:
    errors = {
        tuple(counts.tolist()): joint_optimum(counts, longest_suffix, num_slots).error for counts in count_vectors(m, n)
    }
    worst = joint_optimum(repeated_symbol(m, n), longest_suffix, num_slots).error
    assert max(errors.values()) == pytest.approx(worst, rel=1e-12)
    assert sum(error > worst - 1e-9 for error in errors.values()) == m
    balanced = min(errors, key=lambda counts: max(counts) - min(counts))
    assert min(errors.values()) == pytest.approx(errors[balanced], rel=1e-12)


@pytest.mark.parametrize(("m", "each", "longest_suffix", "num_slots"), [(2, 3, 6, 3), (3, 2, 5, 1), (4, 2, 7, 5)])
def test_balanced_prefixes_have_one_sum_that_is_best_for_every_suffix_length(
    m: int, each: int, longest_suffix: int, num_slots: int
) -> None:
    counts, n = torch.full((m,), each), m * each
    best = joint_optimum(counts, longest_suffix, num_slots)
    torch.testing.assert_close(best.sum, torch.full((m,), num_slots / m, dtype=torch.float64), rtol=1e-12, atol=0)
    for k in range(1, longest_suffix + 1):
        torch.testing.assert_close(best.sum, optimal_sum(counts, k, num_slots), rtol=1e-12, atol=0)
    single = [optimal_error(m, n, k, num_slots) for k in range(1, longest_suffix + 1)]
    assert best.error == pytest.approx(max(single), rel=1e-12)


def test_without_slots_the_network_measures_the_formula() -> None:
    model, prefix = incompressible_histogram(3, 6), torch.tensor([0, 1, 0, 0])
    empty = cache_of(2, 3, torch.zeros(0, 3, dtype=torch.float64))
    for k in (1, 2):
        errors = suffix_error(model, empty, prefix, sequences(3, k))
        assert float(errors.max()) == pytest.approx(empty_cache_error(torch.tensor([3, 1, 0]), k), rel=1e-13)
    torch.testing.assert_close(answer(model, empty, 4, sequences(3, 2)), histogram(sequences(3, 2), 3))


@pytest.mark.parametrize("num_blocks", [2, 4])
@pytest.mark.parametrize(
    ("m", "longest", "budget"),
    [
        (2, 5, lambda n: 1),
        (3, 4, lambda n: 1),
        (2, 5, lambda n: n - 1),
        (2, 5, lambda n: min(n, 3)),
        (3, 4, lambda n: max(1, n - 1)),
        (2, 5, lambda n: 0),
    ],
)
def test_the_optimal_policy_run_through_the_network_has_the_optimal_error(
    m: int, longest: int, budget: Callable[[int], int], num_blocks: int
) -> None:
    model = incompressible_histogram(m, longest, num_blocks=num_blocks)
    policy, best = optimal_policy(m, longest, budget), definition_optimum(m, longest, budget)
    assert compressibility(model, policy, budget).error == pytest.approx(best.error, abs=1e-12)
    assert compressibility(model.with_causal_mask(), policy, budget).error == pytest.approx(best.error, abs=1e-12)


@pytest.mark.parametrize("prefix_len", [1, 2, 7, 30, 100])
def test_the_worst_suffix_length_is_about_the_root_of_prefix_length_times_slots(prefix_len: int) -> None:
    for r in range(1, prefix_len, max(1, prefix_len // 7)):
        root = (prefix_len * r) ** 0.5
        for longest_suffix in (1, 3, 4 * prefix_len):
            bounds = [paper_bound(prefix_len, k, r) for k in range(1, longest_suffix + 1)]
            k = worst_suffix_len(prefix_len, r, longest_suffix)
            assert bounds[k - 1] == max(bounds)
            assert abs(k - root) < 1 or k == longest_suffix < root
        limit = (prefix_len**0.5 - r**0.5) / (prefix_len**0.5 + r**0.5)
        assert limit * 0.94 <= 2 * max(bounds) <= limit * (1 + 1e-12)
        if root.is_integer():
            assert 2 * max(bounds) == pytest.approx(limit, rel=1e-12)


def test_arguments_outside_their_range_are_refused() -> None:
    with pytest.raises(ValueError, match="slots must number 1 to 3, got 0"):
        optimal_error(2, 3, 1, 0)
    with pytest.raises(ValueError, match="slots must number 0 to 3, got 4"):
        joint_optimum(torch.tensor([3, 0]), 1, 4)
    with pytest.raises(ValueError, match="lengths 3 and 0"):
        paper_bound(3, 0, 1)
    with pytest.raises(ValueError, match="2 symbols, got 1"):
        definition_optimum(1, 4, lambda n: 1)
