"""The content of a results folder for a report: rows of figures, comparisons and costs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvcat import evals
from kvcat.errors import InputError
from kvcat.evals.records import read_folder
from kvcat.report.paper import Paper
from kvcat.report.rows import (
    average_rows,
    cost_rows,
    incomplete,
    labelled,
    mixed_sources,
    pair_rows,
    plain_steps,
    table_rows,
    with_verdicts,
)
from kvcat.settings import DEFAULT_METHOD

NOT_A_RESULT = " [not a result]"
"""The suffix of the labels of models that are not shown to perform above chance."""
HEADLINE_KEEP = 0.1
"""The keep ratio of the first figures on a page, or the one nearest to it."""


@dataclass(frozen=True)
class Results:
    """The content of one results folder, with every row that a report shows."""

    folder: Path
    config: Mapping[str, Any]
    models: list[str]  # labels in order; some have the suffix ``NOT_A_RESULT``
    pairs: list[tuple[str, str]]  # (model, reference) in the order of the report
    warnings: list[str]  # shown to the reader first
    # from ``analyse``, with each figure's verdict against the first reference
    summary: pd.DataFrame = field(repr=False)
    comparisons: pd.DataFrame = field(repr=False)  # from ``analyse``
    rows: pd.DataFrame = field(repr=False)  # see ``table_rows``
    averages: pd.DataFrame = field(repr=False)  # see ``average_rows``
    pair_rows: dict[tuple[str, str], pd.DataFrame] = field(repr=False)  # see ``pair_rows``
    steps: pd.DataFrame = field(repr=False)  # from ``analyse``
    costs: pd.DataFrame = field(repr=False)  # see ``cost_rows``
    events: list[dict[str, Any]] = field(repr=False)  # lines of provenance.jsonl
    paper_note: str  # note if the paper used other data; else empty
    name: str = ""  # unique among the folders of a report

    @property
    def evaluation(self) -> evals.ReportFacts:
        """Facts about the evaluation for the report."""
        return evals.find_evaluation(self.config["evaluation"]).facts

    @property
    def metrics(self) -> list[str]:
        """The evaluation's metrics that the records define."""
        recorded = set(self.summary["metric"])
        return [name for name in self.evaluation.metrics if name in recorded]

    def compressed(self, rows: pd.DataFrame) -> pd.DataFrame:
        """The rows over all strata for compressed caches; for baselines if there are none."""
        whole = rows[rows["stratum"] == ""]
        return whole if whole["baseline"].all() else whole[~whole["baseline"]]

    @property
    def whole(self) -> pd.DataFrame:
        """The summary over all strata, for compressed caches if there are any."""
        return self.compressed(self.summary)

    @property
    def methods(self) -> list[str]:
        """The compression methods, the default first; empty if nothing was compressed."""
        names = list(dict.fromkeys(self.whole.loc[~self.whole["baseline"], "method"]))
        return sorted(names, key=lambda name: not name.startswith(DEFAULT_METHOD))

    @property
    def cell(self) -> tuple[str, float, int]:
        """The method, keep ratio and step of the first figures on the page.

        This is the primary cell if it was compared or named, else the first method at about 10 %.
        """
        rows = self.compressed(self.rows)
        rows = rows[rows["final"]]
        primary = self.config.get("primary") or {}
        if self.comparisons["primary"].any():
            rows = self.comparisons[self.comparisons["primary"]]
        elif primary.get("named"):
            is_method = rows["method"] == primary["method"]
            in_cell = is_method & np.isclose(rows["keep_ratio"], primary["keep_ratio"])
            rows = rows[in_cell] if in_cell.any() else rows
        elif self.methods:
            rows = rows[rows["method"] == self.methods[0]]
        row = rows[rows["keep_ratio"] == nearest(rows["keep_ratio"], HEADLINE_KEEP)].iloc[0]
        return row["method"], row["keep_ratio"], int(row["step"])


def read_results(
    folder: Path, paper_model: str | None = None, *, num_resamples: int = 10_000
) -> Results:
    """All contents of a results folder that a report shows.

    Args:
        paper_model: the paper's model that ours correspond to; its figures are then in the tables.

    Raises:
        InputError: it is not a results folder, has no records or damaged content, or the paper has
            no such model.
    """
    stored = read_folder(folder)
    config = stored.config
    evaluation = evals.find_evaluation(config["evaluation"])
    facts = evaluation.facts
    if not stored.records:
        raise InputError(f"{folder} has no records yet")
    if not all(facts.deciding in record.values for record in stored.records):
        raise InputError(
            f"{folder} has a record without {facts.deciding!r}, which "
            f"{config['evaluation']} measures"
        )
    paper = Paper(paper_model, evaluation.paper, config["dataset"])
    analysis = evals.analyse(stored.records, config, num_resamples=num_resamples)
    labels = {}
    for model in analysis.models:
        labels[model] = model + (NOT_A_RESULT if model in analysis.below_chance else "")
    models = list(labels.values())
    pairs = [(labels[model], labels[reference]) for model, reference in analysis.pairs]
    comparisons = labelled(plain_steps(analysis.comparisons), labels)
    summary = labelled(plain_steps(analysis.summary), labels)
    summary = with_verdicts(summary, comparisons, pairs)
    rows = table_rows(summary, models, facts, paper)
    warnings = [f"Not a result, {model}: {why}." for model, why in analysis.below_chance.items()]
    return Results(
        folder=folder,
        config=config,
        models=models,
        pairs=pairs,
        warnings=[*warnings, *incomplete(stored, labels), *mixed_sources(stored, labels)],
        summary=summary,
        comparisons=comparisons,
        rows=rows,
        averages=average_rows(rows, facts, paper),
        pair_rows=pair_rows(summary, comparisons, pairs, facts),
        steps=labelled(analysis.steps, labels),
        costs=labelled(cost_rows(stored.costs), labels),
        events=stored.events,
        paper_note=paper.note,
    )


def nearest(keep_ratios: pd.Series, wanted: float) -> float:
    """The keep ratio that is nearest to the wanted one, by their quotient."""
    return min(keep_ratios, key=lambda keep: abs(math.log(max(keep, 1e-9) / wanted)))
