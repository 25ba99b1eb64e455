"""A results folder read for a report: rows of figures, comparisons and costs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvcat import evals
from kvcat.errors import InputError
from kvcat.evals.records import method_label
from kvcat.report.figures import (
    NO_STEP,
    Figure,
    difference_figure,
    ratio_figure,
    summary_figure,
)
from kvcat.report.paper import Paper

CELL = ["method", "keep_ratio", "step"]
NOT_A_RESULT = " [not a result]"
"""What the labels of models end in that do not show that they can do the task."""
_HEADLINE_KEEP_RATIO = 0.1
_SPEEDS = ["ttft", "ttft_dense", "tokens_per_s", "tokens_per_s_dense"]


@dataclass(frozen=True)
class Results:
    """One results folder, with every row that a report shows."""

    folder: Path
    config: Mapping[str, Any]
    models: list[str]  # labels in order, ``NOT_A_RESULT`` at the end of some
    pairs: list[tuple[str, str]]  # (model, reference) in the order of the report
    warnings: list[str]  # what a reader must know first
    summary: pd.DataFrame = field(
        repr=False
    )  # of ``analyse``, with verdicts on the first reference
    comparisons: pd.DataFrame = field(repr=False)  # of ``analyse``
    rows: pd.DataFrame = field(
        repr=False
    )  # the summary in the order of tables, see ``_table_rows``
    averages: pd.DataFrame = field(
        repr=False
    )  # the same over several strata, see ``_average_rows``
    pair_rows: dict[tuple[str, str], pd.DataFrame] = field(repr=False)  # see ``_pair_rows``
    costs: pd.DataFrame = field(repr=False)  # a row per model, method, keep ratio and step, or none
    events: list[dict[str, Any]] = field(repr=False)  # lines of provenance.jsonl
    paper_note: str  # that the paper used other data; else empty
    name: str = ""  # unique among the folders of a report

    @property
    def evaluation(self) -> evals.Evaluation:
        """What the report shows of the evaluation."""
        return evals.EVALUATIONS[self.config["evaluation"]]

    @property
    def metrics(self) -> list[str]:
        """The evaluation's metrics that the records give."""
        recorded = set(self.summary["metric"])
        return [name for name in self.evaluation.metrics if name in recorded]

    def compressed(self, rows: pd.DataFrame) -> pd.DataFrame:
        """The rows over all strata and of compressed caches; of baselines if there are no others."""
        whole = rows[rows["stratum"] == ""]
        return whole if whole["baseline"].all() else whole[~whole["baseline"]]

    @property
    def whole(self) -> pd.DataFrame:
        """The summary over all strata, of compressed caches where there are any."""
        return self.compressed(self.summary)

    @property
    def methods(self) -> list[str]:
        """Methods that compress, Attention Matching first; empty where nothing was compressed."""
        names = list(dict.fromkeys(self.whole.loc[~self.whole["baseline"], "method"]))
        return sorted(names, key=lambda name: not name.startswith("attention-matching"))

    @property
    def cell(self) -> tuple[str, float, int]:
        """Method, keep ratio and step of the first figures on the page.

        The primary cell if it was compared or named, else the first method at about 10 %.
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
        distance = rows["keep_ratio"].map(_distance_from_headline)
        row = rows.loc[distance.idxmin()]
        return row["method"], row["keep_ratio"], int(row["step"])


def read_results(
    folder: Path, paper_model: str | None = None, *, num_resamples: int = 10_000
) -> Results:
    """Everything that a report shows of a folder.

    Args:
        folder: a results folder.
        paper_model: which of the paper's models ours are; its figures are then in the tables.
        num_resamples: of the bootstrap.

    Raises:
        InputError: no results folder, no record, damaged content, a model that the paper lacks.
    """
    config = evals.read_config(folder)
    records = evals.read_records(folder)
    evaluation = evals.EVALUATIONS[config["evaluation"]]
    if not records:
        raise InputError(f"{folder} holds no records yet")
    if not all(evaluation.deciding in record.values for record in records):
        raise InputError(
            f"{folder} has a record without {evaluation.deciding!r}, which "
            f"{config['evaluation']} measures"
        )
    paper = Paper(paper_model, config["evaluation"], config["dataset"])
    costs = _costs(evals.read_costs(folder))
    analysis = evals.analyse(records, config, num_resamples=num_resamples)
    labels = {}
    for model in analysis.models:
        labels[model] = model + (NOT_A_RESULT if model in analysis.below_chance else "")
    models = list(labels.values())
    pairs = [(labels[model], labels[reference]) for model, reference in analysis.pairs]
    comparisons = _labelled(_plain_steps(analysis.comparisons), labels)
    summary = _labelled(_plain_steps(analysis.summary), labels)
    summary = _with_verdicts(summary, comparisons, pairs)
    rows = _table_rows(summary, models, evaluation, paper)
    warnings = [f"Not a result, {model}: {why}." for model, why in analysis.below_chance.items()]
    return Results(
        folder=folder,
        config=config,
        models=models,
        pairs=pairs,
        warnings=[*warnings, *_incomplete(config, rows, labels)],
        summary=summary,
        comparisons=comparisons,
        rows=rows,
        averages=_average_rows(rows, evaluation, paper),
        pair_rows=_pair_rows(summary, comparisons, pairs, evaluation),
        costs=_labelled(costs, labels),
        events=evals.read_events(folder),
        paper_note=paper.note,
    )


def _distance_from_headline(keep_ratio: float) -> float:
    return abs(math.log(max(keep_ratio, 1e-9) / _HEADLINE_KEEP_RATIO))


def _plain_steps(rows: pd.DataFrame) -> pd.DataFrame:
    """The same rows with ``NO_STEP`` where a method has no gradient steps."""
    return rows.assign(step=pd.to_numeric(rows["step"]).fillna(NO_STEP).astype(int))


def _labelled(rows: pd.DataFrame, labels: Mapping[str, str]) -> pd.DataFrame:
    """The same rows with the labels of models in place of their names."""
    columns = [name for name in ("model", "reference") if name in rows]
    return rows.assign(**{name: rows[name].map(labels) for name in columns})


def _with_verdicts(
    summary: pd.DataFrame, comparisons: pd.DataFrame, pairs: Sequence[tuple[str, str]]
) -> pd.DataFrame:
    """The summary with each figure's verdict against the first reference, or an empty one."""
    if not pairs:
        return summary.assign(verdict="")
    keys = ["model", *CELL, "stratum", "metric"]
    against_first = comparisons[comparisons["reference"] == pairs[0][1]]
    merged = summary.merge(against_first[[*keys, "verdict"]], how="left", on=keys)
    return merged.assign(verdict=merged["verdict"].fillna(""))


