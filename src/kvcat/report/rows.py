"""The rows of a report: summary and comparisons with their figures, averages, costs."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from kvcat.evals import METRICS, Metric, ReportFacts
from kvcat.evals.records import StoredResults
from kvcat.report.figures import (
    NO_STEP,
    Figure,
    difference_figure,
    ratio_figure,
    summary_figure,
)
from kvcat.report.paper import Paper

CELL = ["method", "keep_ratio", "step"]
_SOFTWARE = ("kvcat", "torch", "transformers")
_SPEEDS = ["ttft", "ttft_dense", "tokens_per_s", "tokens_per_s_dense"]


def plain_steps(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with ``NO_STEP`` as the step of methods without gradient steps."""
    return rows.assign(step=pd.to_numeric(rows["step"]).fillna(NO_STEP).astype(int))


def labelled(rows: pd.DataFrame, labels: Mapping[str, str]) -> pd.DataFrame:
    """The rows with the labels of models in place of their names."""
    columns = [name for name in ("model", "reference") if name in rows]
    return rows.assign(**{name: rows[name].map(labels) for name in columns})


def with_verdicts(
    summary: pd.DataFrame, comparisons: pd.DataFrame, pairs: Sequence[tuple[str, str]]
) -> pd.DataFrame:
    """The summary with each figure's verdict against the first reference, or an empty verdict."""
    if not pairs:
        return summary.assign(verdict="")
    keys = ["model", *CELL, "stratum", "metric"]
    against_first = comparisons[comparisons["reference"] == pairs[0][1]]
    merged = summary.merge(against_first[[*keys, "verdict"]], how="left", on=keys)
    return merged.assign(verdict=merged["verdict"].fillna(""))


def table_rows(
    summary: pd.DataFrame,
    models: Sequence[str],
    facts: ReportFacts,
    paper: Paper,
) -> pd.DataFrame:
    """The summary, sorted by keep ratio, step and model, with a ``figure`` in every row.

    ``final`` marks rows for a method's last step, or for a method without steps. ``reported`` marks
    these and the further steps that the evaluation reports.
    """
    last_step = summary.groupby(["method", "keep_ratio"])["step"].transform("max")
    final = summary["step"] == last_step
    reported = final | summary["step"].isin(facts.reported_steps)
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


def average_rows(rows: pd.DataFrame, facts: ReportFacts, paper: Paper) -> pd.DataFrame:
    """The deciding metric, averaged over equally weighted strata, with a ``figure`` in every row.

    A model without examples of one of the strata has no average of them. The squared half-widths of
    the strata's intervals are added (Zou and Donner 2008), as strata are independent. With several
    training runs they are not, since the same runs answer all of them: then the half-widths
    themselves are added.
    """
    metric = METRICS[facts.deciding]
    rows = rows[rows["reported"] & (rows["metric"] == facts.deciding)]
    averages = []
    for (method, keep_ratio, step, model), cell in rows.groupby([*CELL, "model"], sort=False):
        place = {"method": method, "keep_ratio": keep_ratio, "step": step, "model": model}
        for name, strata in facts.averages.items():
            strata_rows = cell[cell["stratum"].isin(strata)]
            if len(strata_rows) < len(strata):
                continue
            printed = paper.printed_average(str(model), name, facts.deciding)
            average = {
                "stratum": f"average of {name}",
                "num_examples": strata_rows["num_examples"].sum(),
                "figure": _average_figure(strata_rows, metric, printed),
            }
            averages.append({**place, **average})
    columns = ["model", *CELL, "stratum", "num_examples", "figure"]
    return pd.DataFrame(averages, columns=columns)


def _average_figure(rows: pd.DataFrame, metric: Metric, printed: str) -> Figure:
    """The mean of a model's figures, one per stratum."""
    value = rows["value"].mean()
    below = rows["value"] - rows["low"]
    above = rows["high"] - rows["value"]
    if rows["num_seeds"].max() > 1:
        half_widths = (below.mean(), above.mean())
    else:
        half_widths = (math.hypot(*below) / len(rows), math.hypot(*above) / len(rows))
    return Figure(
        value,
        value - half_widths[0],
        value + half_widths[1],
        decimals=metric.decimals,
        percent=metric.percent,
        paper=printed,
    )


