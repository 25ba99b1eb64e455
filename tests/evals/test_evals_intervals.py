import itertools

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from kvcat.evals import ClusterBootstrap
from kvcat.evals.intervals import holm, mcnemar, share_difference, small_sample_warning, wilson


def names(count, each=1):
    return [f"d{i // each:03}" for i in range(count)]


def test_resamples_of_two_documents_are_the_three_possible_means_in_proportion_one_two_one():
    bootstrap = ClusterBootstrap(["a", "b", "b"], num_resamples=40_000)
    values = np.array([0.0, 3.0, 6.0])
    draws = bootstrap.of_means(lambda mean: mean, values)
    assert draws[0] == 3.0
    means, counts = np.unique(np.round(draws[1:], 9), return_counts=True)
    assert means.tolist() == [0.0, 3.0, 4.5]
    np.testing.assert_allclose(counts / 40_000, [0.25, 0.5, 0.25], atol=0.01)
    estimate = bootstrap.mean(values)
    assert (estimate.low, estimate.high) == (0.0, 4.5)


def test_windows_of_one_document_are_resampled_together():
    copies = np.repeat([0.0, 1.0, 2.0, 5.0], 25)
    clustered = ClusterBootstrap(np.repeat(["a", "b", "c", "d"], 25).tolist()).mean(copies)
    alone = np.array([0.0, 1.0, 2.0, 5.0])
    assert clustered == ClusterBootstrap(["a", "b", "c", "d"]).mean(alone)
    assert clustered == ClusterBootstrap(["a", "b", "c", "d"], strata=["all"] * 4).mean(alone)
    constant = ClusterBootstrap(names(20, 3)).mean(np.full(20, 0.1))
    assert constant.value == constant.low == constant.high == 0.1
    first = np.array([1.0, 1.0, 0.5, 0.0])
    second = np.array([0.5, 0.0, 0.5, 0.0])
    copies = [np.repeat(values, 5) for values in (first, second)]
    assert share_difference(*copies, names(20, 5)) == share_difference(first, second, names(4))


def test_one_document_gives_a_figure_without_an_interval():
    bootstrap = ClusterBootstrap(["a", "a"], strata=["x", "x"])
    estimate = bootstrap.mean(np.array([1.0, 2.0]))
    assert estimate.value == 1.5
    assert np.isnan([estimate.low, estimate.high]).all()
    assert not estimate.excludes(0.0)
    assert np.isnan(bootstrap.p_value(np.ones(9)))


def test_a_ratio_is_of_sums_and_a_p_value_twice_the_smaller_share_of_resamples_beyond_0():
    bootstrap = ClusterBootstrap(["a", "b"])
    estimate = bootstrap.estimate(
        bootstrap.of_means(np.divide, np.array([1.0, 9.0]), np.array([2.0, 10.0]))
    )
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((10.0 / 12.0, 0.5, 0.9))
    assert bootstrap.p_value(np.array([9.0, *[1.0] * 96, *[-1.0] * 3])) == pytest.approx(
        2 * 4 / 100
    )
    assert bootstrap.p_value(np.array([-9.0, *[-1.0] * 99])) == pytest.approx(2 / 100)
    assert np.isnan(bootstrap.p_value(np.array([1.0, np.nan, 1.0])))


def test_documents_and_training_seeds_add_their_variances_and_one_seed_has_none():
    generator = np.random.default_rng(3)
    documents = generator.normal(size=30)
    seeds = generator.normal(size=6)
    values = seeds[:, None] + documents
    draws = ClusterBootstrap(names(30), seeds=list("abcdef"), num_resamples=40_000).of_means(
        lambda m: m, values
    )
    assert draws[1:].var() == pytest.approx(seeds.var(ddof=1) / 6 + documents.var() / 30, rel=0.05)
    one = ClusterBootstrap(names(30), seeds=["a"])
    assert one.mean(documents[None]) == ClusterBootstrap(names(30)).mean(documents)


def test_strata_are_resampled_to_their_size_and_a_mean_has_the_textbook_standard_error():
    generator = np.random.default_rng(5)
    values = np.concatenate([generator.normal(0.0, 1.0, 60), generator.normal(10.0, 2.0, 140)])
    bootstrap = ClusterBootstrap(names(200), strata=["a"] * 60 + ["b"] * 140)
    assert [
        set(bootstrap._counts[:, stratum].sum(1)) for stratum in (slice(0, 60), slice(60, 200))
    ] == [
        {60.0},
        {140.0},
    ]
    variance = sum(
        stratum.var() / len(stratum) * (len(stratum) / 200) ** 2
        for stratum in (values[:60], values[60:])
    )
    assert bootstrap.of_means(lambda mean: mean, values)[1:].std() == pytest.approx(
        variance**0.5, rel=0.03
    )


@pytest.mark.parametrize(
    ("strata", "bounds"), [("aaabbxyz", (3, 5, 8)), ("aaabbx", (3, 6)), ("abcdefgh", (8,))]
)
def test_documents_alone_in_their_stratum_share_one_or_join_the_smallest(strata, bounds):
    counts = ClusterBootstrap(names(len(strata)), strata=list(strata), num_resamples=50)._counts
    for start, stop in itertools.pairwise((0, *bounds)):
        assert set(counts[:, start:stop].sum(axis=1)) == {float(stop - start)}
        assert counts[1:, stop - 1].std() > 0.0


