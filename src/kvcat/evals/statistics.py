"""Means, medians and ratios with bootstrap intervals that respect documents."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

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

    Args:
        documents: name of each window's document, in the order of the windows.
        num_resamples: resamples, at least 1.
        level: coverage of the intervals, in (0, 1).
        seed: of the resampling; equal numbers of documents and equal seeds give equal resamples.

    Raises:
        ValueError: no window.

    References: Field and Welsh 2007, "Bootstrapping clustered data".
    """

    def __init__(
        self, documents: Sequence[str], *, num_resamples: int = 10_000, level: float = 0.95, seed: int = 0
    ) -> None:
        if not documents:
            raise ValueError("no window to resample")
        names, self._document_of = np.unique(np.asarray(documents), return_inverse=True)
        self.num_windows = len(documents)
        self.num_documents = len(names)
        self._tail = (1.0 - level) / 2.0
        self._counts = _resample_counts(self.num_documents, num_resamples, seed)

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


@lru_cache(maxsize=16)
def _resample_counts(num_documents: int, num_resamples: int, seed: int) -> Float[Array, "resamples documents"]:
    """How often each resample holds each document; rows sum to the number of documents."""
    generator = np.random.default_rng([seed, num_documents])
    chances = np.full(num_documents, 1.0 / num_documents)
    counts = generator.multinomial(num_documents, chances, size=num_resamples).astype(np.float64)
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