def _table_rows(
    summary: pd.DataFrame,
    models: Sequence[str],
    evaluation: evals.Evaluation,
    paper: Paper,
) -> pd.DataFrame:
    """The summary by keep ratio, step and model, with a ``figure`` in every row.

    ``final`` rows are of a method's last step or of a method without steps. ``reported`` are these
    and the further steps that the evaluation reports.
    """
    last_step = summary.groupby(["method", "keep_ratio"])["step"].transform("max")
    final = summary["step"] == last_step
    reported = final | summary["step"].isin(evaluation.reported_steps)
    rows = summary.assign(
        final=final, reported=reported, model_rank=summary["model"].map(models.index)
    )
    figures = []
    for _, row in rows.iterrows():
        printed = ""
        if row["reported"]:
            printed = paper.printed(
                row["model"],
                row["method"],
                row["keep_ratio"],
                row["step"],
                row["metric"],
                row["stratum"],
            )
        figures.append(summary_figure(row, printed))
    rows["figure"] = figures
    return rows.sort_values(["keep_ratio", "step", "model_rank"], kind="stable")


def _average_rows(rows: pd.DataFrame, evaluation: evals.Evaluation, paper: Paper) -> pd.DataFrame:
    """The deciding metric's averages over strata that count alike, with a ``figure`` in every row.

    The squares of the strata's intervals add up (Zou and Donner 2008).
    """
    averages = []
    metric = evals.METRICS[evaluation.deciding]
    rows = rows[rows["reported"] & (rows["metric"] == evaluation.deciding)]
    for (method, keep_ratio, step), cell in rows.groupby(CELL, sort=False):
        for name, strata in evaluation.averages.items():
            strata_rows = cell[cell["stratum"].isin(strata)]
            if strata_rows["stratum"].nunique() < len(strata):
                continue
            counts = strata_rows.drop_duplicates("stratum")["num_examples"]
            for model, model_rows in strata_rows.groupby("model", sort=False):
                value = model_rows["value"].mean()
                below = math.hypot(*(model_rows["value"] - model_rows["low"])) / len(strata)
                above = math.hypot(*(model_rows["value"] - model_rows["high"])) / len(strata)
                averages.append(
                    {
                        "model": model,
                        "method": method,
                        "keep_ratio": keep_ratio,
                        "step": step,
                        "stratum": f"average of {name}",
                        "num_examples": counts.sum(),
                        "figure": Figure(
                            value,
                            value - below,
                            value + above,
                            decimals=metric.decimals,
                            percent=metric.percent,
                            paper=paper.printed_average(str(model), name, evaluation.deciding),
                        ),
                    }
                )
    columns = ["model", *CELL, "stratum", "num_examples", "figure"]
    return pd.DataFrame(averages, columns=columns)


