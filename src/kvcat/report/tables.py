"""The tables of a report: data frames whose cells are texts or figures with intervals."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pandas as pd

from kvcat.evals import METRICS
from kvcat.evals.qa import AVERAGES
from kvcat.report.paper import Paper
from kvcat.report.results import (
    CELL,
    EVALUATIONS,
    NO_STEP,
    Results,
    final_steps,
    headline_method,
    without_missing_steps,
)

COMPARED = ("better", "worse")
NAN = float("nan")


@dataclass(frozen=True)
class Figure:
    """A number in a table.

    Args:
        value: in our units: shares, not percent.
        low: lower end of the interval; NaN where there is none.
        high: upper end.
        decimals: as shown.
        percent: shown in percent.
        signed: shown with its sign.
        verdict: ``better`` or ``worse`` than the reference where the interval decides, else anything.
        exploratory: the verdict does not survive the correction for many comparisons.
        primary: the one cell that was named before the run.
        paper: the paper's figure for the same cell as it prints it, without the unit; empty where it has none.
    """

    value: float
    low: float = NAN
    high: float = NAN
    decimals: int = 3
    percent: bool = False
    signed: bool = False
    verdict: str = ""
    exploratory: bool = False
    primary: bool = False
    paper: str = ""

    def shown(self, value: float) -> str:
        """A value with the digits of this figure; ``--`` where there is none."""
        if math.isnan(value):
            return "--"
        value = 100.0 * value if self.percent else value
        sign = "+" if self.signed else ""
        if not self.percent and abs(value) >= 1000.0:
            return f"{value:{sign}.3g}"
        text = f"{value:{sign}.{self.decimals}f}"
        return text.lstrip("+-") if float(text) == 0.0 else text

    @property
    def text(self) -> str:
        """The value as shown."""
        return self.shown(self.value)

    @property
    def interval(self) -> str:
        """The interval as shown; empty where there is none."""
        return "" if math.isnan(self.low) else f"[{self.shown(self.low)}, {self.shown(self.high)}]"

    @property
    def decided(self) -> str:
        """``better`` or ``worse``, else empty."""
        return self.verdict if self.verdict in COMPARED else ""


@dataclass(frozen=True)
class Table:
    """A table as every format writes it.

    Args:
        name: of its files, letters, digits and ``-._``.
        title: a few words.
        caption: plain text.
        frame: cells are ``str`` or ``Figure``; texts stand in the first columns.
        notes: what a reader of the figures must know, one sentence each.
    """

    name: str
    title: str
    caption: str
    frame: pd.DataFrame = field(repr=False)
    notes: tuple[str, ...] = ()

    @property
    def num_labels(self) -> int:
        """Number of leading columns of texts."""
        texts = [all(isinstance(cell, str) for cell in self.frame[name]) for name in self.frame]
        return texts.index(False) if False in texts else len(texts)

    def has_paper(self, column: str) -> bool:
        """Whether any figure of a column has one of the paper beside it."""
        return any(isinstance(cell, Figure) and cell.paper for cell in self.frame[column])

    def without_repeated_labels(self) -> list[list[str | Figure]]:
        """Rows whose leading texts are empty where they repeat the row above."""
        rows, above = [], [None] * self.num_labels
        for row in self.frame.itertuples(index=False, name=None):
            labels = list(row[: self.num_labels])
            same = next((i for i, (a, b) in enumerate(zip(above, labels, strict=True)) if a != b), len(labels))
            rows.append(["" if i < same and len(labels) > 1 else cell for i, cell in enumerate(row)])
            above = labels
        return rows


def head(metric: str, *, difference: bool = False) -> str:
    """The head of a metric's column."""
    unit = (" (pt)" if difference else " (%)") if METRICS[metric].percent else ""
    return METRICS[metric].label + (" diff." if difference else "") + unit


def keep_label(keep_ratio: float) -> str:
    """A keep ratio in percent, e.g. ``5%``."""
    return f"{100.0 * keep_ratio:g}%"


def sizes(rows: pd.DataFrame, example: str) -> str:
    """How much data stands behind the rows, e.g. ``128 windows of 64 documents``."""
    counts = sorted(set(zip(rows["num_examples"], rows["num_documents"], strict=True)))
    return ", or ".join(
        f"{examples} {example}{'s' * (examples > 1)} of {documents} document{'s' * (documents > 1)}"
        for examples, documents in counts
    )


