import itertools
import math
import time

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from kvcat.evals import ClusterBootstrap
from kvcat.evals.statistics import carries, mcnemar, smallest_difference, wilson

OUTCOMES = st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 1.0])), min_size=1, max_size=60)


def test_constant_data_have_an_interval_of_zero_width():
    bootstrap = ClusterBootstrap([f"d{i % 7}" for i in range(20)])
    estimate = bootstrap.mean(np.full(20, 0.1))
    assert estimate.value == estimate.low == estimate.high == 0.1


def test_two_documents_give_the_two_document_means_as_ends():
    estimate = ClusterBootstrap(["a", "a", "a", "b"]).mean(np.array([1.0, 2.0, 3.0, 10.0]))
    assert estimate.value == 4.0
    assert (estimate.low, estimate.high) == (2.0, 10.0)


def test_resamples_of_two_documents_are_the_three_possible_means_in_proportion_one_two_one():
    bootstrap = ClusterBootstrap(["a", "b", "b"], num_resamples=40_000)
    draws = bootstrap.of_means(lambda mean: mean, np.array([0.0, 3.0, 6.0])).resampled
    values, counts = np.unique(np.round(draws, 9), return_counts=True)
    assert values.tolist() == [0.0, 3.0, 4.5]
    np.testing.assert_allclose(counts / 40_000, [0.25, 0.5, 0.25], atol=0.01)


def test_windows_of_one_document_are_resampled_together():
    copies = np.repeat([0.0, 1.0, 2.0, 5.0], 25)
    clustered = ClusterBootstrap(np.repeat(["a", "b", "c", "d"], 25).tolist()).mean(copies)
    single = ClusterBootstrap(["a", "b", "c", "d"]).mean(np.array([0.0, 1.0, 2.0, 5.0]))
    assert clustered == single


def test_one_document_gives_a_figure_without_an_interval():
    estimate = ClusterBootstrap(["a", "a"]).mean(np.array([1.0, 2.0]))
    assert estimate.value == 1.5
    assert np.isnan([estimate.low, estimate.high]).all()
    assert not estimate.excludes(0.0)


def test_a_ratio_is_of_sums_and_not_a_mean_of_ratios():
    estimate = ClusterBootstrap(["a", "b"]).ratio(np.array([1.0, 9.0]), np.array([2.0, 10.0]))
    assert estimate.value == pytest.approx(10.0 / 12.0)
    assert estimate.low == pytest.approx(0.5)
    assert estimate.high == pytest.approx(0.9)


def test_medians_equal_numpys_on_every_resample():
    generator = np.random.default_rng(0)
    documents = [f"d{i % 5}" for i in range(14)]
    values = generator.normal(size=14)
    bootstrap = ClusterBootstrap(documents, num_resamples=50)
    draws = bootstrap.median_draws(values)
    assert draws.value == np.median(values)
    names = sorted(set(documents))
    for counts, median in zip(bootstrap._counts, draws.resampled, strict=True):
        times = dict(zip(names, counts.astype(int), strict=True))
        pool = np.repeat(values, [times[document] for document in documents])
        assert median == pytest.approx(np.median(pool))


def test_one_seed_gives_one_interval():
    documents, values = [f"d{i}" for i in range(9)], np.arange(9.0)
    first, again = (ClusterBootstrap(documents, seed=3).mean(values) for _ in range(2))
    assert first == again
    assert first != ClusterBootstrap(documents, seed=4).mean(np.sqrt(values))


def test_pairing_narrows_the_interval_of_a_difference_of_correlated_models():
    generator = np.random.default_rng(1)
    documents = [f"d{i // 2}" for i in range(80)]
    difficulty = np.repeat(generator.normal(size=40), 2)
    ours, theirs = (difficulty + 0.1 * generator.normal(size=80) + shift for shift in (0.0, 0.2))
    bootstrap = ClusterBootstrap(documents)
    paired = bootstrap.estimate(bootstrap.of_means(np.subtract, ours, theirs))
    alone = [bootstrap.mean(values) for values in (ours, theirs)]
    assert paired.value == pytest.approx((ours - theirs).mean())
    assert paired.high - paired.low < 0.3 * max(e.high - e.low for e in alone)
    assert paired.excludes(0.0)


