"""Intervals and tests: a bootstrap over documents, strata and training seeds; shares; Holm."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Float
from scipy.stats import binomtest, norm

from kvcat.errors import InputError

LEVEL = 0.95
_Z = float(norm.ppf((1.0 + LEVEL) / 2.0))
# an exact test needs this many differing examples, all in favour of one model
_FEWEST_DIFFERING = math.ceil(1.0 - math.log2(1.0 - LEVEL))
_MEDIAN_CHUNKS = 10
Array = np.ndarray
Names = Sequence[str] | Array
Draws = Float[Array, " draws"]
"""A figure of the data, then of every resample; figures of one bootstrap subtract and divide."""


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval; the ends are NaN if a single document cannot give one."""

    value: float
    low: float = math.nan
    high: float = math.nan

    def excludes(self, value: float) -> bool:
        """Whether the interval lies wholly on one side of a value."""
        return bool(self.low > value or self.high < value)

    def union(self, other: "Estimate") -> "Estimate":
        """The figure with an interval that holds both intervals."""
        low = float(np.fmin(self.low, other.low))
        high = float(np.fmax(self.high, other.high))
        return Estimate(self.value, low, high)


NO_ESTIMATE = Estimate(math.nan)
"""The figure of an undefined value."""


class ClusterBootstrap:
    """Bootstrap over documents: resamples draw documents with replacement, with all their windows.

    Two models on the same windows share the resamples, so the interval of their difference is
    paired. With strata every resample draws as many documents of each stratum as there are.
    Strata with a single document are merged; a lone one joins the smallest other stratum. With
    S > 1 training seeds a resample draws seeds as well as documents: a seed drawn c times has the
    weight 1/S + sqrt(S / (S - 1)) (c/S - 1/S), so that the variance between seeds is unbiased.
    With fewer than about ten documents or five seeds intervals are too narrow.

    Args:
        documents: name of each window's document, in the order of the windows.
        strata: name of each window's stratum; None is one stratum of all.
        seeds: names of the training seeds; columns then have a row per seed. Empty: one run.
        num_resamples: equal documents, strata and seeds give equal resamples.

    Raises:
        InputError: a document in two strata.
        ValueError: not one stratum per window.

    References: Field and Welsh 2007, "Bootstrapping clustered data"; Davison and Hinkley 1997,
    section 3.2 (strata); Owen 2007, "The pigeonhole bootstrap" (seeds crossed with documents).
    """

    def __init__(
        self,
        documents: Names,
        *,
        strata: Sequence[str] | None = None,
        seeds: Sequence[str] = (),
        num_resamples: int = 10_000,
    ) -> None:
        names, self._document_of = np.unique(np.asarray(documents), return_inverse=True)
        self.num_documents = len(names)
        ranks = (0,) * self.num_documents
        if strata is not None:
            ranks = _stratum_ranks(documents, strata)
        self._counts = _resample_counts(ranks, num_resamples)  # (draws, documents)
        self._weights = _seed_weights(seeds, num_resamples)  # (draws, seeds)

    def of_means(
        self, function: Callable[..., Array], *columns: Float[Array, "*seeds windows"]
    ) -> Draws:
        """``function``, element by element, of the means of columns over windows and seeds."""
        windows_per_document = np.bincount(self._document_of)
        num_windows = self._counts @ windows_per_document  # (draws,)
        means = []
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            for column in columns:
                offset = column.flat[0]  # so that constant columns stay constant to the last bit
                rows = np.atleast_2d(column) - offset
                document_sums = [np.bincount(self._document_of, weights=row) for row in rows]
                sums = self._counts @ np.stack(document_sums, axis=1)  # (draws, seeds)
                seed_means = sums / num_windows[:, None]
                means.append((seed_means * self._weights).sum(axis=1) + offset)
            return np.asarray(function(*means), dtype=np.float64)

    def median(self, values: Float[Array, "*seeds windows"]) -> Draws:
        """Median over windows, the mean of the seeds' medians."""
        seed_medians = [self._median_of_seed(row) for row in np.atleast_2d(values)]
        return (np.stack(seed_medians, axis=1) * self._weights).sum(axis=1)

    def _median_of_seed(self, values: Float[Array, " windows"]) -> Draws:
        order = np.argsort(values, kind="stable")
        ascending = values[order]
        document_of = self._document_of[order]
        medians = []
        for counts in np.array_split(self._counts, _MEDIAN_CHUNKS):  # bounds the memory
            num_up_to = np.cumsum(counts[:, document_of], axis=1)  # (draws, windows)
            total = num_up_to[:, -1:]
            # the two middle windows, which are one where their number is odd
            lower = np.argmax(num_up_to > (total - 1) // 2, axis=1)
            upper = np.argmax(num_up_to > total // 2, axis=1)
            medians.append((ascending[lower] + ascending[upper]) / 2.0)
        return np.concatenate(medians)

    def estimate(self, draws: Draws) -> Estimate:
        """The figure with its interval; without one where there is a single document."""
        low, high = self._interval(draws)
        return Estimate(float(draws[0]), low, high)

    def _interval(self, draws: Draws) -> tuple[float, float]:
        """Ends of the interval.

        The kind of interval is chosen here alone. A kind that needs more figures than those of
        resamples, such as those without each document, gets them by further rows of ``_counts``.
        """
        if not self._has_interval(draws):
            return math.nan, math.nan
        return percentile_interval(draws[1:])

    def _has_interval(self, draws: Draws) -> bool:
        return self.num_documents > 1 and not bool(np.isnan(draws[1:]).any())

    def p_value(self, draws: Draws) -> float:
        """Two-sided bootstrap p of "the figure is 0": twice the smaller share of draws beyond 0.

        With B resamples it is at least 2 / (B + 1); NaN where there is no interval.
        """
        if not self._has_interval(draws):
            return math.nan
        num_not_above = int((draws[1:] <= 0).sum())
        num_not_below = int((draws[1:] >= 0).sum())
        return min(1.0, 2.0 * (min(num_not_above, num_not_below) + 1) / len(draws))

    def mean(self, values: Float[Array, "*seeds windows"]) -> Estimate:
        """Mean over windows, with its interval."""
        return self.estimate(self.of_means(np.asarray, values))


def percentile_interval(resampled: Float[Array, " resamples"]) -> tuple[float, float]:
    """The quantiles of the resampled figures between which ``LEVEL`` of them lie."""
    tails = [(1.0 - LEVEL) / 2.0, (1.0 + LEVEL) / 2.0]
    low, high = np.quantile(resampled, tails, method="inverted_cdf")
    return float(low), float(high)


def _stratum_ranks(documents: Names, strata: Sequence[str]) -> tuple[int, ...]:
    """Rank of the stratum of each document, in the order of the documents' names."""
    stratum_of: dict[str, str] = {}
    for document, stratum in zip(documents, strata, strict=True):
        first = stratum_of.setdefault(document, stratum)
        if first != stratum:
            raise InputError(
                f"document {str(document)!r} lies in two strata, {first!r} and {stratum!r}"
            )
    names = [stratum_of[document] for document in sorted(stratum_of)]
    ranks = np.unique(names, return_inverse=True)[1]
    sizes = np.bincount(ranks)
    alone = sizes[ranks] == 1
    if alone.sum() == 1 and len(ranks) > 1:
        sizes_of_others = np.where(sizes == 1, len(ranks), sizes)
        ranks[alone] = np.argmin(sizes_of_others)
    elif alone.any():
        ranks[alone] = len(sizes)
    return tuple(np.unique(ranks, return_inverse=True)[1].tolist())


@lru_cache(maxsize=16)
def _resample_counts(ranks: tuple[int, ...], num_resamples: int) -> Float[Array, "draws documents"]:
    """How often the data themselves and each resample hold each document."""
    stratum_of = np.array(ranks)
    counts = np.ones((1 + num_resamples, len(ranks)))
    for stratum in range(stratum_of.max() + 1):
        members = np.flatnonzero(stratum_of == stratum)
        seed = [0, len(members)]
        if stratum > 0:  # the first stratum has the seed of data without strata
            seed.append(stratum)
        generator = np.random.default_rng(seed)
        chances = np.full(len(members), 1.0 / len(members))
        counts[1:, members] = generator.multinomial(len(members), chances, size=num_resamples)
    counts.flags.writeable = False
    return counts


def _seed_weights(seeds: Sequence[str], num_resamples: int) -> Float[Array, "draws seeds"]:
    """Weight of each training seed; equal names give equal weights, so that models are paired."""
    num_seeds = max(1, len(seeds))
    weights = np.full((1 + num_resamples, num_seeds), 1.0 / num_seeds)
    if num_seeds > 1:
        generator = np.random.default_rng([0, num_seeds, *"\n".join(seeds).encode()])
        times_drawn = generator.multinomial(num_seeds, weights[0], size=num_resamples)
        spread = math.sqrt(num_seeds / (num_seeds - 1))
        weights[1:] += spread * (times_drawn - 1.0) / num_seeds
    return weights


def wilson(successes: float | int, num_trials: float | int) -> Estimate:
    """A proportion with Wilson's score interval, which has a width at 0 and at 100 % as well.

    All p with |p_hat - p| <= z sqrt(p (1 - p) / n), z the normal quantile. Successes may be
    fractional, where a trial is a document of several examples.

    References: Wilson 1927; Brown, Cai and DasGupta 2001, "Interval estimation for a binomial
    proportion".
    """
    rate = successes / num_trials
    square = _Z**2 / num_trials
    centre = (rate + square / 2.0) / (1.0 + square)
    half = math.sqrt(square * rate * (1.0 - rate) + square**2 / 4.0) / (1.0 + square)
    low = 0.0 if successes == 0 else min(centre - half, rate)  # rounding would leave 1e-18
    high = 1.0 if successes == num_trials else max(centre + half, rate)
    return Estimate(rate, low, high)


def share(scores: Float[Array, " examples"], documents: Names) -> Estimate:
    """Mean of scores between 0 and 1 with Wilson's interval at n = number of documents.

    Rather too wide than too narrow: no variable in [0, 1] with mean p varies more than p (1 - p),
    and examples of one document count as copies of one another.
    """
    num_documents = len(set(documents))
    return wilson(float(scores.mean()) * num_documents, num_documents)


def share_difference(
    first: Float[Array, " examples"], second: Float[Array, " examples"], documents: Names
) -> tuple[Estimate, float]:
    """Difference of two mean scores in [0, 1] with Agresti and Min's interval, and its p-value.

    The scores are of the same examples. Half a document is added to each of four outcomes: both
    right, neither, the first alone, the second alone. With d_i the difference of document i of n,
    scaled so that their mean is the difference, m = sum d / (n + 2) and
    s^2 = ((sum d^2 + 1) / (n + 2) - m^2) / (n + 2), the interval is m +/- z s and
    p = 2 Phi(-|m| / s). It is never of zero width.

    References: Agresti and Min 2005, "Simple improved confidence intervals for comparing matched
    proportions".
    """
    names, document_of = np.unique(np.asarray(documents), return_inverse=True)
    sums = np.bincount(document_of, weights=first - second)
    differences = sums * len(names) / len(first)
    total = len(names) + 2
    mean = differences.sum() / total
    mean_square = ((differences**2).sum() + 1.0) / total
    error = math.sqrt(mean_square - mean**2) / math.sqrt(total)
    value = float((first - second).mean())
    low = min(float(mean - _Z * error), value)
    high = max(float(mean + _Z * error), value)
    p_value = 2.0 * float(norm.cdf(-abs(mean) / error))
    return Estimate(value, low, high), p_value


def mcnemar(first: Float[Array, " examples"], second: Float[Array, " examples"]) -> float:
    """Exact two-sided p of "two models are right equally often".

    Only the examples count where just one model is right: of b + c such examples
    b ~ Binomial(b + c, 1/2), and p = min(1, 2 P(X <= min(b, c))). Values are 0 or 1. Examples
    count as independent: where documents hold several, trust ``share_difference`` (McNemar 1947).
    """
    only_first = int(np.sum(first > second))
    only_second = int(np.sum(first < second))
    if only_first + only_second == 0:
        return 1.0
    return float(binomtest(only_first, only_first + only_second).pvalue)


def small_sample_warning(
    first: Float[Array, " examples"], second: Float[Array, " examples"], documents: Names
) -> str:
    """A warning if the sample is too small to detect the observed difference; else empty.

    The smallest difference of n documents that a test at 5 % detects is about
    max(z sqrt(E d^2 / n), 6 max|d| / n), d the examples' differences: the normal half-width, and
    the six differing examples that an exact test needs. A true difference of this size is detected
    every other time.
    """
    differences = np.abs(first - second)
    num_documents = len(set(documents))
    if not differences.any():
        return f"the models agree on all {len(first)} examples"
    if num_documents < _FEWEST_DIFFERING:
        noun = "document" if num_documents == 1 else "documents"
        return f"{num_documents} {noun}: no difference can be detected at 95 %"
    half_width = _Z * math.sqrt(float((differences**2).mean()) / num_documents)
    exact = _FEWEST_DIFFERING * float(differences.max()) / num_documents
    smallest = max(half_width, exact)
    observed = abs(float((first - second).mean()))
    if observed >= smallest:
        return ""
    return (
        f"{num_documents} documents: differences under {100.0 * smallest:.1f} points cannot be "
        f"detected at 95 %, such as the observed {100.0 * observed:.1f}"
    )


def holm(p_values: Float[Array, " tests"]) -> Float[Array, " tests"]:
    """Holm's step-down correction, which keeps the family-wise error below the level.

    NaN stays NaN and does not count. p_(i) becomes max over j <= i of min(1, (m - j + 1) p_(j)),
    for the ordered p of m tests (Holm 1979).
    """
    num_tests = np.count_nonzero(~np.isnan(p_values))
    order = np.argsort(p_values, kind="stable")[:num_tests]  # NaN is last
    scaled = p_values[order] * np.arange(num_tests, 0, -1)
    corrected = np.full(len(p_values), np.nan)
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(scaled))
    return corrected
