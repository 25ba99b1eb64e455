"""A compressibility profile read from its records: the best cache found, every method, and slots that suffice."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvcat.errors import InputError
from kvcat.evals.profile_errors import MEASURES
from kvcat.evals.profile_suffixes import KINDS
from kvcat.evals.records import Record
from kvcat.evals.runner import Values
from kvcat.evals.statistics import ClusterBootstrap, Estimate

BEST, ALL = "best", "all"
Statistic = Literal["mean", "worst"]
STATISTICS: tuple[Statistic, Statistic] = ("mean", "worst")
Prefix = tuple[str, str]
Cache = tuple[int, str]
Figures = Mapping[Prefix, Mapping[Cache, Mapping[str, Values]]]
"""Document and name of a prefix, then slots and label of a method, then kind of suffix."""
Errors = dict[Prefix, tuple[float, float]]
"""Mean and worst of every prefix."""


@dataclass(frozen=True)
class ProfileRow:
    """One point of a profile.

    Args:
        model: label.
        kind: of the held-out suffixes; "all" is the mean over the kinds' means, and the worst of all.
        num_slots: r(n), the slots allowed per layer and head.
        keep_ratio: r(n) / n.
        method: label of a method, or "best": for every prefix the cache of at most so many slots, no cache among them,
            whose error on the suffixes for the choice is smallest: by their mean for the mean, by their worst for the
            worst.
        measure: a name in ``MEASURES``.
        mean: over outputs, then over prefixes, with an interval that resamples documents (none where there is one).
        worst: over outputs and prefixes.
        ratio: the mean over that of the first model on the same prefixes, with its interval; None for that model.
        worst_ratio: likewise of the worst.
        fit_mean: as the mean, on the suffixes that caches were fitted to; NaN where the kind has none.
        num_prefixes: prefixes that have held-out outputs of the kind; without any, errors are NaN.
        num_outputs: held-out outputs of all prefixes.
        chosen: for "best", by the mean and by the worst: the method and its slots, and for how many prefixes it was
            chosen.
    """

    model: str
    kind: str
    num_slots: int
    keep_ratio: float
    method: str
    measure: str
    mean: Estimate
    worst: float
    ratio: Estimate | None
    worst_ratio: float
    fit_mean: float
    num_prefixes: int
    num_outputs: int
    chosen: Mapping[Statistic, Mapping[tuple[str, int], int]]

    def error(self, statistic: Statistic) -> float:
        """The mean's value, or the worst."""
        return self.mean.value if statistic == "mean" else self.worst


@dataclass(frozen=True)
class SlotsNeeded:
    """The curve read the other way.

    Args:
        model: label.
        kind: of the suffixes, or "all".
        measure: a name in ``MEASURES``.
        statistic: "mean" or "worst".
        epsilon: error that is undercut, in the measure's unit.
        num_slots: the fewest slots tried whose best cache does, with 0 for no cache; None where none of those tried
            does (all slots always do: their error is 0).
    """

    model: str
    kind: str
    measure: str
    statistic: Statistic
    epsilon: float
    num_slots: int | None


def profile_rows(
    records: Iterable[Record], *, measures: Sequence[str] = tuple(MEASURES), num_resamples: int = 10_000, seed: int = 0
) -> list[ProfileRow]:
    """Rows of the best cache found and of every method, models in the order of the records.

    Args:
        records: of ``profile``, complete for every model.
        measures: names in ``MEASURES``.
        num_resamples: of the bootstrap.
        seed: of the bootstrap.

    Raises:
        InputError: models with other prefixes or methods than the first: the run did not end.
    """
    models = _figures(records)
    rows: list[ProfileRow] = []
    first: dict[tuple[str, int, str], Errors] = {}
    for measure in measures:
        for rank, (model, figures) in enumerate(models.items()):
            table = _Table(model, figures, measure, num_resamples, seed)
            for method, slots in table.points():
                for kind in [*table.kinds, ALL]:
                    key = kind, slots, method
                    own = table.errors(kind, slots, method)
                    if rank == 0:
                        first[key] = own
                    elif key not in first or list(first[key]) != list(own):
                        raise InputError(f"model {model!r} and the first one have records of different caches")
                    rows.append(table.row(kind, slots, method, own, None if rank == 0 else first[key]))
    return rows


def slots_needed(rows: Iterable[ProfileRow], epsilons: Sequence[float], *, measure: str = "kl") -> list[SlotsNeeded]:
    """For every model, kind and statistic the fewest slots whose best cache has an error below epsilon.

    Args:
        rows: of ``profile_rows``.
        epsilons: errors, larger than 0, in the measure's unit.
        measure: a name in ``MEASURES``.

    Raises:
        InputError: an epsilon that is not larger than 0.
    """
    for epsilon in epsilons:
        if not epsilon > 0:
            raise InputError(f"epsilon is {epsilon:g}; an error below it must be possible: it must be larger than 0")
    curves: dict[tuple[str, str], list[ProfileRow]] = {}
    for row in rows:
        if row.method == BEST and row.measure == measure:
            curves.setdefault((row.model, row.kind), []).append(row)
    found = []
    for (model, kind), curve in curves.items():
        for statistic in STATISTICS:
            for epsilon in epsilons:
                enough = [row.num_slots for row in curve if row.error(statistic) < epsilon]
                found.append(SlotsNeeded(model, kind, measure, statistic, epsilon, min(enough, default=None)))
    return found


