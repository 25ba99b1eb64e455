"""Records to tables: every figure with its interval, and paired comparisons of models."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from kvcat.errors import InputError
from kvcat.evals.metrics import METRICS
from kvcat.evals.records import Record, models_of
from kvcat.evals.statistics import (
    ClusterBootstrap,
    Estimate,
    cannot_tell,
    holm,
    mcnemar,
    share,
    share_difference,
)

BASELINES = ("dense", "no-context", "truncated")
SUMMARY_COLUMNS = (
    "model", "method", "keep_ratio", "step", "stratum", "metric", "value", "low", "high", "num_examples",
    "num_documents", "num_seeds", "baseline",
)  # fmt: skip
COMPARISON_COLUMNS = (
    "model", "reference", "method", "keep_ratio", "step", "stratum", "metric", "difference", "low", "high", "ratio",
    "ratio_low", "ratio_high", "p", "p_holm", "verdict", "num_examples", "num_documents", "num_seeds", "primary",
    "warning",
)  # fmt: skip
_NONE = Estimate(np.nan, np.nan, np.nan)
_Key = tuple[str, str, float, int | None, str]  # model, method, keep ratio, step, stratum


def summarise(records: Iterable[Record], *, num_resamples: int = 10_000, seed: int = 0) -> pd.DataFrame:
    """One row per model, method, keep ratio, step, stratum and metric, with a 95 % interval.

    Columns: model, method (with its options), keep_ratio, step (missing for a method without steps),
    stratum ("" is all examples), metric (a name in ``METRICS``), value, low, high (NaN where there is
    no interval), num_examples, num_documents, num_seeds, baseline (scored without compression).

    Several seeds of a compressor count as their mean. Models called ``LABEL@SEED`` are training runs
    of one variant: the row of LABEL is their mean, and its interval resamples runs and documents.
    Otherwise intervals resample documents alone and say nothing of other training runs.

    Args:
        records: of one data set.
        num_resamples: of the bootstrap.
        seed: of the bootstrap.

    Raises:
        InputError: records of two data sets; one label for two sets of weights.
    """
    rows: list[tuple[Any, ...]] = []
    for key, cell in _cells(records).items():
        sample = _Sample(cell, sorted(set.intersection(*map(set, cell.values()))), num_resamples, seed)
        for metric in sample.metrics:
            figure = sample.estimate(metric)
            numbers = (figure.value, figure.low, figure.high, *sample.sizes)
            rows.append((*key, metric, *numbers, key[1] in BASELINES))
    return _frame(rows, SUMMARY_COLUMNS)


def compare_models(
    records: Iterable[Record],
    reference: str,
    *,
    primary: Mapping[str, Any] | None = None,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> pd.DataFrame:
    """Every other model against a reference, on the examples that both have.

    Columns: model, reference, method, keep_ratio, step, stratum, metric; difference (model minus
    reference), low, high; ratio, ratio_low, ratio_high (model over reference; NaN where a ratio means
    nothing); p; p_holm; verdict ("better", "worse" or "level"); num_examples, num_documents,
    num_seeds (of the model); primary; warning (what so few examples cannot tell, or "").

    A verdict other than "level" needs an interval without 0, and of right or wrong answers
    p <= 0.05 as well. p_holm corrects over all rows of one model, metric and level (all examples or
    strata) but the primary one; those rows are exploratory. p is the bootstrap's; for shares it is the
    larger of Agresti and Min's and, where every score is right or wrong, McNemar's exact p.

    Args:
        records: of one data set and at least two models.
        reference: label of a model, without ``@SEED``.
        primary: the one cell that was named before the run, by method (with options), keep_ratio and
            metric, as in the folder's configuration; its p is not corrected.
        num_resamples: of the bootstrap.
        seed: of the bootstrap.

    Raises:
        InputError: no records of the reference; otherwise as ``summarise``.
    """
    cells = _cells(records)
    if reference not in (labels := {key[0] for key in cells}):
        raise InputError(f"no records of model {reference!r}; there are {', '.join(sorted(labels))}")
    rows: list[tuple[Any, ...]] = []
    for key, cell in cells.items():
        other = cells.get((reference, *key[1:]), {})
        if key[0] == reference or not other:
            continue
        common = sorted(set.intersection(*map(set, cell.values()), *map(set, other.values())))
        if common:
            ours, theirs = (_Sample(own, common, num_resamples, seed) for own in (cell, other))
            rows += [(key[0], reference, *key[1:], *row) for row in _compare(ours, theirs)]
    frame = _frame(rows, COMPARISON_COLUMNS)
    frame["primary"] = _is_primary(frame, primary)
    tested = frame[~frame["primary"]]
    for _, group in tested.groupby(["model", "metric", tested["stratum"] == ""], sort=False):
        frame.loc[group.index, "p_holm"] = holm(np.asarray(group["p"], dtype=float))
    return frame


def comparison_pairs(models: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs (model, reference) worth a comparison.

    With models called ``control`` or ``base``: every other model against the control, then against the base, then the
    control against the base. Otherwise every later model against the first.
    """
    references = [name for name in ("control", "base") if name in models]
    if not references:
        return [(model, models[0]) for model in models[1:]]
    pairs = [(model, reference) for reference in references for model in models if model not in references]
    return pairs + [("control", "base")] * (len(references) == 2)