def result_tables(results: Results, paper: Paper) -> list[Table]:
    """All tables of a folder, the most telling first.

    Args:
        results: of a folder.
        paper: for the paper's figures.
    """
    summary, steps = results.summary, results.evaluation.steps
    methods = results.methods or list(dict.fromkeys(summary["method"]))
    main = headline_method(summary[summary["method"].isin(methods)])
    methods.sort(key=lambda name: name != main)
    differences = [differences_table(results, *pair) for pair in results.pairs]
    tables = differences[:1] + [quality_table(results, paper, method) for method in methods] + differences[1:]
    if results.methods and summary["baseline"].any():
        tables.append(baselines_table(results))
    if (summary["stratum"] != "").any():
        stratified = dict.fromkeys(final_steps(summary[summary["stratum"] != ""], steps)["method"])
        tables += [strata_table(results, paper, method) for method in stratified]
        tables += [strata_differences_table(results, *pair) for pair in results.pairs]
    tables += [
        quality_table(results, paper, method, all_steps=True)
        for method, own in results.compressed.groupby("method", sort=False)
        if own["step"].nunique() > 1
    ]
    return tables + ([costs_table(results)] if len(results.costs) else [])


def quality_table(results: Results, paper: Paper, method: str, *, all_steps: bool = False) -> Table:
    """Every metric of one method, the models below one another.

    Args:
        results: of a folder.
        paper: for the paper's figures.
        method: name of the method with its options, or of a baseline.
        all_steps: every recorded gradient step instead of the last one.
    """
    summary = results.summary
    rows = summary[(summary["method"] == method) & (summary["stratum"] == "")]
    rows = rows if all_steps else final_steps(rows)
    lines = []
    for (keep, step, model), own in _groups(rows, ["keep_ratio", "step", "model"], results):
        line: dict[str, str | Figure] = {"keep": keep_label(keep)}
        line |= {"steps": str(step)} if step != NO_STEP else {}
        line |= {"model": model, "n": str(own["num_examples"].max())}
        printed = paper.figure(model, method, keep, step, _total(results))
        lines.append(line | _figures(own, results.metrics, printed))
    kind = "steps" if all_steps else "quality"
    caption = f"{_title(results)}, {method}: {sizes(rows, results.evaluation.example)}."
    title = f"{method}{' by gradient steps' if all_steps else ', every figure'}"
    return Table(f"{kind}-{_slug(method)}", title, caption + _reference(results), _frame(lines), _notes(results, paper))


def baselines_table(results: Results) -> Table:
    """The scores without compression."""
    rows = results.summary[results.summary["baseline"] & (results.summary["stratum"] == "")]
    lines = [
        {"baseline": method, "text seen": keep_label(keep), "model": model, "n": str(own["num_examples"].max())}
        | _figures(own, results.metrics)
        for (method, keep, model), own in _groups(rows, ["method", "keep_ratio", "model"], results)
    ]
    caption = f"{_title(results)} without compression.{_reference(results)}"
    return Table("baselines", "Without compression", caption, _frame(lines), _notes(results))


def differences_table(results: Results, model: str, reference: str) -> Table:
    """One model minus another on the same examples: gain and price in every row.

    Args:
        results: of a folder.
        model: label of the model judged.
        reference: label of the model it is compared with.
    """
    rows, decides = pair_rows(results, model, reference), results.evaluation.deciding
    rows = rows[rows["method"].isin(results.methods)] if results.methods else rows
    lines = []
    for (method, keep, step), own in rows.groupby(CELL, sort=False):
        line: dict[str, str | Figure] = {"method": method_label(method, step), "keep": keep_label(keep)}
        line["n"] = str(own["num_examples"].max())
        by_metric = own.set_index("metric")
        names = [name for name in results.metrics if name in by_metric.index]
        if results.evaluation.ratio:
            line[f"{head(decides)} ratio"] = ratio_figure(by_metric.loc[decides])
            names.sort(key=lambda name: name == decides)
        line["p (Holm)"] = Figure(by_metric.loc[decides]["p_holm"])
        line |= {head(name, difference=True): difference_figure(by_metric.loc[name]) for name in names}
        lines.append(line)
    caption = (
        f"{_title(results)}: {model} minus {reference} on the same {sizes(rows, results.evaluation.example)}. "
        f"p (Holm): of "
        f"{METRICS[decides].label}, corrected for the number of exploratory cells."
    )
    name = f"differences-{_slug(model)}-{_slug(reference)}"
    return Table(name, f"{model} minus {reference}", caption, _frame(lines), _notes(results))


