"""A results folder read for a report: long tables of figures, comparisons and costs."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from kvcat.errors import InputError
from kvcat.evals import compare_models, comparison_pairs, read_config, read_costs, read_records, summarise
from kvcat.evals.chance import plumbing
from kvcat.evals.records import method_label

NO_STEP = -1  # in place of a missing number of gradient steps, so that rows compare equal
CELL = ["method", "keep_ratio", "step"]
PLUMBING = " [plumbing]"


@dataclass(frozen=True)
class Evaluation:
    """What a report shows of an evaluation.

    Args:
        title: heading of its section.
        example: what one example is called.
        stratum: what a stratum is called.
        metrics: columns of its tables, the one that decides first.
        tiles: figures at the top of its section: gain, what a user gets, price.
        price: metrics without compression, shown beside every gain.
        ratio: whether the deciding metric is compared as a ratio.
        steps: gradient steps that are reported besides the last one.
    """

    title: str
    example: str
    stratum: str
    metrics: tuple[str, ...]
    tiles: tuple[str, ...]
    price: tuple[str, ...] = ()
    ratio: bool = False
    steps: tuple[int, ...] = ()

    @property
    def deciding(self) -> str:
        """The metric that decides."""
        return self.metrics[0]


EVALUATIONS = {
    "suffix": Evaluation(
        "Text after a compressed prefix", "window", "stratum",
        ("kl", "nll", "nll_dense", "context_gain", "delta_nll", "delta_ppl", "top1", "retention"),
        ("kl", "nll", "nll_dense"), ("nll_dense", "context_gain"), ratio=True,
    ),
    "needle": Evaluation(
        "Needle in a haystack", "example", "depth",
        ("exact_match", "dense_exact_match", "native_exact_match", "correct_prefix", "nll", "nll_dense"),
        ("exact_match", "nll", "dense_exact_match"), ("dense_exact_match", "nll_dense"),
    ),
    "ruler": Evaluation(
        "RULER", "example", "task", ("string_match", "dense_string_match", "exact_match", "nll", "nll_dense"),
        ("string_match", "nll", "dense_string_match"), ("dense_string_match", "nll_dense"),
    ),
    "longbench": Evaluation(
        "LongBench v2", "question", "sub-domain", ("accuracy", "dense_accuracy", "nll_choice"),
        ("accuracy", "nll_choice", "dense_accuracy"), ("dense_accuracy",), steps=(20, 100),
    ),
    "qa": Evaluation(
        "Multiple choice without compression", "question", "task",
        ("acc_per_char", "acc", "acc_per_token", "nll_per_char"), ("acc_per_char", "nll_per_char"),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Results:
    """One results folder.

    Args:
        name: of the folder, unique among the folders of a report.
        config: its ``config.json``.
        summary: of ``summarise``, with the verdict against ``reference`` of every figure.
        comparisons: of ``compare_models``, every model against every reference of ``pairs``.
        costs: a row per model, method, keep ratio and step; empty where nothing was measured.
        models: labels in order, with ``[plumbing]`` behind those that cannot do the task.
        pairs: (model, reference) in the order of the report, the main one first; empty for one model.
        seeds: number of training seeds behind the model that has most.
        warnings: what a reader must know first.
        events: lines of ``provenance.jsonl``.
    """

    name: str
    config: Mapping[str, Any]
    summary: pd.DataFrame = field(repr=False)
    comparisons: pd.DataFrame = field(repr=False)
    costs: pd.DataFrame = field(repr=False)
    models: list[str]
    pairs: list[tuple[str, str]]
    seeds: int
    warnings: list[str]
    events: list[Mapping[str, Any]] = field(repr=False)

    @property
    def evaluation(self) -> Evaluation:
        """What the report shows of the evaluation."""
        return EVALUATIONS[self.config["evaluation"]]

    @property
    def metrics(self) -> list[str]:
        """The evaluation's metrics that the records give."""
        given = set(self.summary["metric"])
        return [name for name in self.evaluation.metrics if name in given]

    @property
    def compressed(self) -> pd.DataFrame:
        """Summary rows of compressed caches over all strata."""
        return self.summary[~self.summary["baseline"] & (self.summary["stratum"] == "")]

    @property
    def methods(self) -> list[str]:
        """Methods in order, without baselines."""
        return list(dict.fromkeys(self.compressed["method"]))

    @property
    def cell(self) -> tuple[str, float, int, bool]:
        """Method, keep ratio and step of the tiles, and whether they were named before the run.

        Where no primary cell was named: the headline method at the keep ratio closest to 10 %.
        """
        named = self.comparisons[self.comparisons["primary"]] if len(self.comparisons) else self.comparisons
        if len(named):
            row = named.iloc[0]
            return row["method"], row["keep_ratio"], row["step"], True
        rows = final_steps(self.compressed if self.methods else self.summary[self.summary["stratum"] == ""])
        rows = rows[rows["method"] == headline_method(rows)]
        keep = min(rows["keep_ratio"].unique(), key=lambda ratio: abs(math.log(ratio / 0.1)) if ratio > 0 else math.inf)
        row = rows[rows["keep_ratio"] == keep].iloc[0]
        return row["method"], keep, row["step"], False


