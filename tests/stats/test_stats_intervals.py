import itertools
import math

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from kvcat.evals import ClusterBootstrap
from kvcat.stats.intervals import coverage_of_mean, seeds_p_value
from kvcat.stats.shares import share, share_difference, wilson
from kvcat.stats.significance import (
    holm,
    sign_flip_p_value,
    small_sample_warning,
    swap_p_value,
)


def names(count, each=1):
    return [f"d{i // each:03}" for i in range(count)]


def test_resamples_of_two_documents_are_the_three_possible_means_in_proportion_one_two_one():
    bootstrap = ClusterBootstrap(["a", "b", "b"], num_resamples=40_000)
    draws = bootstrap.of_means(lambda mean: mean, np.array([0.0, 3.0, 6.0]))
    assert draws.value == 3.0
    values, counts = np.unique(np.round(draws.values[1:], 9), return_counts=True)
    assert values.tolist() == [0.0, 3.0, 4.5]
    np.testing.assert_allclose(counts / 40_000, [0.25, 0.5, 0.25], atol=0.01)


@pytest.mark.parametrize("noise", [0.0, 1e-9, 1e-5])
def test_five_equal_documents_and_one_other_have_an_interval_up_to_the_other_one(noise):
    """A third of the resamples lack the other document: their mean is a standard error away, and
    their own standard error, which is 0 or nearly so, counts as a fifth of that of the data.

    In the others, k > 0 of 6 draws are the other document, and the pivot is (k - 1) sqrt(5) /
    sqrt(k (6 - k)): from 0 to 1.49 in 99 % of them, less than Student's 2.57.
    """
    for scale in (1.0, 1.0 / 128, -1e-4):
        values = 0.5 + scale * np.array([0.0, noise, -noise, 1.0, 0.0, 0.0])
        estimate = ClusterBootstrap(names(6)).mean(values)
        half = scipy.stats.t.ppf(0.975, 5) * abs(scale) / 6
        near, far = 0.5 + scale / 6 - math.copysign(half, scale), 0.5 + scale
        assert estimate.low == pytest.approx(min(near, far), abs=abs(scale) * (1e-7 + 9 * noise))
        assert estimate.high == pytest.approx(max(near, far), abs=abs(scale) * (1e-7 + 9 * noise))


def test_the_ratio_of_models_that_differ_on_few_documents_has_a_bounded_interval_that_covers():
    generator = np.random.default_rng(0)
    trials = 300
    covered = 0
    for _ in range(trials):
        first = generator.lognormal(sigma=0.5, size=20)
        differs = generator.random(20) < 0.2
        factor = 1.0 + 1e-7 * generator.normal(size=20) + 0.1 * differs
        bootstrap = ClusterBootstrap(names(20), num_resamples=999)
        means = [bootstrap.of_means(np.asarray, values) for values in (first * factor, first)]
        estimate = bootstrap.estimate(means[0] / means[1])
        covered += not estimate.excludes(1.02)
        assert 0.9 < estimate.low <= estimate.high < 1.2
    assert covered / trials >= 0.93


def test_the_interval_of_a_mean_is_the_bootstrap_t_of_plain_resamples():
    values = np.random.default_rng(1).lognormal(size=9)
    estimate = ClusterBootstrap(names(9), num_resamples=20_000).mean(values)
    resamples = np.random.default_rng(2).choice(values, size=(20_000, 9))
    errors = resamples.std(axis=1, ddof=1) / 3.0
    pivots = (resamples.mean(axis=1) - values.mean()) / errors
    lower, upper = np.quantile(pivots, [0.025, 0.975])
    error = scipy.stats.sem(values)
    expected = (values.mean() - error * upper, values.mean() - error * lower)
    assert estimate.high == pytest.approx(expected[1], rel=0.05)  # the long side
    assert estimate.low <= expected[0]
    half = scipy.stats.t.ppf(0.975, 8) * error
    assert estimate.low == pytest.approx(min(expected[0], values.mean() - half), rel=0.01)


def test_few_documents_have_students_interval():
    values = np.array([0.2, 0.5, 1.1, 0.7])
    estimate = ClusterBootstrap(names(4)).mean(values)
    expected = scipy.stats.t.interval(0.95, 3, values.mean(), scipy.stats.sem(values))
    assert (estimate.low, estimate.high) == pytest.approx(expected)


