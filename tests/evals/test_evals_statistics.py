import time

import numpy as np
import pytest

from kvcat.evals import ClusterBootstrap


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
