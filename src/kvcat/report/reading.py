"""A results folder read for a report: rows, paired rows, both by stratum, costs, and who could not do the task."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

from kvcat.errors import InputError
from kvcat.evals import HEADLINES, Record, comparison_pairs, models_of, read_config, read_costs, read_records
from kvcat.evals.chance import plumbing
from kvcat.evals.records import method_label
from kvcat.evals.rows import ComparisonRow, SummaryRow, compare_models, summarise
from kvcat.evals.rows_metrics import METRICS
from kvcat.report.averages import QAAverage, qa_averages
from kvcat.report.costs import CostRow, cost_rows

PLUMBING = " [plumbing]"
BASELINES = ("dense", "no-context", "truncated")
PAPER_STEPS = (20, 100)  # LongBench v2 after few and after all steps
_PAPER_COLUMNS = {"suffix": ("delta_ppl", "kl", "top1")}
_Row = TypeVar("_Row", SummaryRow, ComparisonRow, CostRow)


@dataclass(frozen=True)
class Results:
    """One results folder.

    Args:
        name: of the folder.
        config: its ``config.json``.
        models: label as shown to fingerprint and dtype of its weights; ``[plumbing]`` stands in the label.
        rows: of the compressed caches, all steps.
        baselines: rows without compression.
        strata: rows per stratum, compressed or not, at the reported steps; empty where there is one stratum.
        comparisons: paired rows of all pairs of models at the reported steps, those with the control and base first.
        strata_comparisons: the same per stratum.
        averages: over QA tasks, see ``qa_averages``.
        costs: per model, method, keep ratio and step.
        plumbing: shown label to the reason why its figures are no results.
        incomplete: a line per model whose records do not cover all examples.
        events: lines of ``provenance.jsonl``.
    """

    name: str
    config: Mapping[str, Any]
    models: Mapping[str, Mapping[str, str]]
    rows: list[SummaryRow] = field(repr=False)
    baselines: list[SummaryRow] = field(repr=False)
    strata: list[SummaryRow] = field(repr=False)
    comparisons: list[ComparisonRow] = field(repr=False)
    strata_comparisons: list[ComparisonRow] = field(repr=False)
    averages: list[QAAverage] = field(repr=False)
    costs: list[CostRow] = field(repr=False)
    plumbing: Mapping[str, str]
    incomplete: list[str]
    events: list[Mapping[str, Any]] = field(repr=False)

    @property
    def evaluation(self) -> str:
        """Name of the evaluation."""
        return self.config["evaluation"]

    @property
    def metrics(self) -> list[str]:
        """Metrics that its tables show: the paper's, then the evaluation's headlines, those that the records give."""
        given = (self.rows or self.baselines)[0].metrics
        wanted = [*_PAPER_COLUMNS.get(self.evaluation, ()), *HEADLINES.get(self.evaluation, METRICS)]
        return [name for name in dict.fromkeys(wanted) if name in given]

    @property
    def deciding(self) -> str:
        """The metric that decides."""
        return next(name for name in HEADLINES.get(self.evaluation, METRICS) if name in self.metrics)

    @property
    def methods(self) -> list[str]:
        """The methods in order, without baselines."""
        return list(dict.fromkeys(row.method for row in self.rows))

    @property
    def headline_method(self) -> str:
        """Attention Matching where it was evaluated, else the first method; a baseline where nothing was compressed."""
        return headline_method([*self.rows, *self.baselines])

    @property
    def baselines_in_order(self) -> list[SummaryRow]:
        """Baseline by baseline, the models below one another; the most text seen first."""
        order = {name: rank for rank, name in enumerate(dict.fromkeys(row.method for row in self.baselines))}
        return sorted(self.baselines, key=lambda row: (order[row.method], -row.keep_ratio))

    @property
    def main_pairs(self) -> list[tuple[str, str]]:
        """Those of ``pairs`` that have tables on the page: against control and base, or against the first model."""
        plain = {label.removesuffix(PLUMBING): label for label in self.models}
        return [(plain[model], plain[reference]) for model, reference in comparison_pairs(list(plain))]

    def label(self, *parts: str) -> str:
        """Label of a table, unique among all folders of a report."""
        return f"tab:{_slug(self.name)}:{'-'.join(map(_slug, parts))}"

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Pairs (model, reference) in the order of the comparisons."""
        return list(dict.fromkeys((row.model, row.reference) for row in self.comparisons))