def pair_rows(
    summary: pd.DataFrame,
    comparisons: pd.DataFrame,
    pairs: Sequence[tuple[str, str]],
    facts: ReportFacts,
) -> dict[tuple[str, str], pd.DataFrame]:
    """The comparisons of each pair over all strata at the reported steps, with two figures each.

    ``figure`` is the difference and ``ratio_figure`` the ratio; ``final`` is as in ``table_rows``.
    Baselines are compared only if nothing else was scored.
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
        reported = rows["final"] | rows["step"].isin(facts.reported_steps)
        by_pair[model, reference] = rows[reported]
    return by_pair


def cost_rows(batches: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Costs per example or relative to the dense cache, by model, method, keep ratio and step.

    The columns are seconds, peak MiB of a batch, KiB, the share of the dense bytes, and the time to
    the first token and the tokens per second, both divided by those of the dense cache.
    """
    if not batches:
        return pd.DataFrame()
    speeds = dict.fromkeys(_SPEEDS)
    rows = plain_steps(pd.DataFrame([{**speeds, **cost} for cost in batches]))
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


def incomplete(stored: StoredResults, labels: Mapping[str, str]) -> list[str]:
    """A line for every model that lacks examples, naming the method that lacks most.

    An example counts if its last step was scored in every training run of the model and with every
    seed of the method.

    Args:
        stored: content of a results folder.
        labels: label of each model, by its name without ``@SEED``.
    """
    runs, seeds, num_parts_of = _scored_parts(stored)
    lines = []
    for model, label in labels.items():
        lacking = {}
        for cell, total in stored.wanted.items():
            method, _ = cell
            num_parts = len(runs[model]) * len(seeds[method])
            numbers = num_parts_of[model, cell].values()
            lacking[cell] = total - sum(number == num_parts for number in numbers)
        worst = max(lacking, key=lambda cell: lacking[cell], default=None)
        if worst is None or lacking[worst] <= 0:
            continue
        total = stored.wanted[worst]
        method, keep_ratio = worst
        count = f"{total - lacking[worst]} of {total} examples"
        each = ""
        others = "examples"
        if len(runs[model]) * len(seeds[method]) > 1:
            each = ", with every seed and training run"
            others = "examples, seeds or training runs"
        lines.append(
            f"Incomplete: {label} has {count} of {method} at {100 * keep_ratio:g} %{each}. "
            f"Its figures are therefore over other {others}."
        )
    return lines


def mixed_sources(stored: StoredResults, labels: Mapping[str, str]) -> list[str]:
    """A line if the models' weights have different types, and one if versions of software differ.

    Models can be added to a folder with another ``--dtype`` and by another version. Both move a
    figure, by more than many differences between models in half precision.

    Args:
        stored: content of a results folder.
        labels: label of each model, by its name without ``@SEED``.
    """
    lines = []
    models_of_type: dict[str, dict[str, None]] = defaultdict(dict)
    for record in stored.records:
        model = record.model.partition("@")[0]
        models_of_type[record.dtype][labels.get(model, model)] = None
    if len(models_of_type) > 1:
        names = {dtype: ", ".join(models) for dtype, models in models_of_type.items()}
        types = "; ".join(f"{dtype}: {models}" for dtype, models in names.items())
        lines.append(f"Weights of different types ({types}): differences include their rounding.")
    versions = []
    for name in _SOFTWARE:
        recorded = dict.fromkeys(event[name] for event in stored.events if name in event)
        if len(recorded) > 1:
            versions.append(f"{name} {' and '.join(recorded)}")
    if versions:
        software = "; ".join(versions)
        lines.append(f"Different versions made the records ({software}): figures may depend on it.")
    return lines


class _ScoredParts(NamedTuple):
    """What a results folder has scored; a part of an example is one training run with one seed."""

    runs: dict[str, set[str]]  # labels with ``@SEED`` by model
    seeds: dict[str, set[int | None]]  # by method
    # by model and (method, keep ratio): of each example, the number of parts at the last step
    num_parts: dict[tuple[str, tuple[str, float]], Counter[tuple[str, str]]]


def _scored_parts(stored: StoredResults) -> _ScoredParts:
    """The training runs, seeds and examples in the records of a results folder."""
    scored = _ScoredParts(defaultdict(set), defaultdict(set), defaultdict(Counter))
    last_steps: dict[tuple[str, float], int] = {}
    for record in stored.records:
        method = record.method_label
        cell = (method, record.keep_ratio)
        step = NO_STEP if record.step is None else record.step
        last_steps[cell] = max(step, last_steps.get(cell, NO_STEP))
        scored.runs[record.model.partition("@")[0]].add(record.model)
        scored.seeds[method].add(record.seed)
        if record.seed is not None:  # a randomised method has all seeds of the run
            scored.seeds[method].update(stored.config.get("seeds", []))
    for record in stored.records:
        cell = (record.method_label, record.keep_ratio)
        step = NO_STEP if record.step is None else record.step
        if step == last_steps[cell]:
            model = record.model.partition("@")[0]
            scored.num_parts[model, cell][record.document, record.example] += 1
    return scored