def headline_method(rows: pd.DataFrame) -> str:
    """Attention Matching where it was evaluated, else the first method."""
    methods = list(dict.fromkeys(rows["method"]))
    return next((name for name in methods if name.startswith("attention-matching")), methods[0])


def final_steps(rows: pd.DataFrame, also: Sequence[int] = ()) -> pd.DataFrame:
    """Rows of methods without gradient steps, and those of the last step of the others.

    Args:
        rows: with ``method``, ``keep_ratio`` and ``step``.
        also: further steps to keep.
    """
    last = rows.groupby(["method", "keep_ratio"])["step"].transform("max")
    return rows[(rows["step"] == last) | rows["step"].isin(also)]


def without_missing_steps(rows: pd.DataFrame) -> pd.DataFrame:
    """The same rows with ``NO_STEP`` where a method has no gradient steps."""
    return rows.assign(step=pd.to_numeric(rows["step"]).fillna(NO_STEP).astype(int))


def read_results(folder: Path) -> Results:
    """Everything that a report shows of a folder.

    Raises:
        InputError: no results folder, no record in it, an unknown evaluation, or damaged content.
    """
    config = _read_config(folder)
    records = read_records(folder)
    if not records:
        raise InputError(f"{folder} holds no records yet")
    wanted = EVALUATIONS[config["evaluation"]].deciding
    if not all(wanted in record.values for record in records):
        raise InputError(f"{folder} has a record without {wanted!r}, which {config['evaluation']} measures")
    summary = without_missing_steps(summarise(records))
    models = list(dict.fromkeys(summary["model"]))
    pairs = comparison_pairs(models)
    tables = [
        compare_models(records, reference, primary=config.get("primary"))
        for reference in dict.fromkeys(pair[1] for pair in pairs)
    ]
    comparisons = _in_order(without_missing_steps(pd.concat(tables)), pairs) if tables else pd.DataFrame()
    reasons = plumbing(records) if config["evaluation"] == "longbench" else {}
    shown = {label: label + PLUMBING if label in reasons else label for label in models}
    warnings = [f"Not a result, {shown[label]}: {reason}." for label, reason in reasons.items()]
    warnings += _incomplete(config, summary)
    for table in (summary, comparisons):
        for name in {"model", "reference"} & set(table.columns):
            table[name] = table[name].map(shown)
    pairs = [(shown[model], shown[reference]) for model, reference in pairs]
    return Results(
        folder.resolve().name, config, _judged(summary, comparisons, pairs), comparisons,
        _costs(read_costs(folder), shown), list(shown.values()), pairs, int(summary["num_seeds"].max()), warnings,
        _events(folder / "provenance.jsonl"),
    )  # fmt: skip