@dataclass(frozen=True)
class _Table:
    """One model's figures in one measure."""

    model: str
    figures: Figures
    measure: str
    num_resamples: int
    seed: int

    @property
    def kinds(self) -> list[str]:
        """Kinds of suffixes, in the order of ``KINDS``."""
        there = next(iter(next(iter(self.figures.values())).values()))
        return [kind for kind in KINDS if kind in there]

    def points(self) -> list[tuple[str, int]]:
        """Methods and slots, the best caches first."""
        caches = sorted({cache for own in self.figures.values() for cache in own})
        slots = sorted({count for count, _ in caches})
        order = list(dict.fromkeys(label for own in self.figures.values() for _, label in own))
        return [(BEST, count) for count in slots] + [(m, count) for m in order for count, own in caches if own == m]

    def chosen(self, prefix: Prefix, slots: int, method: str, statistic: Statistic) -> Cache:
        """The cache that stands for a method, by the suffixes for the choice where it is the best one."""
        if method != BEST:
            return slots, method
        able = {cache: self._choice(values, statistic) for cache, values in self.figures[prefix].items()}
        able = {cache: error for cache, error in able.items() if cache[0] <= slots}
        return min(able, key=lambda cache: (able[cache], cache[0]))

    def _choice(self, values: Mapping[str, Values], statistic: Statistic) -> float:
        name = f"choice_{self.measure}" + "_worst" * (statistic == "worst")
        errors = [own[name] for own in values.values() if name in own]
        return float(np.mean(errors) if statistic == "mean" else max(errors))

    def errors(self, kind: str, slots: int, method: str) -> Errors:
        """Mean and worst error of every prefix that has held-out outputs of the kind."""
        found: Errors = {}
        for prefix in sorted(self.figures):
            pair = []
            for statistic in STATISTICS:
                over, tail = (np.mean, "") if statistic == "mean" else (np.max, "_worst")
                values = self.figures[prefix][self.chosen(prefix, slots, method, statistic)]
                own = values.values() if kind == ALL else [values[kind]]
                there = [value[self.measure + tail] for value in own if self.measure in value]
                pair += [float(over(there))] if there else []
            if pair:
                found[prefix] = pair[0], pair[1]
        return found

    def row(self, kind: str, slots: int, method: str, errors: Errors, first: Errors | None) -> ProfileRow:
        """A row of these errors, beside those of the first model."""
        documents, means = [document for document, _ in errors], _means(errors)
        mean, worst = Estimate(np.nan, np.nan, np.nan), max((own[1] for own in errors.values()), default=np.nan)
        if np.isfinite(means).all() and len(means):
            mean = self._bootstrap(documents).mean(means)
        elif len(means):
            mean = Estimate(float(means.mean()), np.nan, np.nan)
        ratio, worst_ratio = None if first is None else Estimate(np.nan, np.nan, np.nan), np.nan
        if first and np.isfinite([means, _means(first)]).all():
            ratio = self._bootstrap(documents).ratio(means, _means(first))
            largest = max(own[1] for own in first.values())
            worst_ratio = worst / largest if largest > 0 else np.nan
        chosen: dict[Statistic, list[Cache]] = {
            s: [self.chosen(prefix, slots, method, s) for prefix in self.figures] for s in STATISTICS
        }
        counts: dict[Statistic, Mapping[tuple[str, int], int]] = {}
        if method == BEST:
            counts = {s: Counter((label, count) for count, label in caches) for s, caches in chosen.items()}
        caches = [self.figures[prefix][cache] for prefix, cache in zip(self.figures, chosen["mean"], strict=True)]
        picked = [values[name] for values in caches for name in (self.kinds if kind == ALL else [kind])]
        fit = [own[name] for own in picked if (name := f"fit_{self.measure}") in own]
        return ProfileRow(
            self.model, kind, slots, self._keep_ratio(slots), method, self.measure, mean, worst, ratio, worst_ratio,
            float(np.mean(fit)) if fit else np.nan, len(errors), int(sum(own["num_outputs"] for own in picked)), counts,
        )  # fmt: skip

    def _bootstrap(self, documents: Sequence[str]) -> ClusterBootstrap:
        return ClusterBootstrap(documents, num_resamples=self.num_resamples, seed=self.seed)

    def _keep_ratio(self, slots: int) -> float:
        return next(
            values["keep_ratio"]
            for own in self.figures.values()
            for (count, _), kinds in own.items()
            if count == slots
            for values in kinds.values()
        )


def _means(errors: Errors) -> np.ndarray:
    return np.array([mean for mean, _ in errors.values()])


def _figures(records: Iterable[Record]) -> dict[str, dict[Prefix, dict[Cache, dict[str, Values]]]]:
    """Values by model, prefix, cache and kind."""
    found: dict[str, dict[Prefix, dict[Cache, dict[str, Values]]]] = {}
    for record in records:
        prefix, cache = (record.document, record.example), (int(record.values["num_slots"]), record.method_label)
        kinds = found.setdefault(record.model, {}).setdefault(prefix, {}).setdefault(cache, {})
        kinds[record.dataset.rpartition(":")[2]] = {**record.values, "keep_ratio": record.keep_ratio}
    if not found:
        raise InputError("no records: nothing was profiled")
    return found