def test_ten_thousand_resamples_of_a_hundred_documents_take_less_than_a_second():
    bootstrap = ClusterBootstrap([f"d{i // 2}" for i in range(200)])
    values = np.random.default_rng(0).normal(size=200)
    begun = time.perf_counter()
    for _ in range(5):
        bootstrap.mean(values)
    assert time.perf_counter() - begun < 1.0


@pytest.mark.slow
def test_intervals_cover_the_true_mean_about_95_times_in_100():
    generator = np.random.default_rng(2)
    documents = [f"d{i // 3}" for i in range(120)]
    covered = 0
    for _ in range(600):
        values = np.repeat(generator.normal(size=40), 3) + 0.5 * generator.normal(size=120)
        estimate = ClusterBootstrap(documents, num_resamples=1000).mean(values)
        covered += estimate.low <= 0.0 <= estimate.high
    assert 0.91 <= covered / 600 <= 0.97


def test_one_stratum_gives_what_no_strata_give():
    documents, values = [f"d{i // 2}" for i in range(18)], np.arange(18.0) ** 2
    assert ClusterBootstrap(documents, strata=["all"] * 18).mean(values) == ClusterBootstrap(documents).mean(values)


def test_every_resample_holds_as_many_documents_of_a_stratum_as_there_are():
    documents = [f"d{i}" for i in range(20)]
    strata = ["deep" if i % 4 else "shallow" for i in range(20)]
    bootstrap = ClusterBootstrap(documents, strata=strata, num_resamples=200)
    for name, size in [("deep", 15), ("shallow", 5)]:
        members = [sorted(documents).index(d) for d, s in zip(documents, strata, strict=True) if s == name]
        np.testing.assert_array_equal(bootstrap._counts[:, members].sum(axis=1), size)


def test_strata_that_explain_everything_leave_no_width():
    strata = [f"s{i % 3}" for i in range(30)]
    values = np.array([{"s0": 0.0, "s1": 5.0, "s2": 9.0}[s] for s in strata])
    estimate = ClusterBootstrap([f"d{i}" for i in range(30)], strata=strata).mean(values)
    assert estimate.low == pytest.approx(estimate.high)
    assert estimate.value == pytest.approx(14.0 / 3.0)


def test_strata_of_equal_size_are_resampled_independently():
    documents, strata = [f"d{i:02}" for i in range(20)], ["a"] * 10 + ["b"] * 10
    counts = ClusterBootstrap(documents, strata=strata, num_resamples=4000)._counts
    first, second = counts[:, :10] @ np.arange(10.0), counts[:, 10:] @ np.arange(10.0)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05


def test_a_stratified_mean_has_the_textbook_standard_error():
    generator = np.random.default_rng(5)
    strata = ["a"] * 60 + ["b"] * 140
    values = np.concatenate([generator.normal(0.0, 1.0, 60), generator.normal(10.0, 2.0, 140)])
    bootstrap = ClusterBootstrap([f"d{i:03}" for i in range(200)], strata=strata)
    variance = sum(values[part].var() / len(values[part]) * (len(values[part]) / 200) ** 2 for part in _parts(60, 200))
    assert bootstrap.of_means(lambda mean: mean, values).resampled.std() == pytest.approx(variance**0.5, rel=0.03)


def _parts(first, total):
    return slice(0, first), slice(first, total)


def test_a_document_in_two_strata_and_missing_strata_are_told():
    with pytest.raises(ValueError, match="document 'a' lies in two strata, 'x' and 'y'"):
        ClusterBootstrap(["a", "a"], strata=["x", "y"])
    with pytest.raises(ValueError, match="3 windows but 2 strata"):
        ClusterBootstrap(["a", "b", "c"], strata=["x", "y"])


def test_documents_alone_in_their_stratum_are_resampled_together():
    documents, values = [f"d{i}" for i in range(8)], np.arange(8.0)
    alone = ClusterBootstrap(documents, strata=documents).mean(values)
    assert alone == ClusterBootstrap(documents).mean(values)
    bootstrap = ClusterBootstrap(documents, strata=["a", "a", "a", "b", "b", "x", "y", "z"], num_resamples=50)
    sums = [bootstrap._counts[:, part].sum(axis=1) for part in (slice(0, 3), slice(3, 5), slice(5, 8))]
    assert [set(s) for s in sums] == [{3.0}, {2.0}, {3.0}]