def strata_table(results: Results, paper: Paper, method: str) -> Table:
    """The deciding metric by stratum, a column per model, all strata together last.

    Args:
        results: of a folder with strata.
        paper: for the paper's figures.
        method: name of the method with its options, or of a baseline.
    """
    evaluation, name = results.evaluation, results.evaluation.deciding
    rows = results.summary[(results.summary["method"] == method) & (results.summary["metric"] == name)]
    rows = final_steps(rows, evaluation.steps)
    lines = []
    for (keep, step), group in _groups(rows, ["keep_ratio", "step"], results):
        for stratum in sorted(dict.fromkeys(group["stratum"]), key=lambda text: text == ""):
            own = group[group["stratum"] == stratum]
            line: dict[str, str | Figure] = {"keep": keep_label(keep)} | ({"steps": str(step)} if step >= 0 else {})
            line |= {evaluation.stratum: stratum or "all", "n": str(own["num_examples"].max())}
            for _, row in own.iterrows():
                printed = paper.figure(row["model"], method, keep, step, stratum or _total(results))
                line[row["model"]] = summary_figure(row, printed(name))
            lines.append(line)
        if results.config["evaluation"] == "qa":
            lines += _average_lines(group, paper)
    caption = f"{_title(results)}, {method}: {head(name)} by {evaluation.stratum}.{_reference(results)}"
    title = f"{method} by {evaluation.stratum}"
    return Table(f"{evaluation.stratum}-{_slug(method)}", title, caption, _frame(lines), _notes(results, paper))


def strata_differences_table(results: Results, model: str, reference: str) -> Table:
    """The deciding metric of one model minus another by stratum."""
    name = results.evaluation.deciding
    rows = pair_rows(results, model, reference, strata=True)
    lines = []
    for cell, own in rows[rows["metric"] == name].groupby(CELL, sort=False):
        line: dict[str, str | Figure] = {"method": method_label(cell[0], cell[2]), "keep": keep_label(cell[1])}
        lines.append(line | {row["stratum"]: difference_figure(row) for _, row in own.iterrows()})
    caption = f"{_title(results)}: {head(name, difference=True)} of {model} to {reference}, exploratory."
    title = f"{model} minus {reference} by {results.evaluation.stratum}"
    return Table(f"strata-{_slug(model)}-{_slug(reference)}", title, caption, _frame(lines), _notes(results))


def costs_table(results: Results) -> Table:
    """Quality and cost side by side, at the last step of every method."""
    name = results.evaluation.deciding
    cells = final_steps(results.compressed)
    cells = cells[cells["metric"] == name].merge(results.costs, on=["model", *CELL])
    units = {"seconds": ("s per example", 3), "peak_mib": ("peak MiB", 0), "kib": ("KiB per cache", 1)}
    units |= {"ttft_ratio": ("first token / dense", 2), "speed_ratio": ("tokens/s / dense", 2)}
    lines = []
    for _, row in _sorted(cells, ["method", "keep_ratio", "model"], results).iterrows():
        method = method_label(row["method"], row["step"])
        line: dict[str, str | Figure] = {"method": method, "keep": keep_label(row["keep_ratio"]), "model": row["model"]}
        line[head(name)] = summary_figure(row)
        line["bytes / dense (%)"] = Figure(row["dense_share"], decimals=1, percent=True)
        line |= {title: Figure(row[key], decimals=n) for key, (title, n) in units.items() if row.notna()[key]}
        lines.append(line)
    caption = f"{_title(results)}: quality and cost per example, as measured on this machine."
    return Table("costs", "Quality and cost", caption, _frame(lines), _notes(results))


def headline_text(summary: pd.DataFrame, method: str | None = None) -> str:
    """Aligned text for a terminal: every method, keep ratio, model and, where there are several, stratum.

    Args:
        summary: of ``summarise``.
        method: name of the one method to show; None shows all.
    """
    rows = final_steps(without_missing_steps(summary))
    rows = rows[~rows["baseline"]] if not rows["baseline"].all() else rows
    rows = rows if method is None else rows[rows["method"] == method]
    given = set(rows["metric"])
    metrics = next(e.metrics for e in reversed(EVALUATIONS.values()) if e.deciding in given)
    lines = []
    for (name, keep, model, stratum), own in rows.groupby(["method", "keep_ratio", "model", "stratum"], sort=False):
        line = {"method": name, "keep": keep_label(keep), "model": model}
        line |= {"stratum": stratum or "all"} if (rows["stratum"] != "").any() else {}
        figures = _figures(own, [metric for metric in metrics if metric in given])
        lines.append(line | {title: figure.text for title, figure in figures.items()})
    thing = "window" if metrics[0] == "kl" else "example"
    whole = rows[rows["stratum"] == ""]
    return f"{sizes(whole, thing)}\n{pd.DataFrame(lines).fillna('').to_string(index=False)}\n"


def pair_rows(results: Results, model: str, reference: str, *, strata: bool = False) -> pd.DataFrame:
    """Comparison rows of a pair at the reported steps, of all examples together or of the strata."""
    rows = results.comparisons
    rows = rows[(rows["model"] == model) & (rows["reference"] == reference) & ((rows["stratum"] != "") == strata)]
    return final_steps(rows, results.evaluation.steps)