def test_intervals_of_twelve_skewed_documents_cover_what_they_say():
    generator = np.random.default_rng(0)
    covered = {"mean": 0, "ratio": 0, "difference": 0}
    trials = 500
    for _ in range(trials):
        first = generator.exponential(size=12)
        second = 0.8 * first + 0.2 * generator.exponential(size=12)
        bootstrap = ClusterBootstrap(names(12), num_resamples=999)
        mean = bootstrap.of_means(np.asarray, first)
        other = bootstrap.of_means(np.asarray, second)
        for name, draws, truth in (
            ("mean", mean, 1.0),
            ("ratio", mean / other, 1.0),
            ("difference", mean - other, 0.0),
        ):
            estimate = bootstrap.estimate(draws)
            covered[name] += estimate.low <= truth <= estimate.high
    shares = {name: count / trials for name, count in covered.items()}
    assert min(shares.values()) >= 0.93, shares  # the percentile interval covers .86 to .90


@pytest.mark.slow
@pytest.mark.parametrize(("number", "spread"), [(4, 1.0), (8, 1.5), (10, 1.0), (30, 1.0)])
def test_the_printed_coverage_of_log_normal_means_is_the_simulated_one(number, spread):
    generator = np.random.default_rng(0)
    trials = 600
    covered = 0
    printed = []
    for _ in range(trials):
        values = generator.lognormal(0.0, spread, size=number)
        estimate = ClusterBootstrap(names(number), num_resamples=999).mean(values)
        covered += not estimate.excludes(np.exp(spread**2 / 2))
        printed.append(coverage_of_mean(values, names(number)))
    assert np.mean(printed) == pytest.approx(100 * covered / trials, abs=3.0)


def test_the_coverage_of_a_mean_reads_the_spread_of_documents_not_of_windows():
    spread_one = np.exp([1.0, -1.0] * 5)  # standard deviation of the logarithms: 1.054
    assert coverage_of_mean(spread_one, names(10)) == 91
    assert coverage_of_mean(np.ones(10), names(10)) == 95
    assert coverage_of_mean(spread_one, names(10, each=2)) == 92  # equal documents, five of them


def test_windows_of_one_document_are_resampled_together():
    copies = np.repeat([0.0, 1.0, 2.0, 5.0], 32)  # a power of two: rounding is the same
    clustered = ClusterBootstrap(np.repeat(["a", "b", "c", "d"], 32).tolist()).mean(copies)
    alone = np.array([0.0, 1.0, 2.0, 5.0])
    assert clustered == ClusterBootstrap(["a", "b", "c", "d"]).mean(alone)
    assert clustered == ClusterBootstrap(["a", "b", "c", "d"], strata=["all"] * 4).mean(alone)
    constant = ClusterBootstrap(names(20, 3)).mean(np.full(20, 0.1))
    assert constant.value == constant.low == constant.high == 0.1


def test_one_document_gives_a_figure_without_an_interval():
    bootstrap = ClusterBootstrap(["a", "a"], strata=["x", "x"])
    estimate = bootstrap.mean(np.array([1.0, 2.0]))
    assert estimate.value == 1.5
    assert np.isnan([estimate.low, estimate.high]).all()
    assert not estimate.excludes(0.0)


def test_an_infinite_resample_counts_as_the_largest_and_an_infinite_figure_has_no_interval():
    first = np.arange(1.0, 7.0)
    often = ClusterBootstrap(names(6))
    for number, size in ((0, 1.0), (5, 0.1), (0, 0.1)):  # the sums of the last leave no exact 0
        second = size * np.eye(6)[number]
        ratio = often.of_means(np.asarray, first) / often.of_means(np.asarray, second)
        assert np.isinf(ratio.values).mean() == pytest.approx((5 / 6) ** 6, abs=0.02)
        estimate = often.estimate(ratio)
        assert estimate.low == -np.inf  # a third of the resamples lie above every figure
        assert estimate.high > ratio.value
    infinite = often.of_means(np.asarray, first) / often.of_means(np.asarray, np.zeros(6))
    assert np.isnan(often.estimate(infinite).low)
    for place in (0, 3):  # whichever example is infinite, so is the mean
        mean = often.mean(np.where(np.arange(6) == place, np.inf, first))
        assert (mean.value, np.isnan(mean.low)) == (np.inf, True)