def test_a_single_document_alone_in_its_stratum_joins_the_smallest_other():
    strata = ["a", "a", "a", "b", "b", "x"]
    bootstrap = ClusterBootstrap([f"d{i}" for i in range(6)], strata=strata, num_resamples=200)
    assert set(bootstrap._counts[:, :3].sum(axis=1)) == {3.0}
    assert set(bootstrap._counts[:, 5]) > {0.0, 1.0, 2.0}


def test_one_document_in_one_stratum_gives_no_interval():
    assert math.isnan(ClusterBootstrap(["a", "a"], strata=["x", "x"]).mean(np.array([1.0, 2.0])).low)


@given(order=st.permutations(range(12)))
def test_the_order_of_examples_does_not_change_a_stratified_interval(order):
    documents, strata = [f"d{i // 2}" for i in range(12)], [f"s{i // 6}" for i in range(12)]
    values = np.sqrt(np.arange(12.0))
    shuffled = ClusterBootstrap([documents[i] for i in order], strata=[strata[i] for i in order], num_resamples=50)
    expected = ClusterBootstrap(documents, strata=strata, num_resamples=50).mean(values)
    estimate = shuffled.mean(values[np.array(order)])
    assert (estimate.low, estimate.high) == pytest.approx((expected.low, expected.high))


@given(successes=st.integers(0, 300), more=st.integers(0, 300), level=st.sampled_from([0.8, 0.95, 0.99]))
def test_wilson_equals_scipys(successes, more, level):
    trials = max(1, successes + more)
    theirs = scipy.stats.binomtest(successes, trials).proportion_ci(level, method="wilson")
    ours = wilson(successes, trials, level=level)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=1e-12)
    assert 0.0 <= ours.low <= ours.value <= ours.high <= 1.0


def test_all_right_and_none_right_still_have_an_interval():
    right, wrong = wilson(20, 20), wilson(0, 20)
    assert (right.value, right.high) == (1.0, 1.0)
    assert right.low == pytest.approx(20 / (20 + 1.959964**2))  # n / (n + z^2)
    assert (wrong.low, wrong.high) == (0.0, pytest.approx(1.0 - right.low))


def test_the_exact_mean_coverage_of_wilson_is_95_in_100():
    rates = np.linspace(0.02, 0.98, 97)
    for trials in (20, 100):
        ends = np.array([(e.low, e.high) for e in (wilson(k, trials) for k in range(trials + 1))])
        chances = scipy.stats.binom.pmf(np.arange(trials + 1), trials, rates[:, None])
        covered = (chances * ((ends[:, 0] <= rates[:, None]) & (rates[:, None] <= ends[:, 1]))).sum(axis=1)
        assert covered.mean() == pytest.approx(0.95, abs=0.01)


@pytest.mark.parametrize(("successes", "trials"), [(1, 0), (-1, 5), (6, 5), (0.0, -1.0)])
def test_what_is_no_proportion_is_told(successes, trials):
    with pytest.raises(ValueError, match="no proportion"):
        wilson(successes, trials)


@given(OUTCOMES)
def test_mcnemar_equals_scipys_binomial_test_on_the_examples_that_differ(pairs):
    first, second = np.array(pairs).T
    test = mcnemar(first, second)
    b, c = pairs.count((1.0, 0.0)), pairs.count((0.0, 1.0))
    assert (test.only_first, test.only_second) == (b, c)
    assert test.p == pytest.approx(scipy.stats.binomtest(b, b + c).pvalue if b + c else 1.0)
    assert test.mid_p == pytest.approx(
        2 * scipy.stats.binom.cdf(min(b, c), b + c, 0.5) - scipy.stats.binom.pmf(min(b, c), b + c, 0.5)
    )


@given(OUTCOMES)
def test_mcnemar_is_symmetric_and_blind_to_examples_on_which_both_agree(pairs):
    first, second = np.array(pairs).T
    test, turned = mcnemar(first, second), mcnemar(second, first)
    assert (test.p, test.mid_p) == (turned.p, turned.mid_p)
    both = np.ones(7)
    assert mcnemar(np.append(first, both), np.append(second, both)) == test
    assert 0.0 < test.mid_p <= test.p <= 1.0


