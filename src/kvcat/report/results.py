"""A results folder read for a report: long tables of figures, comparisons and costs."""

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
from kvcat.evals.statistics import Evaluation
from kvcat.report.paper import Paper

NO_STEP = -1  # stands for a missing number of gradient steps, so that rows compare equal
CELL = ["method", "keep_ratio", "step"]


@dataclass(frozen=True)
class Results:
    """One results folder."""

    name: str  # unique among the folders of a report
    config: Mapping[str, Any]
    summary: pd.DataFrame = field(repr=False)  # of ``summarise``, with each figure's verdict on the first reference
    comparisons: pd.DataFrame = field(repr=False)  # of ``compare_models``, the rows of ``pairs``
    costs: pd.DataFrame = field(repr=False)  # a row per model, method, keep ratio and step; may be empty
    models: list[str]  # labels in order, "[plumbing]" behind those that cannot do the task
    pairs: list[tuple[str, str]]  # (model, reference) in the order of the report; empty for one model
    warnings: list[str]  # what a reader must know first
    events: list[dict[str, Any]] = field(repr=False)  # lines of provenance.jsonl
    paper: Paper  # its figures for the same evaluation

    @property
    def evaluation(self) -> Evaluation:
        """What the report shows of the evaluation."""
        return evals.EVALUATIONS[self.config["evaluation"]]

    @property
    def metrics(self) -> list[str]:
        """The evaluation's metrics that the records give."""
        return [name for name in self.evaluation.metrics if name in set(self.summary["metric"])]

    @property
    def whole(self) -> pd.DataFrame:
        """Summary rows over all strata, of compressed caches where there are any."""
        rows = self.summary[self.summary["stratum"] == ""]
        return rows if rows["baseline"].all() else rows[~rows["baseline"]]

    @property
    def methods(self) -> list[str]:
        """Methods that compress, Attention Matching first; empty where nothing was compressed."""
        names = list(dict.fromkeys(self.whole.loc[~self.whole["baseline"], "method"]))
        return sorted(names, key=lambda name: not name.startswith("attention-matching"))

    @property
    def cell(self) -> tuple[str, float, int]:
        """Method, keep ratio and step of the tiles: the primary cell, or the first method at about 10 %."""
        rows = final_steps(self.whole)
        if len(self.comparisons) and self.comparisons["primary"].any():
            rows = self.comparisons[self.comparisons["primary"]]
        elif (primary := self.config.get("primary") or {}).get("named"):
            cell = (rows["method"] == primary["method"]) & np.isclose(rows["keep_ratio"], primary["keep_ratio"])
            rows = rows[cell] if cell.any() else rows
        elif self.methods:
            rows = rows[rows["method"] == self.methods[0]]
        distance = rows["keep_ratio"].map(lambda keep: abs(math.log(max(keep, 1e-9) / 0.1)))
        row = rows.loc[distance.idxmin()]
        return row["method"], row["keep_ratio"], int(row["step"])


def final_steps(rows: pd.DataFrame, also: Sequence[int] = ()) -> pd.DataFrame:
    """Rows of methods without gradient steps, and those of the last step of the others, or of steps ``also``."""
    last = rows.groupby(["method", "keep_ratio"])["step"].transform("max")
    return rows[(rows["step"] == last) | rows["step"].isin(also)]


def plain_steps(rows: pd.DataFrame) -> pd.DataFrame:
    """The same rows with ``NO_STEP`` where a method has no gradient steps."""
    return rows.assign(step=pd.to_numeric(rows["step"]).fillna(NO_STEP).astype(int))