def read_results(folder: Path) -> Results:
    """Everything that a report says of a folder.

    Raises:
        InputError: no results folder, or no record in it.
    """
    config, records = read_config(folder), read_records(folder)
    if not records:
        raise InputError(f"{folder} holds no records yet")
    pairs = _all_pairs(list(models_of(records)))
    reasons = plumbing(records) if config["evaluation"] == "longbench" else {}
    shown = {label: label + PLUMBING * (label in reasons) for label in models_of(records)}
    records = [replace(record, model=shown[record.model]) for record in records]
    pairs = [(shown[model], shown[reference]) for model, reference in pairs]
    rows = summarise(records)
    reported = _at_reported_steps(records, PAPER_STEPS if config["evaluation"] == "longbench" else ())
    stratified = len({record.stratum for record in records}) > 1
    log = folder / "provenance.jsonl"
    return Results(
        folder.name,
        config,
        models_of(records),
        [row for row in rows if row.method not in BASELINES],
        [row for row in rows if row.method in BASELINES],
        summarise(reported, by_stratum=True) if stratified else [],
        compare_models(reported, pairs),
        compare_models(reported, pairs, by_stratum=True) if stratified else [],
        qa_averages(records, pairs) if config["evaluation"] == "qa" else [],
        cost_rows(read_costs(folder), shown),
        {shown[label]: reason for label, reason in reasons.items()},
        _incomplete(config, rows),
        _events(log),
    )


def _incomplete(config: Mapping[str, Any], rows: Sequence[SummaryRow]) -> list[str]:
    """Models that lack examples under some method, with the method that lacks most."""
    wanted = dict.fromkeys(map(tuple, config.get("baselines", [])), config["num_examples"])
    for method in config["methods"]:
        label = method_label(method["name"], method["options"])
        wanted |= {(label, keep): method["num_examples"] for keep in method["keep_ratios"]}
    lines = []
    for model in dict.fromkeys(row.model for row in rows):
        counts = {(row.method, row.keep_ratio): row.num_examples for row in final_steps(rows) if row.model == model}
        lacking = [(total - counts.get(cell, 0), cell) for cell, total in wanted.items()]
        lack, (method, keep) = max(lacking, default=(0, ("", 0.0)))
        if lack > 0:
            total = wanted[method, keep]
            lines.append(f"{model} has {total - lack} of {total} examples under {method} at keep {keep:g}")
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


def headline_method(rows: Iterable[SummaryRow]) -> str:
    """Attention Matching where it was evaluated, else the first method; a baseline where nothing was compressed."""
    methods = list(dict.fromkeys(row.method for row in rows))
    compressed = [name for name in methods if name not in BASELINES] or methods
    return next((name for name in compressed if name.startswith("attention-matching")), compressed[0])


def final_steps(rows: Iterable[_Row]) -> list[_Row]:
    """Rows of methods without steps, and those of the last step of methods with."""
    rows = list(rows)
    last: dict[tuple[str, float], int] = {}
    for row in rows:
        cell = (row.method, row.keep_ratio)
        last[cell] = max(last.get(cell, -1), -1 if row.step is None else row.step)
    return [row for row in rows if last[row.method, row.keep_ratio] == (-1 if row.step is None else row.step)]


def _slug(text: str) -> str:
    return "-".join("".join(c if c.isascii() and (c.isalnum() or c in ".-") else " " for c in text).split())


def _all_pairs(models: Sequence[str]) -> list[tuple[str, str]]:
    """The pairs worth a comparison, then the rest, the earlier model against the later one."""
    first = comparison_pairs(models)
    told = {frozenset(pair) for pair in first}
    return first + [pair for pair in combinations(models, 2) if frozenset(pair) not in told]


def _at_reported_steps(records: Sequence[Record], steps: tuple[int, ...]) -> list[Record]:
    """Records of these steps and of the last step of each method and keep ratio."""
    last: dict[tuple[str, float], int] = {}
    for record in records:
        if record.step is not None:
            cell = (record.method_label, record.keep_ratio)
            last[cell] = max(last.get(cell, 0), record.step)
    return [
        record
        for record in records
        if record.step is None or record.step in (*steps, last[record.method_label, record.keep_ratio])
    ]