def test_the_standard_errors_of_a_ratio_and_a_difference_are_those_of_the_delta_method():
    generator = np.random.default_rng(4)
    documents = [f"d{index % 10}" for index in range(34)]  # three or four windows each
    first, second = generator.exponential(size=(2, 34)) + 0.5
    bootstrap = ClusterBootstrap(documents, num_resamples=200)
    numerator = bootstrap.of_means(np.asarray, first)
    denominator = bootstrap.of_means(np.asarray, second)
    by_document = pd.DataFrame({"first": first, "second": second}).groupby(documents).sum()
    ratio = first.mean() / second.mean()
    moves = (by_document["first"] - ratio * by_document["second"]) / second.mean()
    expected = np.sqrt(10 / 9 * (moves**2).sum()) / 34
    for draws in (numerator / denominator, bootstrap.of_means(np.divide, first, second)):
        assert draws.value == pytest.approx(ratio)
        assert bootstrap._standard_errors(draws, draws.means)[0] == pytest.approx(expected)
    difference = bootstrap.of_means(np.subtract, first, second)
    composed = numerator - denominator
    np.testing.assert_allclose(
        bootstrap._standard_errors(difference, difference.means),
        bootstrap._standard_errors(composed, composed.means),
        rtol=1e-6,
    )


def test_training_seeds_alone_have_students_interval_and_add_to_the_documents_in_quadrature():
    seeds = np.array([1.0, 1.5, 0.2])
    expected = scipy.stats.t.interval(0.95, 2, seeds.mean(), scipy.stats.sem(seeds))
    constant = ClusterBootstrap(names(8), seeds=["0", "1", "2"])
    alone = constant.mean(np.repeat(seeds[:, None], 8, axis=1))
    assert (alone.low, alone.high) == pytest.approx(expected)
    documents = np.random.default_rng(3).normal(size=8)
    of_documents = ClusterBootstrap(names(8)).mean(documents + seeds.mean())
    both = constant.mean(documents + seeds[:, None])
    below = np.hypot(alone.value - alone.low, of_documents.value - of_documents.low)
    above = np.hypot(alone.high - alone.value, of_documents.high - of_documents.value)
    assert (both.low, both.high) == pytest.approx((both.value - below, both.value + above))


def test_models_of_the_same_seeds_are_paired_and_models_of_other_seeds_are_not():
    values = np.array([[1.0], [1.5], [0.2]]) + np.zeros(8)

    def half_width(first_seeds, second_seeds):
        draws = [
            ClusterBootstrap(names(8), seeds=seeds).of_means(np.asarray, values)
            for seeds in (first_seeds, second_seeds)
        ]
        estimate = ClusterBootstrap(names(8)).estimate(draws[0] - draws[1])
        return estimate.high - estimate.value

    error = scipy.stats.sem(values[:, 0])
    one_model = ClusterBootstrap(names(8), seeds="abc").of_means(np.asarray, values)
    expected = scipy.stats.ttest_1samp(values[:, 0], 0.0).pvalue
    assert seeds_p_value(one_model) == pytest.approx(expected)
    assert half_width("abc", "abc") == 0.0
    assert half_width("abc", "xyz") == pytest.approx(2**0.5 * 4.302653 * error)


