"""Records to figures: one row per model, method, keep ratio and step, and paired rows between models."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from kvcat.evals.records import Record, models_of
from kvcat.evals.rows_metrics import METRICS, Columns
from kvcat.evals.statistics import ClusterBootstrap, Estimate, McNemar, cannot_tell, mcnemar
from kvcat.evals.summary import comparison_pairs

Verdict = Literal["better", "worse", "not distinguishable"]
RATIOS = ("kl", "delta_ppl", "delta_nll")
Cell = tuple[str, str, str, str, float, int | None]


@dataclass(frozen=True)
class SummaryRow:
    """Every metric of one model under one method, keep ratio and step; several seeds count as their mean.

    Args:
        dataset: name of the data set.
        stratum: group of examples, empty for all.
        model: label of the model.
        method: name of the method with its options.
        keep_ratio: fraction kept, in (0, 1].
        step: gradient steps, or None.
        num_examples: examples averaged over.
        num_documents: documents they come from.
        metrics: metric name to figure with interval.
    """

    dataset: str
    stratum: str
    model: str
    method: str
    keep_ratio: float
    step: int | None
    num_examples: int
    num_documents: int
    metrics: Mapping[str, Estimate] = field(repr=False)

    def __getitem__(self, metric: str) -> Estimate:
        return self.metrics[metric]


@dataclass(frozen=True)
class ComparisonRow:
    """One model against another on the same examples: every metric's difference, and ratios.

    Args:
        dataset: name of the data set.
        stratum: group of examples, empty for all.
        model: label of the model judged.
        reference: label of the model it is compared with.
        method: name of the method with its options.
        keep_ratio: fraction kept, in (0, 1].
        step: gradient steps, or None.
        num_examples: examples that both models have.
        num_documents: documents they come from.
        differences: metric name to model minus reference.
        ratios: metric name to model over reference, for those of ``RATIOS`` that the records hold.
        tests: metric name to McNemar's test, for those that are right or wrong; ``only_first`` counts the model's.
            Means over several seeds are neither and have none.
        warning: what so many examples cannot tell of the first of these; empty where they carry it.
    """

    dataset: str
    stratum: str
    model: str
    reference: str
    method: str
    keep_ratio: float
    step: int | None
    num_examples: int
    num_documents: int
    differences: Mapping[str, Estimate] = field(repr=False)
    ratios: Mapping[str, Estimate] = field(repr=False)
    tests: Mapping[str, McNemar] = field(default_factory=dict, repr=False)
    warning: str = ""

    @property
    def kl_ratio(self) -> Estimate:
        """KL of the model over KL of the reference."""
        return self.ratios["kl"]

    def verdict(self, metric: str) -> Verdict:
        """Whether the model is better in a metric: decided only where the interval of the difference excludes 0.

        Where the outcome is right or wrong McNemar's exact p must be below .05 as well: with few differing examples
        the interval is too narrow, and with several examples to a document the test takes them for independent.
        """
        difference = self.differences[metric]
        if not difference.excludes(0.0) or (metric in self.tests and self.tests[metric].p > 0.05):
            return "not distinguishable"
        return "better" if (difference.value < 0.0) == (METRICS[metric].better == "lower") else "worse"


def summarise(
    records: Iterable[Record], *, by_stratum: bool = False, num_resamples: int = 10_000, seed: int = 0
) -> list[SummaryRow]:
    """Rows in the order of models and methods in the records, then by keep ratio and step.

    Args:
        records: of any number of models and methods; a row never mixes data sets.
        by_stratum: a row per stratum instead of one for all.
        num_resamples: of the bootstrap.
        seed: of the bootstrap.
    """
    rows = []
    for cell, examples in _cells(records, by_stratum).items():
        bootstrap, columns, documents = _columns([examples[name] for name in sorted(examples)], num_resamples, seed)
        metrics = {name: METRICS[name].estimate(bootstrap, columns, documents) for name in _known(columns)}
        if "retention" in metrics and (metrics["context_gain"].value <= 0 or metrics["context_gain"].low <= 0):
            metrics["retention"] = Estimate(np.nan, np.nan, np.nan)
        rows.append(SummaryRow(*cell, bootstrap.num_windows, bootstrap.num_documents, metrics))
    return rows


def compare_models(
    records: Iterable[Record],
    pairs: Sequence[tuple[str, str]] | None = None,
    *,
    by_stratum: bool = False,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> list[ComparisonRow]:
    """Paired rows (model, reference) on the examples that both have, pair by pair.

    Args:
        records: of two or more models.
        pairs: labels (model, reference); None takes ``comparison_pairs`` of the models in the records.
        by_stratum: a row per stratum instead of one for all.
        num_resamples: of the bootstrap.
        seed: of the bootstrap.
    """
    cells = _cells(records, by_stratum)
    if pairs is None:
        pairs = comparison_pairs(list(dict.fromkeys(cell[2] for cell in cells)))
    rows = []
    for model, reference in pairs:
        for (dataset, stratum, label, *work), examples in cells.items():
            other = cells.get((dataset, stratum, reference, *work), {}) if label == model else {}  # type: ignore[arg-type]
            common = sorted(examples.keys() & other.keys())
            if common:
                ours = _columns([examples[name] for name in common], num_resamples, seed)
                theirs = _columns([other[name] for name in common], num_resamples, seed)
                rows.append(_compare((dataset, stratum, label, reference, *work), ours, theirs))  # type: ignore[arg-type]
    return rows


def _compare(
    cell: tuple[str, str, str, str, str, float, int | None],
    ours: tuple[ClusterBootstrap, Columns, list[str]],
    theirs: tuple[ClusterBootstrap, Columns, list[str]],
) -> ComparisonRow:
    (bootstrap, mine, _), (_, other, _) = ours, theirs
    differences = {
        name: bootstrap.estimate(METRICS[name].draws(bootstrap, mine) - METRICS[name].draws(bootstrap, other))
        for name in _known(mine)
        if name in _known(other)
    }
    ratios = {
        name: bootstrap.estimate(METRICS[name].draws(bootstrap, mine) / METRICS[name].draws(bootstrap, other))
        for name in RATIOS
        if name in differences
    }
    tests = {
        name: mcnemar(mine[name], other[name])
        for name in differences
        if METRICS[name].binary and name in mine and set(np.unique([mine[name], other[name]])) <= {0.0, 1.0}
    }
    sizes = (bootstrap.num_windows, bootstrap.num_documents)
    warning = next((cannot_tell(test, differences[name].value, *sizes) for name, test in tests.items()), "")
    return ComparisonRow(*cell, *sizes, differences, ratios, tests, warning)


def _cells(records: Iterable[Record], by_stratum: bool) -> dict[Cell, dict[tuple[str, str], list[Record]]]:
    """Records by (data set, stratum, model, method, keep ratio, step), then by (document, example), one per seed."""
    cells: dict[Cell, dict[tuple[str, str], list[Record]]] = {}
    known = list(records)
    models_of(known)
    for record in known:
        stratum = record.stratum if by_stratum else ""
        cell = (record.dataset, stratum, record.model, record.method_label, record.keep_ratio, record.step)
        cells.setdefault(cell, {}).setdefault((record.document, record.example), []).append(record)
    ranks = [{name: rank for rank, name in enumerate(dict.fromkeys(cell[i] for cell in cells))} for i in range(4)]
    order = sorted(cells, key=lambda c: (*(ranks[i][c[i]] for i in range(4)), c[4], -1 if c[5] is None else c[5]))
    return {cell: cells[cell] for cell in order}


def _columns(
    examples: Sequence[Sequence[Record]], num_resamples: int, seed: int
) -> tuple[ClusterBootstrap, dict[str, np.ndarray], list[str]]:
    """Bootstrap over the documents within strata, every value that all records have (means over seeds), documents."""
    names = set.intersection(*(set(record.values) for records in examples for record in records))
    columns = {
        name: np.array([sum(record.values[name] for record in records) / len(records) for records in examples])
        for name in sorted(names)
    }
    if {"delta_nll", "context_gain", "num_tokens", "num_predicted"} <= names:
        columns["lost"] = columns["delta_nll"] * columns["num_tokens"]
        columns["gained"] = columns["context_gain"] * columns["num_predicted"]
    if {"exact_match", "dense_exact_match"} <= names:
        columns["native_match"] = columns["exact_match"] * columns["dense_exact_match"]
    documents, strata = ([getattr(records[0], name) for records in examples] for name in ("document", "stratum"))
    bootstrap = ClusterBootstrap(documents, strata=strata, num_resamples=num_resamples, seed=seed)
    return bootstrap, columns, documents


def _known(columns: Columns) -> list[str]:
    """Metrics that these columns can give."""
    return [name for name, metric in METRICS.items() if set(metric.columns) <= columns.keys()]
