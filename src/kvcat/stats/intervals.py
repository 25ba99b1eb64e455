"""Figures with 95 % intervals: bootstrap-t over documents, Student's t over training seeds."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.stats import norm
from scipy.stats import t as student_t

from kvcat.errors import InputError

LEVEL = 0.95
NORMAL_QUANTILE = float(norm.ppf((1.0 + LEVEL) / 2.0))
"""The half-width of a 95 % interval of a normal variable, in standard deviations."""
NUM_MEDIAN_CHUNKS = 10
"""The number of parts in which medians of resamples and exchanges are computed, which bounds the
memory."""
_TAILS = [(1.0 - LEVEL) / 2.0, (1.0 + LEVEL) / 2.0]
_CHUNK_ELEMENTS = 2**22
_STEP = 1e-4
_ROUNDING = 1e-12
# A resample may lack the few documents that differ from the others. Its standard error is then
# nearly 0 and its pivot endless, so the error counts as at least this fraction of the data's. Where
# documents are normal, exponential or log-normal this changes the coverage by a point at most.
_LEAST_ERROR = 0.2
# resamples of fewer documents often hold copies of a single one, which have no standard error
_FEWEST_FOR_BOOTSTRAP_T = 5
Array = np.ndarray
Names = Sequence[str] | Array


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval; the ends are NaN if there is only one document."""

    value: float
    low: float = math.nan
    high: float = math.nan

    def excludes(self, value: float) -> bool:
        """Whether a value lies outside the interval."""
        return bool(self.low > value or self.high < value)

    def union(self, other: "Estimate") -> "Estimate":
        """The figure, with the smallest interval that contains both intervals."""
        low = float(np.fmin(self.low, other.low))
        high = float(np.fmax(self.high, other.high))
        return Estimate(self.value, low, high)


NO_ESTIMATE = Estimate(math.nan)
"""The estimate of an undefined value."""


class _Mean(NamedTuple):
    """A mean over windows on which a figure depends."""

    document_sums: Float[Array, " documents"]  # sums of the column minus a constant
    values: Float[Array, " draws"]  # minus the same constant


@dataclass(frozen=True, eq=False)
class Draws:
    """A figure for the data and for every resample. Figures from one bootstrap subtract and divide.

    Args:
        values: the figure for the data, then for each resample.
        means: the means on which the figure depends; None if it is not a function of means, in
            which case resamples have no standard error.
        slopes: derivative of the figure with respect to each mean, in every draw.
        seed_deviations: by the names of the training seeds, the first-order change of the figure
            due to each seed; the changes sum to 0.
    """

    values: Float[Array, " draws"]
    means: tuple[_Mean, ...] | None
    slopes: tuple[Float[Array, " draws"], ...]
    seed_deviations: Mapping[tuple[str, ...], Float[Array, " seeds"]]

    @property
    def value(self) -> float:
        """The figure for the data."""
        return float(self.values[0])

    def __sub__(self, other: "Draws") -> "Draws":
        """The difference of two figures."""
        ones = np.ones_like(self.values)
        return self._combined(other, self.values - other.values, ones, -ones)

    def __truediv__(self, other: "Draws") -> "Draws":
        """The ratio of two figures."""
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = self.values / other.values
            return self._combined(other, ratio, 1.0 / other.values, -ratio / other.values)

    def _combined(self, other: "Draws", values: Array, slope: Array, other_slope: Array) -> "Draws":
        """A function of two figures, from its values and its derivatives with respect to both."""
        means = None
        if self.means is not None and other.means is not None:
            means = self.means + other.means
        slopes = [slope * by_mean for by_mean in self.slopes]
        slopes += [other_slope * by_mean for by_mean in other.slopes]
        deviations = {seeds: slope[0] * moved for seeds, moved in self.seed_deviations.items()}
        for seeds, moved in other.seed_deviations.items():
            deviations[seeds] = deviations.get(seeds, 0.0) + other_slope[0] * moved
        return Draws(values, means, tuple(slopes), deviations)


