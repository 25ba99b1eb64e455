"""The analysis of an evaluation's records, computed once for every table and plot."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from kvcat.evals.ability import below_chance_in
from kvcat.evals.registry import all_metrics, find_evaluation
from kvcat.stats.records import Record
from kvcat.stats.samples import record_table, samples_by_cell
from kvcat.stats.steps import steps_to_level
from kvcat.stats.summary import (
    COMPARISON,
    comparison_pairs,
    comparisons_with,
    summary_of,
)
from kvcat.stats.summary import compare_models as compare_models
from kvcat.stats.summary import summarise as summarise

METRICS = all_metrics()  # tables show the metrics of every evaluation


@dataclass(frozen=True)
class Analysis:
    """Summary, comparisons and abilities from one results folder; model names lack ``@SEED``."""

    models: list[str]  # in the order of the records
    summary: pd.DataFrame = field(repr=False)  # the table of ``summarise``
    pairs: list[tuple[str, str]]  # (model, reference) that are compared
    comparisons: pd.DataFrame = field(repr=False)  # the tables of ``compare_models``, by pair
    steps: pd.DataFrame = field(repr=False)  # the table of ``steps_to_level``
    below_chance: dict[str, str]  # reason by model (``models_below_chance``)


def analyse(
    records: Iterable[Record], config: Mapping[str, Any], *, num_resamples: int = 10_000
) -> Analysis:
    """The summary, comparisons and abilities of all models in the records.

    Args:
        records: records of one results folder, at least one.
        config: the folder's configuration, which names the primary cell.

    Raises:
        InputError: as in ``summarise``.
    """
    table = record_table(records)
    samples = samples_by_cell(table, num_resamples)
    summary = summary_of(samples)
    models = list(dict.fromkeys(summary["model"]))
    pairs = comparison_pairs(models)
    primary = config.get("primary")
    references = dict.fromkeys(reference for _, reference in pairs)
    compared = {name: comparisons_with(samples, name, primary) for name in references}
    frames = []
    for model, reference in pairs:
        frame = compared[reference]
        frames.append(frame[frame["model"] == model])
    comparisons = pd.DataFrame(columns=list(COMPARISON))
    if frames:
        comparisons = pd.concat(frames, ignore_index=True)
    facts = find_evaluation(config["evaluation"]).facts
    steps = steps_to_level(samples, pairs, facts.step_metrics or (facts.deciding,))
    reasons = {}
    for label, reason in below_chance_in(table).items():
        model, _, _ = label.partition("@")
        reasons[model] = reason
    return Analysis(models, summary, pairs, comparisons, steps, reasons)