@pytest.mark.parametrize(("b", "c"), [(0, 0), (0, 4), (1, 4), (3, 3), (2, 5)])
def test_mcnemar_equals_the_enumeration_of_all_ways_to_split(b, c):
    splits = [sum(coins) for coins in itertools.product((0, 1), repeat=b + c)]
    extreme = sum(min(k, b + c - k) <= min(b, c) for k in splits) / len(splits)
    assert mcnemar(np.array([1.0] * b + [0.0] * c), np.array([0.0] * b + [1.0] * c)).p == extreme


def test_mcnemar_is_exact_where_floats_would_overflow():
    ones, zeros = np.ones(2000), np.zeros(2000)
    first, second = np.concatenate([ones, zeros[:1900]]), np.concatenate([zeros, ones[:1900]])
    assert mcnemar(first, second).p == pytest.approx(scipy.stats.binomtest(1900, 3900).pvalue)
    assert mcnemar(ones, zeros).p == 0.0  # 2^-1999


def test_outcomes_that_are_not_binary_are_told():
    with pytest.raises(ValueError, match=r"0 or 1, not 0\.5"):
        mcnemar(np.array([1.0, 0.5]), np.array([1.0, 0.0]))
    with pytest.raises(ValueError, match="0 or 1, not nan"):
        mcnemar(np.array([1.0]), np.array([np.nan]))


def test_a_hundred_examples_cannot_tell_differences_under_14_points():
    assert carries(100) == "100 examples: differences under 14 points cannot be told at 95 %"
    assert carries(100, -0.064) == f"{carries(100)}, 6.4 among them"
    assert carries(100, 0.19) == ""
    assert carries(5, 1.0) == "5 examples: no difference can be told at 95 %"


@pytest.mark.parametrize("num_examples", [6, 20, 100, 500])
@pytest.mark.parametrize("discordant", [0.05, 0.2, 0.5])
def test_no_smaller_difference_would_pass_mcnemars_test(num_examples, discordant):
    smallest = smallest_difference(num_examples, discordant=discordant)
    differ = max(round(discordant * num_examples), 1)
    passing = [abs(2 * k - differ) for k in range(differ + 1) if scipy.stats.binomtest(k, differ).pvalue <= 0.05]
    for difference in passing:
        assert difference / num_examples >= smallest - 1.0 / num_examples


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_more_examples_carry_more(few, many):
    assert smallest_difference(max(few, many)) <= smallest_difference(min(few, many))


def test_no_examples_and_impossible_shares_are_told():
    with pytest.raises(ValueError, match="0 examples"):
        carries(0)
    with pytest.raises(ValueError, match=r"in \(0, 1\], not 1\.5"):
        smallest_difference(10, discordant=1.5)


def test_stratified_intervals_of_a_paired_difference_cover_the_truth_about_95_times_in_100():
    generator = np.random.default_rng(4)
    documents, strata = [f"d{i:03}" for i in range(100)], [f"depth {i % 5}" for i in range(100)]
    rates = np.array([0.1, 0.3, 0.5, 0.7, 0.9])[np.arange(100) % 5]
    covered = 0
    for _ in range(600):
        common, own = generator.random(100), generator.random(100)
        ours, theirs = (common < rates) * 1.0, (np.where(own < 0.4, own / 0.4, common) < rates - 0.05) * 1.0
        bootstrap = ClusterBootstrap(documents, strata=strata, num_resamples=1000)
        estimate = bootstrap.estimate(bootstrap.of_means(np.subtract, ours, theirs))
        covered += estimate.low <= 0.05 <= estimate.high
    assert 0.91 <= covered / 600 <= 0.98


def test_mcnemars_exact_test_errs_at_most_5_times_in_100_where_nothing_differs():
    generator = np.random.default_rng(6)
    pairs = [(generator.random((2, 100)) < 0.3).astype(np.float64) for _ in range(4000)]
    tests = [mcnemar(first, second) for first, second in pairs]
    assert np.mean([test.p <= 0.05 for test in tests]) <= 0.05
    assert np.mean([test.mid_p <= 0.05 for test in tests]) == pytest.approx(0.05, abs=0.012)