class ClusterBootstrap:
    """Intervals from a studentised bootstrap over documents and Student's t over training seeds.

    Resamples draw documents with replacement, with all their windows. Two models on the same
    windows share the resamples, so the interval of their difference is paired. With strata, every
    resample draws as many documents from each stratum as the stratum has. Strata with a single
    document are merged; a lone one joins the smallest other stratum.

    With s the standard error of the figure F and F_b, s_b those of resample b, the documents'
    interval is [F - s q(.975), F - s q(.025)], q the quantiles of (F_b - F) / max(s_b, s / 5)
    (bootstrap-t); each end is at least as far from F as the end of Student's t interval. The
    standard errors are those of the linearised figure. With twelve documents from a normal,
    exponential or Laplace distribution, nominal 95 % intervals cover 93 to 97 %; with heavier tails
    they cover less (``coverage_of_mean``). With fewer than five documents, the interval is
    Student's t interval. For a figure that is not a function of means, such as a median, it is the
    percentile interval.

    S > 1 training seeds add the interval F +/- t s with s^2 = sum_s d_s^2 / (S (S - 1)). Here d_s
    is the change of the figure due to seed s, and t has S - 1 degrees of freedom. The two intervals
    are combined by adding the squares of their lower half-widths, and of their upper ones (MOVER).

    Args:
        documents: name of each window's document, in the order of the windows.
        strata: name of each window's stratum; None: all windows are in one stratum.
        seeds: names of the training seeds, in which case columns have a row per seed; empty: one
            run.
        num_resamples: number of resamples; they are the same for equal documents and strata.

    Raises:
        InputError: a document is in two strata.
        ValueError: the number of strata differs from the number of windows.

    References: Field and Welsh 2007, "Bootstrapping clustered data"; Davison and Hinkley 1997,
    sections 2.4, 2.7.2, 5.2.1 (bootstrap-t) and 3.2 (strata); Zou and Donner 2008, "Construction of
    confidence limits about effect measures" (MOVER).
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
        self._stratum_of = np.array(ranks)
        self._counts = _resample_counts(ranks, num_resamples)  # (documents, draws)
        self._windows_per_document = np.bincount(self._document_of).astype(float)
        self._num_windows = self._windows_per_document @ self._counts  # (draws,)
        self._seeds = tuple(seeds)

    def of_means(
        self, function: Callable[..., Array], *columns: Float[Array, "*seeds windows"]
    ) -> Draws:
        """``function`` of the columns' means over windows and seeds, element by element."""
        means = []
        points = []
        seed_moves = []
        for column in columns:
            # keeps constant columns exactly constant
            offset = column.flat[np.isfinite(column).argmax()]
            offset = offset if math.isfinite(offset) else 0.0
            rows = np.atleast_2d(column) - offset  # (seeds, windows)
            with np.errstate(invalid="ignore"):  # values may be infinite
                sums = np.bincount(self._document_of, weights=rows.mean(axis=0))
                mean = _Mean(sums, sums @ self._counts / self._num_windows)
                seed_means = rows.mean(axis=1)
                seed_moves.append(seed_means - seed_means.mean())
            means.append(mean)
            point = mean.values + offset
            # what rounding leaves of 0 would be divided by
            point[np.abs(point) < _ROUNDING * np.abs(column).max()] = 0.0
            points.append(point)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            values = np.asarray(function(*points), dtype=np.float64)
            slopes = tuple(_slope(function, points, index) for index in range(len(points)))
        slopes_of_data = np.array([slope[0] for slope in slopes])
        moves = slopes_of_data @ np.stack(seed_moves)  # (seeds,)
        return Draws(values, tuple(means), slopes, self._by_seeds(moves))

    def median(self, values: Float[Array, "*seeds windows"]) -> Draws:
        """The median over windows, averaged over the seeds."""
        by_seed = np.stack([self._median_of_seed(row) for row in np.atleast_2d(values)])
        medians = by_seed.mean(axis=0)
        return Draws(medians, None, (), self._by_seeds(by_seed[:, 0] - medians[0]))

    def _by_seeds(self, moves: Float[Array, " seeds"]) -> dict[tuple[str, ...], Array]:
        return {self._seeds: moves} if len(self._seeds) > 1 else {}

    def _median_of_seed(self, values: Float[Array, " windows"]) -> Float[Array, " draws"]:
        order = np.argsort(values, kind="stable")
        ascending = values[order]
        document_of = self._document_of[order]
        medians = []
        for counts in np.array_split(self._counts, NUM_MEDIAN_CHUNKS, axis=1):
            num_up_to = np.cumsum(counts[document_of], axis=0)  # (windows, draws)
            total = num_up_to[-1]
            # the two middle windows, which coincide if the number of windows is odd
            lower = np.argmax(num_up_to > (total - 1) // 2, axis=0)
            upper = np.argmax(num_up_to > total // 2, axis=0)
            medians.append((ascending[lower] + ascending[upper]) / 2.0)
        return np.concatenate(medians)

    def estimate(self, draws: Draws) -> Estimate:
        """The figure with its interval.

        There is no interval if there is only one document or if a draw is undefined.
        """
        is_undefined = not math.isfinite(draws.value) or bool(np.isnan(draws.values).any())
        if self.num_documents == 1 or is_undefined:
            return Estimate(draws.value)
        low, high = self._documents_interval(draws)
        below = draws.value - low
        above = high - draws.value
        seeds_half = _seeds_half_width(draws)
        if seeds_half > 0.0:
            below = math.hypot(below, seeds_half)
            above = math.hypot(above, seeds_half)
        return Estimate(draws.value, draws.value - below, draws.value + above)

    def _documents_interval(self, draws: Draws) -> tuple[float, float]:
        """The ends of the interval from resamples of the documents."""
        if draws.means is None:
            low, high = np.quantile(draws.values[1:], _TAILS, method="inverted_cdf")
            return float(low), float(high)
        with np.errstate(invalid="ignore"):  # infinite figures have no standard error
            errors = self._standard_errors(draws, draws.means)
        value = draws.values[0]
        error = errors[0]
        half = student_quantile(self.num_documents - 1) * error
        if self.num_documents < _FEWEST_FOR_BOOTSTRAP_T:
            return float(value - half), float(value + half)
        moved = draws.values[1:] - value
        with np.errstate(divide="ignore", invalid="ignore"):
            pivots = moved / np.maximum(errors[1:], _LEAST_ERROR * error)
        finite = draws.values[np.isfinite(draws.values)]
        rounding = _ROUNDING * float(np.abs(finite).max())
        pivots[np.abs(moved) <= rounding] = 0.0  # equal documents have no error
        infinite = np.isinf(moved)  # a ratio to 0
        pivots[infinite] = moved[infinite]
        lower, upper = np.quantile(pivots, _TAILS, method="inverted_cdf")
        if error <= rounding:
            return float(value), float(value)
        return float(value - max(half, error * upper)), float(value + max(half, -error * lower))

    def _standard_errors(self, draws: Draws, means: tuple[_Mean, ...]) -> Float[Array, " draws"]:
        """The standard error of the figure in every draw, over documents within strata.

        Document d moves the figure by u_d / (number of windows), with u_d the sum over the means of
        slope * (document sum - mean * windows of d). In a stratum of D documents, which a draw
        holds c_d times each, the variance is D / (D - 1) * sum_d c_d (u_d - mean u)^2 / windows^2.
        """
        slopes = np.stack(draws.slopes)  # (means, draws)
        values = np.stack([mean.values for mean in means])  # (means, draws)
        centre = (slopes * values).sum(axis=0)
        sums = np.stack([mean.document_sums for mean in means], axis=1)  # (documents, means)
        # (documents, means + 1) and (means + 1, draws)
        by_document = np.column_stack([sums, self._windows_per_document])
        factors = np.vstack([slopes, -centre])
        variances = []
        num_chunks = 1 + slopes.shape[1] * len(sums) // _CHUNK_ELEMENTS
        for chunk in np.array_split(np.arange(slopes.shape[1]), num_chunks):  # bounds the memory
            columns = slice(chunk[0], chunk[-1] + 1)
            moves = by_document @ factors[:, columns]  # (documents, draws)
            variances.append(self._sum_of_squares(moves, self._counts[:, columns]))
        return np.sqrt(np.concatenate(variances)) / self._num_windows

    def _sum_of_squares(
        self, moves: Float[Array, "documents draws"], counts: Float[Array, "documents draws"]
    ) -> Float[Array, " draws"]:
        """The sum of squared deviations of a draw's documents from the mean of their stratum."""
        num_strata = int(self._stratum_of.max()) + 1
        total = np.zeros(moves.shape[1])
        for stratum in range(num_strata):
            members = self._stratum_of == stratum if num_strata > 1 else slice(None)
            times = counts[members]
            deviations = moves[members]
            deviations -= np.einsum("ij,ij->j", times, deviations) / len(times)
            squares = np.einsum("ij,ij,ij->j", times, deviations, deviations)
            total += squares * (len(times) / max(1, len(times) - 1))
        return total

    def mean(self, values: Float[Array, "*seeds windows"]) -> Estimate:
        """The mean over windows, with its interval."""
        return self.estimate(self.of_means(np.asarray, values))


# What nominal 95 % intervals of a mean cover, per cent, by the number of log-normal documents and
# the standard deviation of their logarithms: 1,500 samples for each, 999 resamples, for 4 without.
_LOG_SPREADS = (0.5, 1.0, 1.5, 2.0)
_COVERAGES = {
    4: (92, 82, 69, 53),
    8: (95, 90, 83, 74),
    10: (95, 92, 86, 78),
    18: (96, 94, 88, 82),
    30: (96, 93, 89, 82),
}


def coverage_of_mean(values: Float[Array, " windows"], documents: Names) -> int:
    """What the 95 % interval of a positive mean covers, per cent, if documents are log-normal.

    The mean of few documents often misses the long tail, which no bootstrap can make up for. The
    table behind this was simulated; between its spreads it is linear, for numbers of documents
    between its rows it is the smaller one's.

    Args:
        values: positive values of the windows, such as KL.
        documents: name of each window's document; at least two documents.
    """
    _, document_of, sizes = np.unique(
        np.asarray(documents), return_inverse=True, return_counts=True
    )
    means = np.bincount(document_of, weights=values) / sizes
    spread = float(np.log(means).std(ddof=1))
    rows = [number for number in _COVERAGES if number <= len(sizes)] or [min(_COVERAGES)]
    return round(float(np.interp(spread, _LOG_SPREADS, _COVERAGES[max(rows)])))


def _slope(
    function: Callable[..., Array], points: list[Float[Array, " draws"]], index: int
) -> Float[Array, " draws"]:
    """The derivative of a function with respect to one argument, from a central difference."""
    step = _STEP * max(float(np.std(points[index])), _STEP * float(np.abs(points[index]).max()))
    if step == 0.0:
        return np.zeros_like(points[index])
    above = [point + step * (place == index) for place, point in enumerate(points)]
    below = [point - step * (place == index) for place, point in enumerate(points)]
    difference = np.asarray(function(*above), float) - np.asarray(function(*below), float)
    return difference / (2.0 * step)


@lru_cache
def student_quantile(degrees: float | int) -> float:
    """The half-width of a 95 % interval of Student's t with these degrees of freedom."""
    return float(student_t.ppf(_TAILS[1], degrees))


def _seeds_half_width(draws: Draws) -> float:
    """Half the width of the interval from the training seeds alone; 0 for one seed.

    Different sets of seeds are treated as independent, and equal sets as paired.
    """
    square = 0.0
    for error, degrees in _seed_errors(draws):
        square += (student_quantile(degrees) * error) ** 2
    return math.sqrt(square)


def seeds_p_value(draws: Draws) -> float:
    """The two-sided p-value for a figure of 0, from Student's t over training seeds.

    It is 0 for one seed. With several sets of seeds, the smallest set determines the degrees of
    freedom.
    """
    errors = _seed_errors(draws)
    error = math.hypot(*(error for error, _ in errors))
    if error == 0.0:
        return 0.0
    degrees = min(degrees for _, degrees in errors)
    return 2.0 * float(student_t.sf(abs(draws.value) / error, degrees))


def _seed_errors(draws: Draws) -> list[tuple[float, int]]:
    """The standard error of the figure and its degrees of freedom, for each set of seeds."""
    errors = []
    for seeds, moves in draws.seed_deviations.items():
        number = len(seeds)
        errors.append((math.sqrt(float((moves**2).sum()) / (number * (number - 1))), number - 1))
    return errors


def _stratum_ranks(documents: Names, strata: Sequence[str]) -> tuple[int, ...]:
    """The rank of each document's stratum, in the order of the documents' names."""
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
def _resample_counts(ranks: tuple[int, ...], num_resamples: int) -> Float[Array, "documents draws"]:
    """The number of times that the data, and each resample, contain each document."""
    stratum_of = np.array(ranks)
    counts = np.ones((len(ranks), 1 + num_resamples))
    for stratum in range(stratum_of.max() + 1):
        members = np.flatnonzero(stratum_of == stratum)
        seed = [0, len(members)]
        if stratum > 0:  # the first stratum uses the seed of data without strata
            seed.append(stratum)
        generator = np.random.default_rng(seed)
        chances = np.full(len(members), 1.0 / len(members))
        drawn = generator.multinomial(len(members), chances, size=num_resamples)
        counts[members, 1:] = drawn.T
    counts.flags.writeable = False
    return counts
