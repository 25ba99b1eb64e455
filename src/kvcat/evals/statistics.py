"""Figures with intervals: a bootstrap that respects documents and strata, proportions, and paired binary outcomes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from jaxtyping import Float, Int

Array = np.ndarray


@dataclass(frozen=True)
class Estimate:
    """A figure with its interval; the ends are NaN where one document alone cannot give an interval.

    Args:
        value: the figure on all windows.
        low: lower end.
        high: upper end.
    """

    value: float
    low: float
    high: float

    def excludes(self, value: float) -> bool:
        """Whether the interval lies wholly on one side of a value."""
        return bool(self.low > value or self.high < value)


@dataclass(frozen=True)
class Draws:
    """A figure on all windows and on every resample; figures of one bootstrap may be subtracted and divided."""

    value: float
    resampled: Float[Array, " resamples"]

    def __sub__(self, other: "Draws") -> "Draws":
        return Draws(self.value - other.value, self.resampled - other.resampled)

    def __truediv__(self, other: "Draws") -> "Draws":
        with np.errstate(divide="ignore", invalid="ignore"):
            return Draws(float(np.divide(self.value, other.value)), self.resampled / other.resampled)


class ClusterBootstrap:
    """Percentile bootstrap over documents: a resample draws documents with replacement, each with all its windows.

    Windows of one document resemble each other; resampling them one by one would give intervals that are too narrow.
    Two models on the same windows share the resamples, so the interval of their difference is a paired one. With fewer
    than about ten documents percentile intervals are too narrow, whatever the number of resamples.

    With strata every resample draws as many documents of each stratum as there are. A stratum of one document could
    not vary, which would make the interval too narrow: such documents form one stratum together, and a single one
    joins the smallest other stratum.

    Args:
        documents: name of each window's document, in the order of the windows.
        strata: name of each window's stratum; None is one stratum of all.
        num_resamples: resamples, at least 1.
        level: coverage of the intervals, in (0, 1).
        seed: of the resampling; equal documents, strata and seeds give equal resamples.

    Raises:
        ValueError: no window; not one stratum per window; a document in two strata.

    References: Field and Welsh 2007, "Bootstrapping clustered data"; Davison and Hinkley 1997, section 3.2 (strata).
    """

    def __init__(
        self,
        documents: Sequence[str],
        *,
        strata: Sequence[str] | None = None,
        num_resamples: int = 10_000,
        level: float = 0.95,
        seed: int = 0,
    ) -> None:
        if not documents:
            raise ValueError("no window to resample")
        names, self._document_of = np.unique(np.asarray(documents), return_inverse=True)
        self.num_windows = len(documents)
        self.num_documents = len(names)
        self._tail = (1.0 - level) / 2.0
        stratum_of = _stratum_of_documents(documents, strata, self._document_of)
        self._counts = _resample_counts(tuple(stratum_of), num_resamples, seed)

    def of_means(self, function: Callable[..., Array], *columns: Float[Array, " windows"]) -> Draws:
        """``function`` of the columns' means, on all windows and on every resample.

        Args:
            function: takes one array per column and works element by element.
            columns: one value per window each.
        """
        sizes = np.bincount(self._document_of, minlength=self.num_documents)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            shifts = [column[0] for column in columns]  # constant columns stay constant to the last bit
            shifted = [column - shift for column, shift in zip(columns, shifts, strict=True)]
            sums = np.stack([np.bincount(self._document_of, s, minlength=self.num_documents) for s in shifted])
            means = (self._counts @ sums.T) / (self._counts @ sizes)[:, None] + np.array(shifts)
            value = function(*(np.asarray(s.mean() + shift) for s, shift in zip(shifted, shifts, strict=True)))
            return Draws(float(value), np.asarray(function(*means.T), dtype=np.float64))

    def median_draws(self, values: Float[Array, " windows"]) -> Draws:
        """Median over windows, on all windows and on every resample."""
        order = np.argsort(values, kind="stable")
        ordered, documents = values[order], self._document_of[order]
        parts = [_medians(ordered, counts[:, documents]) for counts in np.array_split(self._counts, 10)]
        return Draws(float(np.median(values)), np.concatenate(parts))

    def estimate(self, draws: Draws) -> Estimate:
        """The figure with its percentile interval; without one where there is a single document."""
        if self.num_documents == 1 or np.isnan(draws.resampled).any():
            return Estimate(draws.value, float("nan"), float("nan"))
        low, high = np.quantile(draws.resampled, [self._tail, 1.0 - self._tail], method="inverted_cdf")
        return Estimate(draws.value, float(low), float(high))

    def mean(self, values: Float[Array, " windows"]) -> Estimate:
        """Mean over windows."""
        return self.estimate(self.of_means(lambda mean: mean, values))

    def median(self, values: Float[Array, " windows"]) -> Estimate:
        """Median over windows."""
        return self.estimate(self.median_draws(values))

    def ratio(self, numerator: Float[Array, " windows"], denominator: Float[Array, " windows"]) -> Estimate:
        """Ratio of sums: sum(numerator) / sum(denominator)."""
        return self.estimate(self.of_means(np.divide, numerator, denominator))


def _stratum_of_documents(
    documents: Sequence[str], strata: Sequence[str] | None, document_of: Int[Array, " windows"]
) -> list[int]:
    """Rank of each document's stratum, strata of one document pooled."""
    num_documents = int(document_of.max()) + 1
    if strata is None:
        return [0] * num_documents
    if len(strata) != len(documents):
        raise ValueError(f"{len(documents)} windows but {len(strata)} strata")
    stratum: dict[str, str] = {}
    for document, name in zip(documents, strata, strict=True):
        if stratum.setdefault(document, name) != name:
            raise ValueError(f"document {document!r} lies in two strata, {stratum[document]!r} and {name!r}")
    ranks = np.unique([stratum[document] for document in sorted(stratum)], return_inverse=True)[1]
    sizes = np.bincount(ranks)
    lonely = sizes[ranks] == 1
    if lonely.sum() == 1 and num_documents > 1:
        ranks[lonely] = np.argmin(np.where(sizes == 1, num_documents, sizes))
    elif lonely.any():
        ranks[lonely] = len(sizes)
    return np.unique(ranks, return_inverse=True)[1].tolist()