def read_results(folder: Path, name: str = "", paper_model: str | None = None) -> Results:
    """Everything that a report shows of a folder; ``InputError`` for no results folder, no record, damaged content."""
    config, records = evals.read_config(folder), evals.read_records(folder)
    if not records:
        raise InputError(f"{folder} holds no records yet")
    decides = evals.EVALUATIONS[config["evaluation"]].deciding
    if not all(decides in record.values for record in records):
        raise InputError(f"{folder} has a record without {decides!r}, which {config['evaluation']} measures")
    summary = plain_steps(evals.summarise(records))
    reasons = {label.partition("@")[0]: reason for label, reason in evals.plumbing(records).items()}
    shown = {label: label + " [plumbing]" * (label in reasons) for label in dict.fromkeys(summary["model"])}
    pairs = evals.comparison_pairs(list(shown))
    comparisons = pd.DataFrame()
    if pairs:
        references = {reference for _, reference in pairs}
        found = {label: evals.compare_models(records, label, primary=config.get("primary")) for label in references}
        own = [found[reference][found[reference]["model"] == model] for model, reference in pairs]
        comparisons = plain_steps(pd.concat(own, ignore_index=True))
        keys = ["model", *CELL, "stratum", "metric"]
        judged = comparisons[comparisons["reference"] == pairs[0][1]][[*keys, "verdict"]]
        summary = summary.merge(judged, how="left", on=keys)
    summary["verdict"] = summary["verdict"].fillna("") if pairs else ""
    warnings = [f"Not a result, {label}: {reason}." for label, reason in reasons.items()]
    warnings += _incomplete(config, summary)
    costs = _costs(evals.read_costs(folder))
    for table in (summary, comparisons, costs):
        for column in {"model", "reference"} & set(table.columns):
            table[column] = table[column].map(shown)
    return Results(
        name, config, summary, comparisons, costs, list(shown.values()),
        [(shown[model], shown[reference]) for model, reference in pairs], warnings, evals.read_events(folder),
        Paper(paper_model, config["evaluation"], config["dataset"]),
    )  # fmt: skip


def _costs(batches: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Per example: seconds, peak MiB, KiB, share of the dense bytes; speed of answers over that of dense caches."""
    if not batches:
        return pd.DataFrame()
    speeds = dict.fromkeys(["ttft", "ttft_dense", "tokens_per_s", "tokens_per_s_dense"])
    rows = plain_steps(pd.DataFrame([{**speeds, **cost} for cost in batches]))
    rows["method"] = [method_label(cost["method"], cost["options"]) for cost in batches]
    rows["model"] = rows["model"].str.partition("@")[0]
    rows = rows.astype(dict.fromkeys(["peak_mib", *speeds], float))
    cells = rows.groupby(["model", *CELL], sort=False)
    total, mean = cells[["examples", "seconds", "bytes", "dense_bytes"]].sum(), cells[list(speeds)].mean()
    found = {
        "seconds": total["seconds"] / total["examples"],
        "peak_mib": cells["peak_mib"].max(),
        "kib": total["bytes"] / total["examples"] / 1024.0,
        "dense_share": total["bytes"] / total["dense_bytes"],
        "ttft_ratio": mean["ttft"] / mean["ttft_dense"],
        "speed_ratio": mean["tokens_per_s"] / mean["tokens_per_s_dense"],
    }
    return pd.DataFrame(found).reset_index()


def _incomplete(config: Mapping[str, Any], summary: pd.DataFrame) -> list[str]:
    """A line for every model that lacks examples, with the method that lacks most."""
    wanted = dict.fromkeys(map(tuple, config.get("baselines", [])), config["num_examples"])
    for method in config["methods"]:
        label = method_label(method["name"], method["options"])
        wanted |= {(label, keep): method["num_examples"] for keep in method["keep_ratios"]}
    lines = []
    for model, own in final_steps(summary[summary["stratum"] == ""]).groupby("model", sort=False):
        counts = own.groupby(["method", "keep_ratio"])["num_examples"].max()
        lacking = {cell: total - counts.get(cell, 0) for cell, total in wanted.items()}
        cell = max(lacking, key=lambda cell: lacking[cell], default=None)
        if cell is not None and lacking[cell] > 0:
            there = f"{wanted[cell] - lacking[cell]} of {wanted[cell]} examples of {cell[0]} at {100 * cell[1]:g}%"
            lines.append(f"Incomplete: {model} has {there}. Its own figures are then over other examples.")
    return lines