def test_a_swap_p_value_equals_scipys_permutation_test():
    first, second = np.random.default_rng(6).normal(size=(2, 9)) + np.array([[0.6], [0.0]])
    theirs = scipy.stats.permutation_test(
        (first, second),
        lambda x, y, axis: x.mean(axis) - y.mean(axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=np.inf,
    )
    assert swap_p_value(np.asarray, [first], [second], names(9)) == pytest.approx(theirs.pvalue)
    drawn = swap_p_value(np.asarray, [first], [second], names(9), num_swaps=500)
    assert drawn == pytest.approx(theirs.pvalue, abs=0.06)


def test_an_exchange_that_divides_by_0_is_one_of_all_exchanges():
    losses = np.full(10, 1.0), np.full(10, 50.0)
    gains = np.array([2] * 5 + [-1] * 5), np.array([1] * 5 + [0] * 5)  # 0 if 5 are exchanged
    sizes = []
    for swapped in itertools.product([False, True], repeat=10):
        sums = [
            np.where(swapped, *pair[::way]).sum() for pair in (losses, gains) for way in (1, -1)
        ]
        ratios = [
            math.inf if gain == 0 else loss / gain
            for loss, gain in zip(sums[:2], sums[2:], strict=True)
        ]
        sizes.append(abs(ratios[0] - ratios[1]))
    expected = np.mean(np.array(sizes) >= sizes[0] - 1e-9)
    assert math.inf in sizes
    assert expected < 0.6
    for scale in (1.0, 0.1):  # whose sums leave no exact 0
        first, second = ([losses[place], scale * gains[place]] for place in (0, 1))
        assert swap_p_value(np.divide, first, second, names(10)) == expected


def test_documents_are_swapped_whole_and_all_in_favour_of_one_model_is_the_smallest_p():
    first = np.arange(24.0)
    assert swap_p_value(np.asarray, [first], [first + 1.0], names(24, 4)) == 2 / 2**6
    assert swap_p_value(np.asarray, [first], [first], names(24, 4)) == 1.0
    assert swap_p_value(None, [first], [first + 9.0], names(24)) < 0.05


def test_models_that_are_alike_get_p_below_a_twentieth_in_a_twentieth_of_all_trials():
    generator = np.random.default_rng(7)
    trials = [
        swap_p_value(np.asarray, [first], [second], names(12)) <= 0.05
        for first, second in generator.exponential(size=(400, 2, 12))
    ]
    assert 0.02 <= np.mean(trials) <= 0.08


def test_strata_are_resampled_to_their_size_and_a_mean_has_the_textbook_standard_error():
    generator = np.random.default_rng(5)
    values = np.concatenate([generator.normal(0.0, 1.0, 60), generator.normal(10.0, 2.0, 140)])
    bootstrap = ClusterBootstrap(names(200), strata=["a"] * 60 + ["b"] * 140)
    assert [
        set(bootstrap._counts[stratum].sum(0)) for stratum in (slice(0, 60), slice(60, 200))
    ] == [
        {60.0},
        {140.0},
    ]
    variance = sum(
        stratum.var() / len(stratum) * (len(stratum) / 200) ** 2
        for stratum in (values[:60], values[60:])
    )
    assert bootstrap.of_means(lambda mean: mean, values).values[1:].std() == pytest.approx(
        variance**0.5, rel=0.03
    )


@pytest.mark.parametrize(
    ("strata", "bounds"), [("aaabbxyz", (3, 5, 8)), ("aaabbx", (3, 6)), ("abcdefgh", (8,))]
)
def test_documents_alone_in_their_stratum_share_one_or_join_the_smallest(strata, bounds):
    counts = ClusterBootstrap(names(len(strata)), strata=list(strata), num_resamples=50)._counts
    for start, stop in itertools.pairwise((0, *bounds)):
        assert set(counts[start:stop].sum(axis=0)) == {float(stop - start)}
        assert counts[stop - 1, 1:].std() > 0.0


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
    difference = share_difference(first, second, names(10))
    mean = 4 / 12  # b = 4, c = 0, half added to each of four outcomes: b + c + 1 = 5 of n + 2 = 12
    error = (5 / 12 - mean**2) ** 0.5 / 12**0.5
    assert difference.value == pytest.approx(0.4)
    assert (difference.low, difference.high) == pytest.approx(
        (mean - 1.959964 * error, mean + 1.959964 * error)
    )


def test_a_document_is_one_answer_if_all_scores_differ_by_the_same_whatever_rounding_leaves():
    for first, second in [(1.0, 0.4), (0.3, 0.1), (1 / 3, 0.0)]:
        clustered, alone = (
            share_difference(np.full(count, first), np.full(count, second), names(count, each))
            for count, each in [(24, 6), (4, 1)]
        )
        assert (clustered.low, clustered.high) == pytest.approx((alone.low, alone.high))


SIZES = {
    "unequal": [1] * 4 + [4] * 4 + [12] * 4,
    "twelve of 12": [12] * 12,
    "thirty of 4": [4] * 30,
}


def clustered(generator, sizes, rate, correlation):
    """Right answers that are alike in a document: beta-binomial."""
    spread = (1 - correlation) / correlation
    rates = generator.beta(rate * spread, (1 - rate) * spread, size=len(sizes))
    return (generator.random(sum(sizes)) < np.repeat(rates, sizes)).astype(float)


@pytest.mark.slow_after(6)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("rate", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("correlation", [0.01, 0.1, 0.3])
def test_a_share_of_clustered_answers_covers_what_it_says(sizes, rate, correlation):
    generator = np.random.default_rng(0)
    documents = np.repeat(names(len(sizes)), sizes)
    estimates = [
        share(clustered(generator, sizes, rate, correlation), documents) for _ in range(800)
    ]
    covered = np.mean([not estimate.excludes(rate) for estimate in estimates])
    assert 0.89 <= covered <= 0.98  # Wilson's for the number of documents: .98 to 1


def test_a_share_is_wilsons_where_answers_are_independent_or_copies():
    generator = np.random.default_rng(0)
    single = clustered(generator, [1] * 40, 0.7, 0.1)
    assert share(single, names(40)) == wilson(single.sum(), 40)
    for value in (0.0, 1.0):  # no spread to estimate the correlation from
        assert share(np.full(48, value), names(48, each=4)) == wilson(12 * value, 12)
    assert share(np.array([1.0, 0.0, 1.0]), ["a"] * 3) == wilson(2 / 3, 1)
    # copies of 40 answers: Student's t for the normal quantile is the only difference
    copies = share(np.repeat(single, 5), names(200, each=5))
    alone = share(single, names(40))
    assert copies.low == pytest.approx(alone.low, abs=0.01)
    assert copies.high == pytest.approx(alone.high, abs=0.01)


def test_sixty_one_of_sixty_eight_answers_in_twelve_documents():
    right_of_document = [1, 1, 1, 1, 4, 4, 4, 4, 12, 10, 10, 9]
    right = np.concatenate(
        [np.arange(n) < r for n, r in zip(SIZES["unequal"], right_of_document, strict=True)]
    ).astype(float)
    documents = np.repeat(names(12), SIZES["unequal"])
    estimate = share(right, documents)
    assert (estimate.low, estimate.high) == pytest.approx((0.79, 0.95), abs=0.005)
    # by hand: sums minus p n_d, their squares over those of independent answers, Student's t
    p = 61 / 68
    squares = 4 * (1 - p) ** 2 + 4 * (4 - 4 * p) ** 2
    squares += sum((r - 12 * p) ** 2 for r in (12, 10, 10, 9))
    effect = 12 / 11 * squares / (68 * p * (1 - p))
    degrees = (68**2 / 644 - 1) * effect / (effect - 1)
    quantile = scipy.stats.t.ppf(0.975, degrees)
    for end in (estimate.low, estimate.high):
        assert abs(p - end) == pytest.approx(quantile * (effect * end * (1 - end) / 68) ** 0.5)


@pytest.mark.parametrize(
    ("b", "c", "both"), [(0, 0, 3), (0, 4, 0), (1, 4, 7), (3, 3, 0), (2, 5, 1)]
)
def test_sign_flips_of_documents_with_one_question_are_mcnemars_exact_test(b, c, both):
    first = np.array([1.0] * both + [1.0] * b + [0.0] * c)
    second = np.array([1.0] * both + [0.0] * b + [1.0] * c)
    theirs = scipy.stats.binomtest(b, b + c).pvalue if b + c else 1.0
    assert sign_flip_p_value(first, second, names(both + b + c)) == pytest.approx(theirs)


def test_sign_flips_are_the_enumeration_of_all_exchanges_of_documents():
    generator = np.random.default_rng(3)
    first, second = (clustered(generator, SIZES["unequal"], rate, 0.3) for rate in (0.5, 0.8))
    documents = np.repeat(names(12), SIZES["unequal"])
    expected = swap_p_value(np.asarray, [first], [second], documents)  # all 4,096
    assert sign_flip_p_value(first, second, documents) == pytest.approx(expected)


@pytest.mark.parametrize("correlation", [0.1, 0.3, 0.6])
def test_a_paired_test_of_clustered_answers_keeps_its_level_where_mcnemars_does_not(correlation):
    generator = np.random.default_rng(1)
    sizes = SIZES["twelve of 12"]
    documents = np.repeat(names(12), sizes)
    false_alarms = np.zeros(2)
    trials = 300
    for _ in range(trials):
        first, second = (clustered(generator, sizes, 0.5, correlation) for _ in range(2))
        one_right = first != second
        of_examples = scipy.stats.binomtest(int((first > second).sum()), int(one_right.sum()))
        p_values = sign_flip_p_value(first, second, documents), of_examples.pvalue
        false_alarms += np.array(p_values) <= 0.05
    assert false_alarms[0] / trials <= 0.07
    assert false_alarms[1] / trials >= 0.1
    difference = share_difference(first, second, documents)
    assert difference.low <= difference.value <= difference.high


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
    assert draws.value == np.median(values)
    for counts, median in zip(bootstrap._counts.T.astype(int), draws.values, strict=True):
        pool = np.repeat(values, [counts[int(document[1])] for document in documents])
        assert median == pytest.approx(np.median(pool))
    two_runs = ClusterBootstrap(documents, seeds="ab", num_resamples=50)
    shifted = two_runs.median(np.stack([values, values + 1]))
    assert shifted.value == pytest.approx(draws.value + 0.5)
    assert shifted.seed_deviations[("a", "b")].tolist() == pytest.approx([-0.5, 0.5])