@lru_cache(maxsize=16)
def _resample_counts(stratum_of: tuple[int, ...], num_resamples: int, seed: int) -> Float[Array, "resamples documents"]:
    """How often each resample holds each document; within a stratum rows sum to its number of documents."""
    ranks = np.array(stratum_of)
    counts = np.empty((num_resamples, len(ranks)))
    for stratum in range(ranks.max() + 1):
        members = np.flatnonzero(ranks == stratum)
        # the first without its rank: what no strata give
        generator = np.random.default_rng([seed, len(members), *([stratum] if stratum else [])])
        chances = np.full(len(members), 1.0 / len(members))
        counts[:, members] = generator.multinomial(len(members), chances, size=num_resamples)
    counts.flags.writeable = False
    return counts


def _medians(
    ordered: Float[Array, " windows"], counts: Float[Array, "resamples windows"]
) -> Float[Array, " resamples"]:
    """Median of each resample: the mean of its two middle values, which coincide where their number is odd."""
    upto = np.cumsum(counts, axis=1)
    total = upto[:, -1:]
    lower: Int[Array, " resamples"] = np.argmax(upto > (total - 1) // 2, axis=1)
    upper: Int[Array, " resamples"] = np.argmax(upto > total // 2, axis=1)
    return (ordered[lower] + ordered[upper]) / 2.0


def wilson(successes: float | int, num_trials: float | int, *, level: float = 0.95) -> Estimate:
    """A proportion with Wilson's score interval, which has a width at 0 and at 100 % as well.

    All p with |p_hat - p| <= z sqrt(p (1 - p) / n), z the normal quantile of (1 + level) / 2.

    Args:
        successes: between 0 and ``num_trials``; fractional where a trial is a document of several examples.
        num_trials: independent trials, n > 0.
        level: coverage, in (0, 1).

    Raises:
        ValueError: no trial, or successes out of range.

    References: Wilson 1927; Brown, Cai and DasGupta 2001, "Interval estimation for a binomial proportion".
    """
    if not (num_trials > 0.0 and 0.0 <= successes <= num_trials):
        raise ValueError(f"{successes:g} successes of {num_trials:g} trials are no proportion")
    rate, square = successes / num_trials, _quantile(level) ** 2 / num_trials
    centre = (rate + square / 2.0) / (1.0 + square)
    half = math.sqrt(square * rate * (1.0 - rate) + square**2 / 4.0) / (1.0 + square)
    low = 0.0 if successes == 0 else min(centre - half, rate)  # rounding would leave 1e-18
    high = 1.0 if successes == num_trials else max(centre + half, rate)
    return Estimate(rate, low, high)


@dataclass(frozen=True)
class McNemar:
    """McNemar's test of two binary outcomes of the same examples.

    Args:
        only_first: examples where the first alone succeeds.
        only_second: examples where the second alone succeeds.
        p: exact two-sided p-value.
        mid_p: the same with half the weight on what was observed; less conservative, not exact.
    """

    only_first: int
    only_second: int
    p: float
    mid_p: float


def mcnemar(first: Float[Array, " examples"], second: Float[Array, " examples"]) -> McNemar:
    """Whether two models succeed equally often on the same examples, by the examples where they differ.

    Of b + c such examples b ~ Binomial(b + c, 1/2) if they do; p = min(1, 2 P(X <= min(b, c))), and
    mid-p = 2 P(X <= min(b, c)) - P(X = min(b, c)). Examples count as independent: where documents hold several, trust
    the interval of ``ClusterBootstrap`` instead.

    Args:
        first: 0 or 1 per example.
        second: 0 or 1 per example, the same examples in the same order.

    Raises:
        ValueError: different lengths, or a value that is neither 0 nor 1.

    References: McNemar 1947; Fagerland, Lydersen and Laake 2013, "The McNemar test for binary matched-pairs data".
    """
    for value in np.stack([first, second]).ravel():
        if value not in (0.0, 1.0):
            raise ValueError(f"an outcome is 0 or 1, not {value:g}")
    b, c = int(np.sum(first > second)), int(np.sum(first < second))
    total, fewer = b + c, min(b, c)
    upto = term = 1  # integers: exact for any number of examples
    for k in range(fewer):
        term = term * (total - k) // (k + 1)
        upto += term
    return McNemar(b, c, min(1.0, 2 * upto / 2**total), (2 * upto - term) / 2**total)


def smallest_difference(num_examples: int, *, discordant: float = 0.5, level: float = 0.95) -> float:
    """The smallest difference of two success rates on the same examples that a test at this level tells from 0.

    max(z sqrt(d / n), k / n): the normal half-width, and the k examples that even a one-sided split needs in the exact
    test, 2^(1 - k) <= 1 - level. A true difference of this size is found only every other time; one found four times
    in five must be about 1.4 times as large (at 95 %).

    Args:
        num_examples: n, at least 1.
        discordant: d, share of examples on which the two models differ; 0.5 is what two unrelated models at 50 % have.
        level: 1 minus the level of the test, in (0, 1).

    Returns:
        A share; infinite where no outcome of n examples would suffice.

    Raises:
        ValueError: no example, ``discordant`` not in (0, 1].
    """
    if num_examples < 1:
        raise ValueError(f"{num_examples} examples tell nothing")
    if not 0.0 < discordant <= 1.0:
        raise ValueError(f"the share of differing examples is in (0, 1], not {discordant:g}")
    least = math.ceil(1.0 - math.log2(1.0 - level))
    if least > num_examples:
        return math.inf
    return max(_quantile(level) * math.sqrt(discordant / num_examples), least / num_examples)


def carries(num_examples: int, difference: float | None = None, *, discordant: float = 0.5, level: float = 0.95) -> str:
    """One line on what n examples cannot tell; empty where they carry the difference claimed.

    Args:
        num_examples: n, at least 1; where documents hold several examples, the documents.
        difference: of two success rates, claimed or observed; None always gives the line.
        discordant: as in ``smallest_difference``; known after the fact from ``McNemar``.
        level: as in ``smallest_difference``.
    """
    smallest = smallest_difference(num_examples, discordant=discordant, level=level)
    if difference is not None and abs(difference) >= smallest:
        return ""
    examples = "1 example" if num_examples == 1 else f"{num_examples} examples"
    if smallest > 1.0:
        return f"{examples}: no difference can be told at {100.0 * level:g} %"
    text = f"{examples}: differences under {_points(smallest)} points cannot be told at {100.0 * level:g} %"
    return text if difference is None else f"{text}, {_points(abs(difference))} among them"


def _points(share: float) -> str:
    return f"{100.0 * share:.{0 if share >= 0.1 else 1}f}"


def _quantile(level: float) -> float:
    """The normal quantile z of a two-sided interval."""
    return NormalDist().inv_cdf((1.0 + level) / 2.0)
