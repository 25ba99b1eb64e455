"""Figures with intervals: a bootstrap over documents, strata and training seeds; shares; tests; the metrics."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.stats import binomtest, norm

from kvcat.errors import InputError

LEVEL = 0.95
_Z = float(norm.ppf((1.0 + LEVEL) / 2.0))
_FEWEST = math.ceil(1.0 - math.log2(1.0 - LEVEL))  # differing examples that a one-sided split needs in an exact test
Array = np.ndarray
Names = Sequence[str] | Array
Draws = Float[Array, " draws"]
"""A figure, first on all windows, then on every resample; figures of one bootstrap subtract and divide."""


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval; the ends are NaN where one document alone cannot give an interval."""

    value: float
    low: float = math.nan
    high: float = math.nan

    def excludes(self, value: float) -> bool:
        """Whether the interval lies wholly on one side of a value."""
        return bool(self.low > value or self.high < value)

    def union(self, other: "Estimate") -> "Estimate":
        """The figure with an interval that holds both intervals."""
        return Estimate(self.value, float(np.fmin(self.low, other.low)), float(np.fmax(self.high, other.high)))


class ClusterBootstrap:
    """Percentile bootstrap over documents: a resample draws documents with replacement, each with all its windows.

    Two models on the same windows share the resamples, so the interval of their difference is a paired
    one. With strata every resample draws as many documents of each stratum as there are; documents alone
    in theirs form one together, and a single one joins the smallest other. With S > 1 training seeds a
    resample draws seeds as well as documents: one drawn c times has the weight
    1/S + sqrt(S / (S - 1)) (c/S - 1/S), so that the variance between seeds is unbiased. With fewer than
    about ten documents or five seeds intervals are too narrow.

    Args:
        documents: name of each window's document, in the order of the windows.
        strata: name of each window's stratum; None is one stratum of all.
        seeds: names of the training seeds; columns then have a row per seed. Empty: one training run.
        num_resamples: equal documents, strata and seeds give equal ones.

    Raises:
        ValueError: not one stratum per window, or a document in two strata.

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
        ranks = _stratum_ranks(documents, strata) if strata is not None else (0,) * self.num_documents
        self._counts = _resample_counts(ranks, num_resamples)
        self._weights = _seed_weights(seeds, num_resamples)

    def of_means(self, function: Callable[..., Array], *columns: Float[Array, "*seeds windows"]) -> Draws:
        """``function``, element by element, of the means of columns: a value per window, a row per training seed."""
        sizes = self._counts @ np.bincount(self._document_of)
        means = []
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            for column in columns:
                shift = column.flat[0]  # constant columns stay constant to the last bit
                sums = [np.bincount(self._document_of, row) for row in np.atleast_2d(column) - shift]
                per_seed = (self._counts @ np.stack(sums, 1)) / sizes[:, None]
                means.append((per_seed * self._weights).sum(1) + shift)
            return np.asarray(function(*means), dtype=np.float64)

    def median(self, values: Float[Array, "*seeds windows"]) -> Draws:
        """Median over windows, the mean of the seeds' medians."""
        medians = []
        for row in np.atleast_2d(values):
            order, draws = np.argsort(row, kind="stable"), []
            for counts in np.array_split(self._counts, 10):
                upto = np.cumsum(counts[:, self._document_of[order]], axis=1)
                total = upto[:, -1:]  # the two middle values coincide where their number is odd
                lower, upper = (np.argmax(upto > middle // 2, axis=1) for middle in (total - 1, total))
                draws.append((row[order][lower] + row[order][upper]) / 2.0)
            medians.append(np.concatenate(draws))
        return (np.stack(medians, 1) * self._weights).sum(1)

    def estimate(self, draws: Draws) -> Estimate:
        """The figure with its percentile interval; without one where there is a single document."""
        if self.num_documents == 1 or np.isnan(draws[1:]).any():
            return Estimate(float(draws[0]))
        low, high = np.quantile(draws[1:], [(1.0 - LEVEL) / 2.0, (1.0 + LEVEL) / 2.0], method="inverted_cdf")
        return Estimate(float(draws[0]), float(low), float(high))

    def p_value(self, draws: Draws) -> float:
        """Two-sided bootstrap p of "the figure is 0": twice the smaller share of resamples beyond 0.

        With B resamples it is at least 2 / (B + 1); NaN where there is no interval.
        """
        if self.num_documents == 1 or np.isnan(draws[1:]).any():
            return math.nan
        fewer = min(int((draws[1:] <= 0).sum()), int((draws[1:] >= 0).sum()))
        return min(1.0, 2.0 * (fewer + 1) / len(draws))

    def mean(self, values: Float[Array, "*seeds windows"]) -> Estimate:
        """Mean over windows, with its interval."""
        return self.estimate(self.of_means(np.asarray, values))


def _stratum_ranks(documents: Names, strata: Sequence[str]) -> tuple[int, ...]:
    """Rank of the stratum of each document, in the order of the documents' names."""
    stratum: dict[str, str] = {}
    for document, name in zip(documents, strata, strict=True):
        if stratum.setdefault(document, name) != name:
            raise InputError(f"document {str(document)!r} lies in two strata, {stratum[document]!r} and {name!r}")
    ranks = np.unique([stratum[document] for document in sorted(stratum)], return_inverse=True)[1]
    sizes = np.bincount(ranks)
    lonely = sizes[ranks] == 1
    if lonely.sum() == 1 and len(ranks) > 1:
        ranks[lonely] = np.argmin(np.where(sizes == 1, len(ranks), sizes))
    elif lonely.any():
        ranks[lonely] = len(sizes)
    return tuple(np.unique(ranks, return_inverse=True)[1].tolist())


@lru_cache(maxsize=16)
def _resample_counts(ranks: tuple[int, ...], num_resamples: int) -> Float[Array, "draws documents"]:
    """How often the data themselves and each resample hold each document."""
    stratum_of = np.array(ranks)
    counts = np.ones((1 + num_resamples, len(ranks)))
    for stratum in range(stratum_of.max() + 1):
        members = np.flatnonzero(stratum_of == stratum)
        # the first without its rank: what no strata give
        generator = np.random.default_rng([0, len(members), *([stratum] if stratum else [])])
        chances = np.full(len(members), 1.0 / len(members))
        counts[1:, members] = generator.multinomial(len(members), chances, size=num_resamples)
    counts.flags.writeable = False
    return counts


def _seed_weights(seeds: Sequence[str], num_resamples: int) -> Float[Array, "draws seeds"]:
    """Weight of each training seed; equal names give equal weights, so that models are paired."""
    count = max(1, len(seeds))
    weights = np.full((1 + num_resamples, count), 1.0 / count)
    if count > 1:
        generator = np.random.default_rng([0, count, *"\n".join(seeds).encode()])
        drawn = generator.multinomial(count, weights[0], size=num_resamples)
        weights[1:] += math.sqrt(count / (count - 1)) * (drawn - 1.0) / count
    return weights


def wilson(successes: float | int, num_trials: float | int) -> Estimate:
    """A proportion with Wilson's score interval, which has a width at 0 and at 100 % as well.

    All p with |p_hat - p| <= z sqrt(p (1 - p) / n), z the normal quantile. Successes may be fractional, where
    a trial is a document of several examples.

    References: Wilson 1927; Brown, Cai and DasGupta 2001, "Interval estimation for a binomial proportion".
    """
    rate, square = successes / num_trials, _Z**2 / num_trials
    centre = (rate + square / 2.0) / (1.0 + square)
    half = math.sqrt(square * rate * (1.0 - rate) + square**2 / 4.0) / (1.0 + square)
    low = 0.0 if successes == 0 else min(centre - half, rate)  # rounding would leave 1e-18
    high = 1.0 if successes == num_trials else max(centre + half, rate)
    return Estimate(rate, low, high)


def share(scores: Float[Array, " examples"], documents: Names) -> Estimate:
    """Mean of scores between 0 and 1 with Wilson's interval at n = number of documents.

    Rather too wide than too narrow: no variable in [0, 1] with mean p varies more than p (1 - p), and examples of
    one document count as copies of one another.
    """
    num_documents = len(set(documents))
    return wilson(float(scores.mean()) * num_documents, num_documents)


def share_difference(
    first: Float[Array, " examples"], second: Float[Array, " examples"], documents: Names
) -> tuple[Estimate, float]:
    """Difference of two mean scores in [0, 1] of the same examples, with Agresti and Min's interval and its p-value.

    Half a document is added to each of four outcomes: both right, neither, the first alone, the second
    alone. With d_i the difference of document i of n, scaled so that their mean is the difference,
    m = sum d / (n + 2) and s^2 = ((sum d^2 + 1) / (n + 2) - m^2) / (n + 2), the interval is m +/- z s
    and p = 2 Phi(-|m| / s). It is never of zero width.

    References: Agresti and Min 2005, "Simple improved confidence intervals for comparing matched proportions".
    """
    names, document_of = np.unique(np.asarray(documents), return_inverse=True)
    differences = np.bincount(document_of, first - second) * len(names) / len(first)
    total = len(names) + 2
    mean = differences.sum() / total
    error = math.sqrt(((differences**2).sum() + 1.0) / total - mean**2) / math.sqrt(total)
    value = float((first - second).mean())
    low, high = float(mean - _Z * error), float(mean + _Z * error)
    return Estimate(value, min(low, value), max(high, value)), 2.0 * float(norm.cdf(-abs(mean) / error))


def mcnemar(first: Float[Array, " examples"], second: Float[Array, " examples"]) -> float:
    """Exact two-sided p of "two models are right equally often", from the examples where just one is right.

    Of b + c such examples b ~ Binomial(b + c, 1/2); p = min(1, 2 P(X <= min(b, c))). Values are 0 or 1, and
    examples count as independent: where documents hold several, trust ``share_difference`` (McNemar 1947).
    """
    b, c = int(np.sum(first > second)), int(np.sum(first < second))
    return float(binomtest(b, b + c).pvalue) if b + c else 1.0


def cannot_tell(first: Float[Array, " examples"], second: Float[Array, " examples"], documents: Names) -> str:
    """One line on what a comparison of so few documents cannot tell; empty where it carries the difference found.

    The smallest difference of n documents that a test at 5 % tells from 0 is about
    max(z sqrt(E d^2 / n), 6 max|d| / n), d the examples' differences: the normal half-width, and the six
    differing examples that an exact test needs. A true difference of this size is found every other time.
    """
    differences, count = np.abs(first - second), len(set(documents))
    if not differences.any():
        return f"the models agree on all {len(first)} examples"
    if count < _FEWEST:
        return f"{count} document{'s'[: count - 1]}: no difference can be told at 95 %"
    width = _Z * math.sqrt(float((differences**2).mean()) / count)
    smallest = max(width, _FEWEST * float(differences.max()) / count)
    found = abs(float((first - second).mean()))
    points = [f"{100.0 * value:.1f}" for value in (smallest, found)]
    told = f"{count} documents: differences under {points[0]} points cannot be told at 95 %, {points[1]} among them"
    return told if found < smallest else ""


def holm(p_values: Float[Array, " tests"]) -> Float[Array, " tests"]:
    """Holm's step-down correction: the family-wise error stays below the level; NaN stays NaN and does not count.

    p_(i) becomes max over j <= i of min(1, (m - j + 1) p_(j)), for the ordered p of m tests (Holm 1979).
    """
    corrected = np.full(len(p_values), np.nan)
    order = np.argsort(p_values, kind="stable")[: np.count_nonzero(~np.isnan(p_values))]  # NaN is last
    scaled = p_values[order] * np.arange(len(order), 0, -1)
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(scaled))
    return corrected


@dataclass(frozen=True)
class Metric:
    """A figure over examples."""

    label: str  # column head
    description: str  # one line for a reader
    lower_is_better: bool = True
    unit: str = "nats/token"  # empty for a share
    percent: bool = False  # shown in percent
    share: bool = False  # mean of a per-example score between 0 and 1, with the intervals of ``share``
    ratio: bool = False  # the ratio of two models means something, because 0 is nothing lost
    columns: tuple[str, ...] = ()  # per-example values that it is made of; empty: the one of its name
    function: Callable[..., Any] | None = np.asarray  # of the columns' means; None: the one column's median


_score = partial(Metric, lower_is_better=False, unit="", percent=True, share=True)
METRICS = {
    "delta_ppl": Metric(
        "delta PPL", "Mean over windows of exp(NLL compact) - exp(NLL dense); the paper's figure, heavy-tailed.",
        unit="perplexity", ratio=True,
    ),
    "delta_ppl_median": Metric(
        "median delta PPL", "Median over windows of exp(NLL compact) - exp(NLL dense).",
        unit="perplexity", columns=("delta_ppl",), function=None,
    ),
    "delta_ppl_corpus": Metric(
        "corpus delta PPL", "exp(mean NLL compact) - exp(mean NLL dense): all suffixes as one corpus.",
        unit="perplexity", columns=("nll", "nll_dense"), function=lambda nll, dense: np.exp(nll) - np.exp(dense),
    ),
    "kl": Metric("KL", "KL(dense || compact) of the next-token distributions of the suffix.", ratio=True),
    "top1": Metric(
        "top-1", "Share of suffix positions whose most likely token is the same with the dense and the compact cache.",
        lower_is_better=False, unit="", percent=True,
    ),
    "nll": Metric(
        "NLL compact", "Negative log-likelihood of the real suffix, or of the right answer, on the compact cache.",
    ),
    "delta_nll": Metric("delta NLL", "NLL on the compact cache minus dense NLL.", ratio=True),
    "nll_dense": Metric("NLL dense", "Negative log-likelihood with the whole cache: the price paid in training."),
    "context_gain": Metric(
        "context gain", "NLL without the prefix minus dense NLL, of suffix tokens 2 onwards: the use of the prefix.",
        lower_is_better=False,
    ),
    "retention": Metric(
        "retention", "1 - delta NLL / context gain, of sums; not given where that gain is not clearly above 0.",
        False, "", percent=True, columns=("lost", "gained"), function=lambda lost, gained: 1.0 - lost / gained,
    ),
    "exact_match": _score("exact match", "Share of examples whose greedy answer on the compact cache is right."),
    "native_exact_match": _score(
        "exact match, native", "The same of the examples that the model answers rightly with its whole cache, as in "
        "the paper. It rewards a model that is right on few.",
        columns=("native_match", "dense_exact_match"), function=np.divide,
    ),
    "dense_exact_match": _score("exact match, dense", "Share of examples answered rightly with the whole cache."),
    "correct_prefix": _score("digits", "Share of the passkey's digits before the first wrong one."),
    "string_match": _score("string match", "Share of the right answers that the greedy answer contains, as in RULER."),
    "dense_string_match": _score("string match, dense", "The same with the whole cache."),
    "accuracy": _score("accuracy", "Share of questions whose right answer has the highest log-likelihood."),
    "dense_accuracy": _score("accuracy, dense", "The same with the whole cache."),
    "nll_choice": Metric(
        "NLL of the choice", "Minus the log of the right answer's probability among the four; 1.386 is guessing.",
        unit="nats",
    ),
    "acc_per_char": _score("accuracy", "Share of right answers with the highest log-likelihood per character."),
    "acc": _score("accuracy, raw", "The same by the total log-likelihood."),
    "nll_per_char": Metric(
        "NLL per character", "Negative log-likelihood of the right answer.", unit="nats/character"
    ),
}  # fmt: skip
"""Every figure by its name in summaries and CSV files."""


@dataclass(frozen=True)
class Evaluation:
    """What a report shows of an evaluation."""

    title: str
    example: str  # what one example is called
    stratum: str  # what a stratum is called
    metrics: tuple[str, ...]  # of the tables: the one that decides, what a user gets, the price, more
    steps: tuple[int, ...] = ()  # gradient steps that are reported besides the last one

    @property
    def deciding(self) -> str:
        """The metric that decides where no other is named."""
        return self.metrics[0]


EVALUATIONS = {
    "suffix": Evaluation(
        "Text after a compressed prefix", "window", "stratum",
        ("kl", "nll", "nll_dense", "context_gain", "delta_nll", "delta_ppl", "top1", "retention"),
    ),
    "needle": Evaluation(
        "Needle in a haystack", "example", "depth",
        ("exact_match", "nll", "dense_exact_match", "nll_dense", "native_exact_match", "correct_prefix"),
    ),
    "ruler": Evaluation(
        "RULER", "example", "task", ("string_match", "nll", "dense_string_match", "nll_dense", "exact_match")
    ),
    "longbench": Evaluation(
        "LongBench v2", "question", "sub-domain", ("accuracy", "nll_choice", "dense_accuracy"), steps=(20, 100)
    ),
    "qa": Evaluation(
        "Multiple choice without compression", "question", "task", ("acc_per_char", "nll_per_char", "acc")
    ),
}  # fmt: skip
"""Every evaluation by its name in configurations."""