def _read_config(folder: Path) -> dict[str, Any]:
    config = read_config(folder)
    if config["evaluation"] not in EVALUATIONS:
        known = ", ".join(EVALUATIONS)
        raise InputError(f"{folder} holds an unknown evaluation {config['evaluation']!r}; known are {known}")
    for name in ("dataset", "num_examples", "methods"):
        if name not in config:
            raise InputError(f"the config.json of {folder} has no {name}")
    return config


def _in_order(comparisons: pd.DataFrame, pairs: Sequence[tuple[str, str]]) -> pd.DataFrame:
    """The rows of these pairs, pair by pair."""
    parts = [comparisons[(comparisons["model"] == m) & (comparisons["reference"] == r)] for m, r in pairs]
    return pd.concat(parts, ignore_index=True)


def _judged(summary: pd.DataFrame, comparisons: pd.DataFrame, pairs: Sequence[tuple[str, str]]) -> pd.DataFrame:
    """The summary with each figure's verdict against the first reference of its model."""
    if not pairs:
        return summary.assign(verdict="")
    keys = ["model", *CELL, "stratum", "metric"]
    judged = comparisons[comparisons["reference"] == pairs[0][1]]
    merged = summary.merge(judged[[*keys, "verdict"]], how="left", on=keys)
    return merged.assign(verdict=merged["verdict"].fillna(""))


def _costs(batches: Sequence[Mapping[str, Any]], shown: Mapping[str, str]) -> pd.DataFrame:
    """Per example: seconds, peak MiB, bytes, share of the dense bytes; speed of answers over that of dense caches."""
    rows = pd.DataFrame([
        {**batch, "model": shown[batch["model"]], "method": method_label(batch["method"], batch["options"])}
        for batch in batches
        if batch["model"] in shown
    ])  # fmt: skip
    if rows.empty:
        return rows
    for name in ("ttft", "ttft_dense", "tokens_per_s", "tokens_per_s_dense"):
        if name not in rows:
            rows[name] = float("nan")
    speeds = rows["ttft"].notna() & rows["ttft_dense"].notna()
    rows = without_missing_steps(rows)
    found = []
    for cell, own in rows.groupby(["model", *CELL], sort=False):
        timed, count = own[speeds[own.index]], own["examples"].sum()
        found.append({
            **dict(zip(["model", *CELL], cell, strict=True)),
            "seconds": own["seconds"].sum() / count,
            "peak_mib": pd.to_numeric(own["peak_mib"]).max(),
            "kib": own["bytes"].sum() / count / 1024.0,
            "dense_share": own["bytes"].sum() / own["dense_bytes"].sum(),
            "ttft_ratio": timed["ttft"].mean() / timed["ttft_dense"].mean(),
            "speed_ratio": timed["tokens_per_s"].mean() / timed["tokens_per_s_dense"].mean(),
        })  # fmt: skip
    return pd.DataFrame(found)


def _incomplete(config: Mapping[str, Any], summary: pd.DataFrame) -> list[str]:
    """A line for every model that lacks examples under some method, with the method that lacks most."""
    wanted = {(name, keep): config["num_examples"] for name, keep in map(tuple, config.get("baselines", []))}
    for method in config["methods"]:
        label = method_label(method["name"], method["options"])
        wanted |= {(label, keep): method["num_examples"] for keep in method["keep_ratios"]}
    lines = []
    for model, own in final_steps(summary[summary["stratum"] == ""]).groupby("model", sort=False):
        counts = own.groupby(["method", "keep_ratio"])["num_examples"].max().to_dict()
        lacking = [(total - counts.get(cell, 0), cell) for cell, total in wanted.items()]
        lack, (method, keep) = max(lacking, default=(0, ("", 0.0)))
        if lack > 0:
            total = wanted[method, keep]
            lines.append(f"Incomplete: {model} has {total - lack} of {total} examples of {method} at {100 * keep:g}%.")
    return lines


def _events(log: Path) -> list[Mapping[str, Any]]:
    """Lines of ``provenance.jsonl``, without those that a crash left torn."""
    events = []
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []:
        try:
            events.append(json.loads(line))
        except ValueError:
            continue
    return events
