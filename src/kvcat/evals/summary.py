"""Records to figures: one row per model, method, keep ratio and step, and paired rows between models."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from kvcat.errors import InputError
from kvcat.evals.metrics import METRICS, Columns
from kvcat.evals.records import Record
from kvcat.evals.statistics import ClusterBootstrap, Estimate

Verdict = Literal["better", "worse", "not distinguishable"]
_VALUES = ("nll", "nll_dense", "nll_none", "delta_nll", "delta_ppl", "kl", "top1", "context_gain")


@dataclass(frozen=True)
class SummaryRow:
    """Every metric of one model under one method, keep ratio and step.

    Args:
        dataset: name of the data set.
        model: label of the model.
        method: name of the method with its options.
        keep_ratio: fraction kept, in (0, 1].
        step: gradient steps, or None.
        num_windows: windows averaged over.
        num_documents: documents they come from.
        metrics: metric name to figure with interval.
    """

    dataset: str
    model: str
    method: str
    keep_ratio: float
    step: int | None
    num_windows: int
    num_documents: int
    metrics: Mapping[str, Estimate] = field(repr=False)

    def __getitem__(self, metric: str) -> Estimate:
        return self.metrics[metric]


@dataclass(frozen=True)
class ComparisonRow:
    """One model against another on the same windows: every metric's difference, and the ratio of KL.

    Args:
        dataset: name of the data set.
        model: label of the model judged.
        reference: label of the model it is compared with.
        method: name of the method with its options.
        keep_ratio: fraction kept, in (0, 1].
        step: gradient steps, or None.
        num_windows: windows that both models have.
        num_documents: documents they come from.
        differences: metric name to model minus reference.
        kl_ratio: KL of the model over KL of the reference.
    """

    dataset: str
    model: str
    reference: str
    method: str
    keep_ratio: float
    step: int | None
    num_windows: int
    num_documents: int
    differences: Mapping[str, Estimate] = field(repr=False)
    kl_ratio: Estimate

    def verdict(self, metric: str) -> Verdict:
        """Whether the model is better in a metric: decided only where the interval of the difference excludes 0."""
        difference = self.differences[metric]
        if not difference.excludes(0.0):
            return "not distinguishable"
        return "better" if (difference.value < 0.0) == (METRICS[metric].better == "lower") else "worse"


def summarise(records: Iterable[Record], *, num_resamples: int = 10_000, seed: int = 0) -> list[SummaryRow]:
    """Rows in the order of models and methods in the records, then by keep ratio and step.

    Args:
        records: of any number of models and methods; a row never mixes data sets.
        num_resamples: of the bootstrap.
        seed: of the bootstrap.
    """
    rows = []
    for (dataset, model, method, keep_ratio, step), windows in _cells(records).items():
        ordered = [windows[name] for name in sorted(windows)]
        bootstrap = ClusterBootstrap([r.document for r in ordered], num_resamples=num_resamples, seed=seed)
        columns = _columns(ordered)
        metrics = {name: bootstrap.estimate(metric.draws(bootstrap, columns)) for name, metric in METRICS.items()}
        sizes = (bootstrap.num_windows, bootstrap.num_documents)
        rows.append(SummaryRow(dataset, model, method, keep_ratio, step, *sizes, metrics))
    return rows


def compare_models(
    records: Iterable[Record],
    pairs: Sequence[tuple[str, str]] | None = None,
    *,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> list[ComparisonRow]:
    """Paired rows (model, reference) on the windows that both have, pair by pair.

    Args:
        records: of two or more models.
        pairs: labels (model, reference); None takes ``comparison_pairs`` of the models in the records.
        num_resamples: of the bootstrap.
        seed: of the bootstrap.
    """
    cells = _cells(records)
    if pairs is None:
        pairs = comparison_pairs(list(dict.fromkeys(model for _, model, *_ in cells)))
    rows = []
    for model, reference in pairs:
        for (dataset, label, method, keep_ratio, step), windows in cells.items():
            other = cells.get((dataset, reference, method, keep_ratio, step), {}) if label == model else {}
            common = sorted(windows.keys() & other.keys())
            if common:
                ours, theirs = [windows[name] for name in common], [other[name] for name in common]
                rows.append(_compare(ours, theirs, num_resamples, seed))
    return rows


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


def _compare(ours: list[Record], theirs: list[Record], num_resamples: int, seed: int) -> ComparisonRow:
    bootstrap = ClusterBootstrap([r.document for r in ours], num_resamples=num_resamples, seed=seed)
    mine, other = _columns(ours), _columns(theirs)
    differences = {
        name: bootstrap.estimate(metric.draws(bootstrap, mine) - metric.draws(bootstrap, other))
        for name, metric in METRICS.items()
    }
    ratio = METRICS["kl"].draws(bootstrap, mine) / METRICS["kl"].draws(bootstrap, other)
    first = ours[0]
    return ComparisonRow(
        first.dataset, first.model, theirs[0].model, first.method_label, first.keep_ratio, first.step,
        bootstrap.num_windows, bootstrap.num_documents, differences, bootstrap.estimate(ratio),
    )  # fmt: skip


def _cells(records: Iterable[Record]) -> dict[tuple[str, str, str, float, int | None], dict[tuple[str, str], Record]]:
    """Records by (data set, model, method, keep ratio, step), then by (document, window)."""
    cells: dict[tuple[str, str, str, float, int | None], dict[tuple[str, str], Record]] = {}
    for record in records:
        cell = (record.dataset, record.model, record.method_label, record.keep_ratio, record.step)
        cells.setdefault(cell, {})[record.document, record.window] = record
    ranks = [{name: rank for rank, name in enumerate(dict.fromkeys(cell[i] for cell in cells))} for i in range(3)]
    order = sorted(cells, key=lambda c: (*(ranks[i][c[i]] for i in range(3)), c[3], -1 if c[4] is None else c[4]))
    return {cell: cells[cell] for cell in order}


def _columns(records: list[Record]) -> Columns:
    for record in records:
        if missing := [name for name in _VALUES if name not in record.values]:
            raise InputError(f"the record of window {record.window} of {record.document} has no {missing[0]}")
    columns = {name: np.array([r.values[name] for r in records], dtype=np.float64) for name in _VALUES}
    tokens = np.array([r.suffix_len for r in records], dtype=np.float64)
    return {
        **columns,
        "lost": columns["delta_nll"] * tokens,
        "gained": columns["context_gain"] * (tokens - 1.0),
    }