@dataclass(frozen=True)
class _Sample:
    """One model's values on some examples; a row per training seed.

    ``records`` is seed to example to records, which differ in the compressor's seed.
    """

    records: Mapping[str, Mapping[tuple[str, str], Sequence[Record]]]
    examples: Sequence[tuple[str, str]]
    num_resamples: int
    seed: int

    @property
    def documents(self) -> list[str]:
        return [document for document, _ in self.examples]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Examples, documents, training seeds."""
        return len(self.examples), self.bootstrap.num_documents, len(self.records)

    @cached_property
    def bootstrap(self) -> ClusterBootstrap:
        first = next(iter(self.records.values()))
        strata = [first[example][0].stratum for example in self.examples]
        return ClusterBootstrap(
            self.documents, strata=strata, seeds=sorted(self.records), num_resamples=self.num_resamples, seed=self.seed
        )

    @cached_property
    def columns(self) -> dict[str, np.ndarray]:
        """Every value that all records have, seeds by examples."""
        rows = [[self.records[seed][example] for example in self.examples] for seed in sorted(self.records)]
        names = set.intersection(*(set(record.values) for row in rows for own in row for record in own))
        columns = {
            name: np.array([[sum(record.values[name] for record in own) / len(own) for own in row] for row in rows])
            for name in sorted(names)
        }
        if {"delta_nll", "context_gain", "num_tokens", "num_predicted"} <= names:
            columns["lost"] = columns["delta_nll"] * columns["num_tokens"]
            columns["gained"] = columns["context_gain"] * columns["num_predicted"]
        if {"exact_match", "dense_exact_match"} <= names:
            columns["native_match"] = columns["exact_match"] * columns["dense_exact_match"]
        return columns

    @property
    def metrics(self) -> list[str]:
        """Metrics that these columns can give."""
        return [name for name, metric in METRICS.items() if set(metric.columns) <= self.columns.keys()]

    def estimate(self, name: str) -> Estimate:
        """A figure with its interval."""
        metric = METRICS[name]
        drawn = self.bootstrap.estimate(metric.draws(self.bootstrap, self.columns))
        if name == "retention" and not (gain := self.bootstrap.mean(self.columns["gained"])).low > 0.0 < gain.value:
            return _NONE
        if not metric.share:
            return drawn
        score = self.columns[metric.columns[0]].mean(0)
        counted = self.columns[metric.columns[1]].mean(0) > 0 if len(metric.columns) > 1 else np.ones(len(score), bool)
        if not counted.any():
            return _NONE
        if len(self.records) > 1:  # Wilson's interval does not know of training seeds
            wide = share(score, self.documents)
            return Estimate(drawn.value, float(np.fmin(drawn.low, wide.low)), float(np.fmax(drawn.high, wide.high)))
        return share(score[counted], [self.documents[i] for i in np.flatnonzero(counted)])


def _compare(ours: _Sample, theirs: _Sample) -> list[tuple[Any, ...]]:
    """A row per metric, from difference on."""
    rows = []
    bootstrap = ours.bootstrap
    for name in [name for name in ours.metrics if name in theirs.metrics]:
        metric = METRICS[name]
        mine, other = metric.draws(bootstrap, ours.columns), metric.draws(theirs.bootstrap, theirs.columns)
        difference, p = bootstrap.estimate(mine - other), bootstrap.p_value(mine - other)
        ratio = bootstrap.estimate(mine / other) if metric.ratio else _NONE
        warning = ""
        if metric.share and len(metric.columns) == 1:
            first, second = ours.columns[name].mean(0), theirs.columns[name].mean(0)
            wide, p_share = share_difference(first, second, ours.documents)
            if max(len(ours.records), len(theirs.records)) == 1:
                difference, p = wide, p_share
            else:
                low, high = np.fmin(difference.low, wide.low), np.fmax(difference.high, wide.high)
                difference, p = Estimate(difference.value, float(low), float(high)), float(np.fmax(p, p_share))
            if set(np.unique([first, second])) <= {0.0, 1.0}:
                test = mcnemar(first, second)
                p, warning = max(p, test.p), cannot_tell(test, difference.value, *ours.sizes[:2])
        elif metric.share:
            difference, p = _unpaired(ours.estimate(name), theirs.estimate(name)), np.nan
        verdict = _verdict(difference, p, metric.lower_is_better, share=metric.share)
        rows.append((
            name, difference.value, difference.low, difference.high, ratio.value, ratio.low, ratio.high, p, np.nan,
            verdict, *ours.sizes, False, warning,
        ))  # fmt: skip
    return rows


def _unpaired(first: Estimate, second: Estimate) -> Estimate:
    """Difference of shares of different examples from their two intervals, as if they were independent.

    References: Newcombe 1998, "Interval estimation for the difference between independent proportions".
    """
    value = first.value - second.value
    low = value - np.hypot(first.value - first.low, second.high - second.value)
    return Estimate(value, float(low), float(value + np.hypot(first.high - first.value, second.value - second.low)))


def _verdict(difference: Estimate, p: float, lower_is_better: bool | None, *, share: bool) -> str:
    if lower_is_better is None or not difference.excludes(0.0) or (share and p > 0.05):
        return "level"
    return "better" if (difference.value < 0.0) == lower_is_better else "worse"


def _is_primary(frame: pd.DataFrame, primary: Mapping[str, Any] | None) -> pd.Series:
    """The rows of the primary cell: all examples, the last step."""
    if primary is None or frame.empty:
        return pd.Series(False, index=frame.index)
    found = (frame["stratum"] == "") & frame["method"].eq(primary["method"])
    found &= frame["metric"].eq(primary["metric"]) & np.isclose(frame["keep_ratio"], primary["keep_ratio"])
    last = frame[found]["step"].max()
    return found & (frame["step"].isna() if pd.isna(last) else frame["step"].eq(last).fillna(False))


def _cells(records: Iterable[Record]) -> dict[_Key, dict[str, dict[tuple[str, str], list[Record]]]]:
    """Records by cell, then training seed, then (document, example); strata after all examples."""
    known = list(records)
    models_of(known)
    if len(datasets := sorted({record.dataset for record in known})) > 1:
        raise InputError(f"records of two data sets: {datasets[0]!r} and {datasets[1]!r}")
    strata = list(dict.fromkeys(record.stratum for record in known))
    cells: dict[_Key, dict[str, dict[tuple[str, str], list[Record]]]] = {}
    for record in known:
        model, _, run = record.model.partition("@")
        label = record.method_label
        for stratum in {"", record.stratum} if len(strata) > 1 else {""}:
            cell = cells.setdefault((model, label, record.keep_ratio, record.step, stratum), {})
            cell.setdefault(run, {}).setdefault((record.document, record.example), []).append(record)
    ranks = [{name: rank for rank, name in enumerate(dict.fromkeys(key[i] for key in cells))} for i in (0, 1)]
    place = {name: rank for rank, name in enumerate(["", *strata])}

    def order(key: _Key) -> tuple[Any, ...]:
        model, method, keep_ratio, step, stratum = key
        return place[stratum], ranks[0][model], ranks[1][method], keep_ratio, -1 if step is None else step

    return {key: cells[key] for key in sorted(cells, key=order)}


def _frame(rows: Sequence[tuple[Any, ...]], columns: Sequence[str]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=list(columns)).astype({"step": "Int64"})
