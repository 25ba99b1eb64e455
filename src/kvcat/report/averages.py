"""Averages over QA tasks with intervals: every task is resampled by itself, every task counts alike."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvcat.evals import ClusterBootstrap, Estimate, Record
from kvcat.evals.qa import AVERAGES, averages, task_accuracies
from kvcat.evals.statistics import Draws

_VALUE = "acc_per_char"


@dataclass(frozen=True)
class QAAverage:
    """An average of one model, or the difference of two on the same questions.

    Args:
        name: of ``AVERAGES``: six, seven or eight tasks.
        model: label of the model.
        reference: label of the model it is compared with; empty where the average itself is meant.
        estimate: share, or difference of shares.
        num_examples: questions of all its tasks.
    """

    name: str
    model: str
    reference: str
    estimate: Estimate
    num_examples: int


def qa_averages(records: Sequence[Record], pairs: Sequence[tuple[str, str]], *, seed: int = 0) -> list[QAAverage]:
    """Every average of every model whose tasks were all evaluated, then of every pair.

    Args:
        records: of a QA evaluation.
        pairs: labels (model, reference).
        seed: of the bootstrap.
    """
    models = {record.model: [r for r in records if r.model == record.model] for record in records}
    values = {label: averages(task_accuracies(own, _VALUE)) for label, own in models.items()}
    found = []
    for name, tasks in AVERAGES.items():
        draws = {label: _draws(own, tasks, seed) for label, own in models.items() if name in values[label]}
        count = {label: sum(record.stratum in tasks for record in own) for label, own in models.items()}
        for label, drawn in draws.items():
            found.append(QAAverage(name, label, "", _estimate(drawn), count[label]))
        for model, reference in pairs:
            if model in draws and reference in draws and _questions(models[model]) == _questions(models[reference]):
                difference = _estimate(draws[model] - draws[reference])
                found.append(QAAverage(name, model, reference, difference, count[model]))
    return found


def _draws(records: Sequence[Record], tasks: Sequence[str], seed: int) -> Draws:
    """The mean over tasks; one seed per task, or tasks of equal size would be resampled alike."""
    drawn = []
    for rank, task in enumerate(tasks):
        own = sorted((r for r in records if r.stratum == task), key=lambda r: (r.document, r.example))
        bootstrap = ClusterBootstrap([r.document for r in own], seed=seed + rank)
        drawn.append(bootstrap.of_means(lambda mean: mean, np.array([r.values[_VALUE] for r in own])))
    return Draws(
        float(np.mean([draws.value for draws in drawn])), np.mean([draws.resampled for draws in drawn], axis=0)
    )


def _estimate(draws: Draws) -> Estimate:
    low, high = np.quantile(draws.resampled, [0.025, 0.975], method="inverted_cdf")
    return Estimate(draws.value, float(low), float(high))


def _questions(records: Sequence[Record]) -> set[tuple[str, str, str]]:
    return {(record.stratum, record.document, record.example) for record in records}