def _pair_rows(
    summary: pd.DataFrame,
    comparisons: pd.DataFrame,
    pairs: Sequence[tuple[str, str]],
    evaluation: evals.Evaluation,
) -> dict[tuple[str, str], pd.DataFrame]:
    """Comparisons of each pair over all strata at the reported steps, with figures in every row.

    ``figure`` is of the difference, ``ratio_figure`` of the ratio; ``final`` as in ``_table_rows``.
    Baselines are compared only where nothing else was scored.
    """
    compressing = set(summary.loc[~summary["baseline"], "method"])
    by_pair = {}
    for model, reference in pairs:
        is_pair = (comparisons["model"] == model) & (comparisons["reference"] == reference)
        rows = comparisons[is_pair & (comparisons["stratum"] == "")]
        if compressing:
            rows = rows[rows["method"].isin(compressing)]
        last_step = rows.groupby(["method", "keep_ratio"])["step"].transform("max")
        rows = rows.assign(
            final=rows["step"] == last_step,
            figure=[difference_figure(row) for _, row in rows.iterrows()],
            ratio_figure=[ratio_figure(row) for _, row in rows.iterrows()],
        )
        reported = rows["final"] | rows["step"].isin(evaluation.reported_steps)
        by_pair[model, reference] = rows[reported]
    return by_pair


def _costs(batches: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Costs per example, or relative to the dense cache, by model, method, keep ratio and step.

    Columns: seconds, peak MiB, KiB, share of the dense bytes; time to the first token and tokens
    per second over those of the dense cache.
    """
    if not batches:
        return pd.DataFrame()
    speeds = dict.fromkeys(_SPEEDS)
    rows = _plain_steps(pd.DataFrame([{**speeds, **cost} for cost in batches]))
    rows["method"] = [method_label(cost["method"], cost["options"]) for cost in batches]
    rows["model"] = rows["model"].str.partition("@")[0]
    rows = rows.astype(dict.fromkeys(["peak_mib", *_SPEEDS], float))
    cells = rows.groupby(["model", *CELL], sort=False)
    total = cells[["examples", "seconds", "bytes", "dense_bytes"]].sum()
    mean = cells[_SPEEDS].mean()
    columns = {
        "seconds": total["seconds"] / total["examples"],
        "peak_mib": cells["peak_mib"].max(),
        "kib": total["bytes"] / total["examples"] / 1024.0,
        "dense_share": total["bytes"] / total["dense_bytes"],
        "ttft_ratio": mean["ttft"] / mean["ttft_dense"],
        "speed_ratio": mean["tokens_per_s"] / mean["tokens_per_s_dense"],
    }
    return pd.DataFrame(columns).reset_index()


def _incomplete(
    config: Mapping[str, Any], rows: pd.DataFrame, labels: Mapping[str, str]
) -> list[str]:
    """A line for every model that lacks examples, with the method that lacks most."""
    wanted = _wanted_examples(config)
    rows = rows[rows["final"] & (rows["stratum"] == "")]
    lines = []
    for model, label in labels.items():
        model_rows = rows[rows["model"] == label]
        counts = model_rows.groupby(["method", "keep_ratio"])["num_examples"].max()
        lacking = {cell: total - counts.get(cell, 0) for cell, total in wanted.items()}
        worst = max(lacking, key=lambda cell: lacking[cell], default=None)
        if worst is not None and lacking[worst] > 0:
            method, keep_ratio = worst
            count = f"{wanted[worst] - lacking[worst]} of {wanted[worst]} examples"
            lines.append(
                f"Incomplete: {model} has {count} of {method} at {100 * keep_ratio:g}%. "
                "Its figures are then over other examples."
            )
    return lines


def _wanted_examples(config: Mapping[str, Any]) -> dict[tuple[str, float], int]:
    """Number of examples by method and keep ratio that a complete run has."""
    wanted = {}
    for name, keep_ratio in config.get("baselines", []):
        wanted[name, keep_ratio] = config["num_examples"]
    for method in config["methods"]:
        label = method_label(method["name"], method["options"])
        for keep_ratio in method["keep_ratios"]:
            wanted[label, keep_ratio] = method["num_examples"]
    return wanted