def summary_figure(row: pd.Series, paper: str = "") -> Figure:
    """The figure of a row of the summary."""
    name = row["metric"] if "metric" in row else row.name
    percent = METRICS[name].percent
    verdict = row.get("verdict", "")
    return Figure(row["value"], row["low"], row["high"], _decimals(name), percent, verdict=verdict, paper=paper)


def difference_figure(row: pd.Series) -> Figure:
    """The difference of a row of the comparisons."""
    name = row["metric"] if "metric" in row else row.name
    percent, exploratory = METRICS[name].percent, not (row["primary"] or row["p_holm"] < 0.05)
    return Figure(
        row["difference"], row["low"], row["high"], 1 if percent else 4, percent, signed=True,
        verdict=row["verdict"], exploratory=exploratory, primary=row["primary"],
    )  # fmt: skip


def ratio_figure(row: pd.Series) -> Figure:
    """The ratio of a row of the comparisons."""
    exploratory = not (row["primary"] or row["p_holm"] < 0.05)
    ends = (row["ratio"], row["ratio_low"], row["ratio_high"])
    return Figure(*ends, verdict=row["verdict"], exploratory=exploratory, primary=row["primary"])


def method_label(method: str, step: int) -> str:
    """A method with its gradient steps."""
    return method if step == NO_STEP else f"{method}, {step} step{'' if step == 1 else 's'}"


def _average_lines(group: pd.DataFrame, paper: Paper) -> list[dict[str, str | Figure]]:
    """Averages over tasks, which count alike; intervals of independent tasks add up in squares.

    References: Zou and Donner 2008, "Construction of confidence limits about effect measures".
    """
    lines = []
    for name, tasks in AVERAGES.items():
        own = group[group["stratum"].isin(tasks)]
        if own["stratum"].nunique() < len(tasks):
            continue
        line: dict[str, str | Figure] = {"keep": keep_label(1.0), "task": f"average of {name}"}
        line["n"] = str(own.drop_duplicates("stratum")["num_examples"].sum())
        for model, rows in own.groupby("model", sort=False):
            value = rows["value"].mean()
            low, high = (math.sqrt(((rows["value"] - rows[end]) ** 2).sum()) / len(tasks) for end in ("low", "high"))
            metric = rows["metric"].iloc[0]
            printed = paper.figure(model, "", 1.0, NO_STEP, "average")(metric) if name == "six" else ""
            line[model] = Figure(value, value - low, value + high, 1, True, paper=printed)
        lines.append(line)
    return lines


def _figures(own: pd.DataFrame, metrics: Sequence[str], printed=lambda _: "") -> dict[str, Figure]:  # noqa: ANN001
    by_metric = own.set_index("metric")
    return {
        head(name): summary_figure(by_metric.loc[name], printed(name)) for name in metrics if name in by_metric.index
    }


def _groups(rows: pd.DataFrame, keys: list[str], results: Results) -> Iterable[tuple[tuple, pd.DataFrame]]:
    """Groups by keep ratio in rising order; methods and models in the order of the results."""
    return _sorted(rows, keys, results).groupby(keys, sort=False)  # type: ignore[return-value]


def _sorted(rows: pd.DataFrame, keys: list[str], results: Results) -> pd.DataFrame:
    order = {"model": results.models, "method": list(dict.fromkeys(results.summary["method"]))}
    return rows.sort_values(keys, key=lambda c: c.map(order[c.name].index) if c.name in order else c, kind="stable")


def _frame(lines: Sequence[dict[str, str | Figure]]) -> pd.DataFrame:
    """The cells; a number of examples that is the same everywhere stands in the caption alone."""
    frame = pd.DataFrame(lines).fillna("")
    return frame.drop(columns="n") if "n" in frame and frame["n"].nunique() == 1 else frame


def _decimals(metric: str) -> int:
    if METRICS[metric].percent:
        return 1
    return 4 if metric in ("kl", "delta_nll") else 3


def _reference(results: Results) -> str:
    return f" Marked: better or worse than {results.pairs[0][1]}." if results.pairs else ""


def _notes(results: Results, paper: Paper | None = None) -> tuple[str, ...]:
    notes = ["95% intervals.", *results.warnings]
    fewest = int(results.summary["num_documents"].min())
    if fewest < 10:
        notes.append(f"Only {fewest} document{'s' * (fewest != 1)}: the intervals are likely too narrow.")
    return tuple(notes + ([paper.note] if paper and paper.note else []))


def _total(results: Results) -> str:
    return {"longbench": "total"}.get(results.config["evaluation"], "")


def _title(results: Results) -> str:
    return f"{results.evaluation.title}, {results.config['dataset']}"


def _slug(text: str) -> str:
    return "-".join("".join(c if c.isascii() and (c.isalnum() or c in ".-") else " " for c in text).split())
