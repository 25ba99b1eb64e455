"""Models that are not shown to perform above chance, so that their figures are not results."""

from collections.abc import Iterable

import numpy as np
import pandas as pd

from kvcat.stats.intervals import ClusterBootstrap
from kvcat.stats.metrics import METRICS
from kvcat.stats.records import Record
from kvcat.stats.samples import EXAMPLE, record_table
from kvcat.stats.shares import share

FEWEST_DOCUMENTS = 20
"""The smallest number of documents on which a share of right answers can show an ability."""


def models_below_chance(records: Iterable[Record]) -> dict[str, str]:
    """Labels of the models that are not shown to perform above chance, each with the reason.

    A model performs above chance if, on the whole cache, the 95 % interval of its score lies above
    chance on at least ``FEWEST_DOCUMENTS`` documents. In text prediction, the interval of its
    context gain must lie above 0, because a model that does not use its prefix loses nothing.
    """
    return below_chance_in(record_table(records))


def below_chance_in(table: pd.DataFrame) -> dict[str, str]:
    """``models_below_chance`` for a ``record_table``."""
    reasons = {}
    for label, rows in table.groupby("label", sort=False):
        reason = _inability(rows.dropna(axis=1, how="all"))
        if reason:
            reasons[str(label)] = reason
    return reasons


def _inability(rows: pd.DataFrame) -> str:
    """The reason why a model is not shown to perform above chance; empty if it is."""
    metrics = [name for name, metric in METRICS.items() if metric.shows_ability and name in rows]
    metrics.sort(key=lambda name: not METRICS[name].share)  # right answers first
    if not metrics:
        return "no score with the whole cache was recorded"
    name = metrics[0]
    return _low_share(rows, name) if METRICS[name].share else _low_mean(rows, name)


def _low_mean(rows: pd.DataFrame, name: str) -> str:
    """The reason why the mean of a value is not clearly above chance; empty if it is."""
    metric = METRICS[name]
    examples = rows.drop_duplicates(EXAMPLE, keep="last")
    bootstrap = ClusterBootstrap(examples["document"].to_numpy(dtype=str))
    mean = bootstrap.mean(examples[name].to_numpy())
    if mean.low > metric.chance:
        return ""
    interval = "" if np.isnan(mean.low) else f" [{mean.low:.3g}, {mean.high:.3g}]"
    figure = f"{metric.label} {mean.value:.3g}{interval} {metric.unit}"
    return f"{figure} is not clearly above {metric.chance:g}"


def _low_share(rows: pd.DataFrame, name: str) -> str:
    """The reason why the share of right dense answers is not above chance; empty if it is."""
    metric = METRICS[name]
    if metric.dense_metric in rows:
        column = metric.dense_metric
        scored = rows
    else:
        column = name
        scored = rows[rows["method"] == "dense"]
    examples = scored.drop_duplicates(EXAMPLE, keep="last")
    num_documents = examples["document"].nunique()
    if num_documents < FEWEST_DOCUMENTS:
        return f"{num_documents} documents with a dense score, fewer than {FEWEST_DOCUMENTS}"
    chances = [metric.chance_by_stratum.get(name, metric.chance) for name in examples["stratum"]]
    chance = float(np.mean(chances))
    estimate = share(examples[column].to_numpy(), examples["document"].to_numpy(dtype=str))
    if estimate.low > chance:
        return ""
    interval = f"[{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"
    figure = f"dense {metric.label} {100 * estimate.value:.1f} % {interval}"
    return f"{figure} on {num_documents} documents is not above chance, {100 * chance:.0f} %"