@given(order=st.permutations(range(12)))
def test_the_order_of_examples_does_not_change_a_stratified_interval(order):
    documents = np.array(names(12, 2))
    values = np.sqrt(np.arange(12.0))
    strata = np.repeat(["s0", "s1"], 6)
    order = np.array(order)
    shuffled = ClusterBootstrap(
        documents[order], strata=list(strata[order]), num_resamples=50
    ).mean(values[order])
    expected = ClusterBootstrap(documents, strata=list(strata), num_resamples=50).mean(values)
    assert (shuffled.low, shuffled.high) == pytest.approx((expected.low, expected.high))


@given(successes=st.integers(0, 300), failures=st.integers(0, 300))
def test_wilson_equals_scipys(successes, failures):
    trials = max(1, successes + failures)
    theirs = scipy.stats.binomtest(successes, trials).proportion_ci(0.95, method="wilson")
    ours = wilson(successes, trials)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=1e-12)
    assert 0.0 <= ours.low <= ours.value <= ours.high <= 1.0


def test_a_difference_of_shares_is_agresti_and_mins_by_hand():
    first = np.array([1.0] * 6 + [0.0] * 4)
    second = np.array([1.0] * 2 + [0.0] * 8)
    difference, p = share_difference(first, second, names(10))
    mean = 4 / 12  # b = 4, c = 0, half added to each of four outcomes: b + c + 1 = 5 of n + 2 = 12
    error = (5 / 12 - mean**2) ** 0.5 / 12**0.5
    assert difference.value == pytest.approx(0.4)
    assert (difference.low, difference.high) == pytest.approx(
        (mean - 1.959964 * error, mean + 1.959964 * error)
    )
    assert p == pytest.approx(2 * scipy.stats.norm.sf(mean / error))


@pytest.mark.parametrize(
    ("b", "c", "both"), [(0, 0, 3), (0, 4, 0), (1, 4, 7), (3, 3, 0), (2, 5, 1)]
)
def test_mcnemar_equals_the_enumeration_of_all_ways_to_split(b, c, both):
    splits = [sum(coins) for coins in itertools.product((0, 1), repeat=b + c)]
    extreme = sum(min(k, b + c - k) <= min(b, c) for k in splits) / len(splits)
    outcomes = [1.0] * both + [1.0] * b + [0.0] * c, [1.0] * both + [0.0] * b + [1.0] * c
    assert mcnemar(*map(np.array, outcomes)) == pytest.approx(extreme)


def scores(count, better, value=1.0):
    return np.array([value] * better + [0.0] * (count - better)), np.zeros(count)


@pytest.mark.parametrize(
    ("pair", "smallest", "observed"),
    [
        (scores(100, 5), "100 documents: differences under 6.0 points", "5.0"),
        # several right answers: a quarter more of them in a quarter of the documents
        (scores(12, 3, 0.25), "12 documents: differences under 12.5 points", "6.2"),
    ],
)
def test_a_sample_too_small_for_the_observed_difference_gets_a_warning(pair, smallest, observed):
    warning = small_sample_warning(*pair, names(len(pair[0])))
    assert warning == f"{smallest} cannot be detected at 95 %, such as the observed {observed}"


def test_a_sample_without_a_difference_or_with_too_few_documents_gets_a_warning():
    warning = small_sample_warning(*scores(100, 0), names(100))
    assert warning == "the models agree on all 100 examples"
    warning = small_sample_warning(*scores(5, 5), names(5))
    assert warning == "5 documents: no difference can be detected at 95 %"
    warning = small_sample_warning(*scores(5, 5), names(5, each=5))
    assert warning == "1 document: no difference can be detected at 95 %"


@pytest.mark.parametrize("pair", [scores(100, 19), scores(6, 6), scores(12, 6, 0.25)])
def test_a_sample_that_is_large_enough_gets_no_warning(pair):
    assert small_sample_warning(*pair, names(len(pair[0]))) == ""


def test_holm_equals_its_definition_and_leaves_missing_p_out():
    assert holm(np.array([0.04, np.nan, 0.01, 0.03])).tolist() == pytest.approx(
        [0.06, np.nan, 0.03, 0.06], nan_ok=True
    )
    assert holm(np.array([0.9, 0.6])).tolist() == [1.0, 1.0]
    assert holm(np.array([])).tolist() == []


def test_medians_equal_numpys_on_every_resample():
    documents = [f"d{i % 5}" for i in range(14)]
    values = np.random.default_rng(0).normal(size=14)
    bootstrap = ClusterBootstrap(documents, num_resamples=50)
    draws = bootstrap.median(values)
    assert draws[0] == np.median(values)
    for counts, median in zip(bootstrap._counts.astype(int), draws, strict=True):
        pool = np.repeat(values, [counts[int(document[1])] for document in documents])
        assert median == pytest.approx(np.median(pool))
    seeds = (
        ClusterBootstrap(documents, seeds="ab", num_resamples=50).median(
            np.stack([values, values + 1])
        )
        - draws
    )
    assert seeds[0] == pytest.approx(0.5)
    assert seeds.std() > 0.2
