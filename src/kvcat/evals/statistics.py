"""Figures with intervals: a bootstrap that respects documents and strata, proportions, and paired binary outcomes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from jaxtyping import Float, Int

from kvcat.errors import InputError

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

    Windows of one document resemble each other; resampling them one by one gives intervals that are
    too narrow. Two models on the same windows share the resamples, so the interval of their
    difference is a paired one. With fewer than about ten documents percentile intervals are too
    narrow, whatever the number of resamples.

    With strata every resample draws as many documents of each stratum as there are. A stratum of one
    document cannot vary: such documents form one stratum together, and a single one joins the
    smallest other stratum.

    With several training seeds a resample draws seeds as well as documents; all seeds see the same
    documents. A seed drawn c times out of S has the weight 1/S + sqrt(S / (S - 1)) (c/S - 1/S), so
    that the variance between seeds is unbiased. Fewer than about five seeds still give intervals
    that are too narrow.

    Args:
        documents: name of each window's document, in the order of the windows.
        strata: name of each window's stratum; None is one stratum of all.
        seeds: names of the training seeds; columns then have a row per seed. Empty: one training run.
        num_resamples: resamples, at least 1.
        level: coverage of the intervals, in (0, 1).
        seed: of the resampling; equal documents, strata and seeds give equal resamples.

    Raises:
        ValueError: no window; not one stratum per window; a document in two strata.

    References: Field and Welsh 2007, "Bootstrapping clustered data"; Davison and Hinkley 1997,
    section 3.2 (strata); Owen 2007, "The pigeonhole bootstrap" (seeds crossed with documents).
    """

    def __init__(
        self,
        documents: Sequence[str],
        *,
        strata: Sequence[str] | None = None,
        seeds: Sequence[str] = (),
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
        self._weights = _seed_weights(seeds, num_resamples, seed)

    def of_means(self, function: Callable[..., Array], *columns: Float[Array, "*seeds windows"]) -> Draws:
        """``function`` of the columns' means, on all windows and on every resample.

        Args:
            function: takes one array per column and works element by element.
            columns: one value per window each, with a row per training seed where there are several.
        """
        sizes = self._counts @ np.bincount(self._document_of, minlength=self.num_documents)
        values, means = [], []
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            for column in columns:
                shift = column.reshape(-1)[0]  # constant columns stay constant to the last bit
                rows = np.atleast_2d(column) - shift
                sums = [np.bincount(self._document_of, row, minlength=self.num_documents) for row in rows]
                per_seed = (self._counts @ np.stack(sums).T) / sizes[:, None]
                values.append(np.asarray(rows.mean() + shift))
                means.append((per_seed * self._weights).sum(1) + shift)
            return Draws(float(function(*values)), np.asarray(function(*means), dtype=np.float64))

    def median_draws(self, values: Float[Array, "*seeds windows"]) -> Draws:
        """Median over windows (mean of the seeds' medians), on all windows and on every resample."""
        rows = np.atleast_2d(values)
        medians = []
        for row in rows:
            order = np.argsort(row, kind="stable")
            ordered, documents = row[order], self._document_of[order]
            parts = [_medians(ordered, counts[:, documents]) for counts in np.array_split(self._counts, 10)]
            medians.append(np.concatenate(parts))
        drawn = (np.stack(medians, 1) * self._weights).sum(1)
        return Draws(float(np.median(rows, axis=1).mean()), drawn)

    def estimate(self, draws: Draws) -> Estimate:
        """The figure with its percentile interval; without one where there is a single document."""
        if self.num_documents == 1 or np.isnan(draws.resampled).any():
            return Estimate(draws.value, float("nan"), float("nan"))
        low, high = np.quantile(draws.resampled, [self._tail, 1.0 - self._tail], method="inverted_cdf")
        return Estimate(draws.value, float(low), float(high))

    def p_value(self, draws: Draws) -> float:
        """Two-sided bootstrap p of "the figure is 0": twice the smaller share of resamples beyond 0.

        With B resamples it is at least 2 / (B + 1); NaN where there is no interval.
        """
        if self.num_documents == 1 or np.isnan(draws.resampled).any():
            return float("nan")
        fewer = min(int((draws.resampled <= 0).sum()), int((draws.resampled >= 0).sum()))
        return min(1.0, 2.0 * (fewer + 1) / (len(draws.resampled) + 1))

    def mean(self, values: Float[Array, "*seeds windows"]) -> Estimate:
        """Mean over windows."""
        return self.estimate(self.of_means(lambda mean: mean, values))

    def median(self, values: Float[Array, "*seeds windows"]) -> Estimate:
        """Median over windows."""
        return self.estimate(self.median_draws(values))

    def ratio(self, numerator: Float[Array, "*seeds windows"], denominator: Float[Array, "*seeds windows"]) -> Estimate:
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


def _seed_weights(seeds: Sequence[str], num_resamples: int, seed: int) -> Float[Array, "resamples seeds"]:
    """Weight of each training seed in each resample; equal names give equal weights, so that models are paired."""
    count = len(seeds)
    if count < 2:
        return np.ones((num_resamples, 1))
    generator = np.random.default_rng([seed, count, *"\n".join(seeds).encode()])
    drawn = generator.multinomial(count, np.full(count, 1.0 / count), size=num_resamples)
    return 1.0 / count + math.sqrt(count / (count - 1)) * (drawn - 1.0) / count


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


def share(scores: Float[Array, " examples"], documents: Sequence[str], *, level: float = 0.95) -> Estimate:
    """Mean of scores between 0 and 1 with Wilson's interval at n = number of documents.

    For right or wrong, one example to a document, this is the usual interval. Elsewhere it is rather
    too wide than too narrow: no variable in [0, 1] with mean p varies more than p (1 - p), and
    examples of one document count as copies of one another. It is never of zero width.

    Args:
        scores: between 0 and 1, such as the share of several right answers that were given.
        documents: name of each example's document.
        level: coverage of the interval, in (0, 1).

    Raises:
        InputError: no example.
    """
    if not len(scores):
        raise InputError("no example to take an accuracy of")
    num_documents = len(set(documents))
    return wilson(float(scores.mean()) * num_documents, num_documents, level=level)


def share_difference(
    first: Float[Array, " examples"],
    second: Float[Array, " examples"],
    documents: Sequence[str],
    *,
    level: float = 0.95,
) -> tuple[Estimate, float]:
    """Difference of two mean scores of the same examples, with Agresti and Min's interval, and its p-value.

    Half a document is added to each of four outcomes: both right, neither, the first alone, the second
    alone. With d_i the difference of document i of n, scaled so that their mean is the difference,
    m = sum d / (n + 2) and s^2 = ((sum d^2 + 1) / (n + 2) - m^2) / (n + 2), the interval is m +/- z s
    and p = 2 Phi(-|m| / s). It is never of zero width.

    Args:
        first: scores between 0 and 1.
        second: the same examples in the same order.
        documents: name of each example's document.
        level: coverage of the interval, in (0, 1).

    References: Agresti and Min 2005, "Simple improved confidence intervals for comparing matched
    proportions".
    """
    names, document_of = np.unique(np.asarray(documents), return_inverse=True)
    differences = np.bincount(document_of, first - second) * len(names) / len(first)
    total = len(names) + 2
    mean = differences.sum() / total
    error = math.sqrt(((differences**2).sum() + 1.0) / total - mean**2) / math.sqrt(total)
    half, value = _quantile(level) * error, float((first - second).mean())
    p = 2.0 * NormalDist().cdf(-abs(mean) / error)
    return Estimate(value, float(min(mean - half, value)), float(max(mean + half, value))), p


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


def cannot_tell(test: McNemar, difference: float, num_examples: int, num_documents: int) -> str:
    """One line on what a comparison of this size cannot tell; empty where it carries the difference.

    Args:
        test: of the two models.
        difference: of their shares.
        num_examples: examples compared.
        num_documents: documents they come from.
    """
    differing = test.only_first + test.only_second
    if differing == 0:
        return f"the models agree on all {num_examples} examples"
    return carries(num_documents, difference, discordant=differing / num_examples)


def holm(p_values: Float[Array, " tests"]) -> Float[Array, " tests"]:
    """Holm's step-down correction: the family-wise error stays below the level; NaN stays NaN and does not count.

    p_(i) becomes max over j <= i of min(1, (m - j + 1) p_(j)), for the ordered p of m tests.

    References: Holm 1979, "A simple sequentially rejective multiple test procedure".
    """
    corrected = np.full(len(p_values), np.nan)
    order = [i for i in np.argsort(p_values, kind="stable") if not np.isnan(p_values[i])]
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def _points(portion: float) -> str:
    return f"{100.0 * portion:.{0 if portion >= 0.1 else 1}f}"


def _quantile(level: float) -> float:
    """The normal quantile z of a two-sided interval."""
    return NormalDist().inv_cdf((1.0 + level) / 2.0)
