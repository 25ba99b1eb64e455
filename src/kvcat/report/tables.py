"""The tables of a report: data frames whose cells are texts or figures with intervals; as Markdown and LaTeX."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from kvcat.evals import METRICS
from kvcat.evals.qa import AVERAGES
from kvcat.report.paper import Paper
from kvcat.report.results import CELL, NO_STEP, Results, final_steps, read_results

_COSTS = {
    "seconds": ("s per example", 3), "peak_mib": ("peak MiB", 0), "kib": ("KiB per cache", 1),
    "dense_share": ("bytes / dense", 3), "ttft_ratio": ("first token / dense", 2),
    "speed_ratio": ("tokens/s / dense", 2),
}  # fmt: skip
_ESCAPES = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", **{c: "\\" + c for c in "&%$#_{}"},
}  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """A number in a table, with its interval (NaN: none) and, where models are compared, its verdict."""

    value: float  # shares, not percent
    low: float = math.nan
    high: float = math.nan
    decimals: int = 3
    percent: bool = False
    signed: bool = False
    verdict: str = ""  # better, worse or level
    exploratory: bool = False  # the verdict does not survive the correction for many comparisons
    primary: bool = False  # the one cell that decides
    paper: str = ""  # the paper's figure for the same cell

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
        return self.verdict if self.verdict in ("better", "worse") else ""


Line = dict[str, str | Figure]


@dataclass(frozen=True)
class Table:
    """A table as every format writes it: cells are ``str`` or ``Figure``, texts stand in the first columns."""

    name: str  # of its files
    title: str
    caption: str
    frame: pd.DataFrame = field(repr=False)
    notes: tuple[str, ...] = ()  # sentences that a reader of the figures must know

    @property
    def num_labels(self) -> int:
        """Number of leading columns of texts."""
        texts = [all(isinstance(cell, str) for cell in self.frame[name]) for name in self.frame]
        return [*texts, False].index(False)


def result_tables(results: Results) -> list[Table]:
    """All tables of a folder, the most telling first, with the paper's figures beside ours."""
    names = list(dict.fromkeys([*results.methods, *results.summary["method"]]))
    quality = [quality_table(results, name) for name in names]
    differences = [differences_table(results, *pair) for pair in results.pairs]
    several = (results.summary["stratum"] != "").any()
    strata = [strata_table(results, name) for name in names] if several else []
    tables = [*differences[:1], *quality, *differences[1:], *strata] if results.methods else [*strata, *differences]
    return [*(tables or quality), *([costs_table(results)] if len(results.costs) else [])]


def quality_table(results: Results, method: str) -> Table:
    """Every metric of one method or baseline, the models below one another."""
    rows = results.summary[(results.summary["method"] == method) & (results.summary["stratum"] == "")]
    lines: list[Line] = []
    for (keep, step, model), own in _groups(rows, results, "model"):
        labels: Line = {"keep": keep_label(keep), "steps": step_label(step)}
        line = labels | {"model": model, "n": str(own["num_examples"].max())}
        for name, row in own.set_index("metric").reindex(results.metrics).dropna(how="all").iterrows():
            line[head(str(name))] = summary_figure(row, results.paper.printed(model, method, keep, step, str(name)))
        lines.append(line)
    caption = f"{method}: {sizes(rows, results.evaluation.example)}."
    return _table(results, rows, f"quality-{slug(method)}", f"{method}: every figure", caption, lines)


def differences_table(results: Results, model: str, reference: str) -> Table:
    """One model minus another on the same examples: gain and price in every row."""
    decides = results.evaluation.deciding
    ratio = METRICS[decides].ratio
    rows = pair_rows(results, model, reference)
    lines: list[Line] = []
    for (method, keep, step), own in rows.groupby(CELL, sort=False):
        line: Line = {"method": method, "keep": keep_label(keep), "steps": step_label(step)}
        line["n"] = str(own["num_examples"].max())
        by_metric = own.set_index("metric")
        line |= {f"{head(decides)} ratio": ratio_figure(by_metric.loc[decides])} if ratio else {}
        line["p (Holm)"] = Figure(by_metric.loc[decides, "p_holm"])
        names = [name for name in results.metrics if name in by_metric.index]
        names.sort(key=lambda name: ratio and name == decides)
        lines.append(line | {head(name, difference=True): difference_figure(by_metric.loc[name]) for name in names})
    caption = (
        f"{model} minus {reference} on the same {sizes(rows, results.evaluation.example)}. p (Holm): of "
        f"{METRICS[decides].label}, corrected for the number of exploratory cells."
    )
    found = dict.fromkeys(text.partition(",")[0] for text in rows.loc[rows["metric"] == decides, "warning"] if text)
    warnings = [f"{text[0].upper()}{text[1:]}." for text in found]
    name = f"differences-{slug(model)}-{slug(reference)}"
    return _table(results, rows, name, f"{model} minus {reference}", caption, lines, warnings)


def strata_table(results: Results, method: str) -> Table:
    """The deciding metric by stratum, a column per model; all strata together, and averages over tasks, last."""
    evaluation, name = results.evaluation, results.evaluation.deciding
    rows = results.summary[(results.summary["method"] == method) & (results.summary["metric"] == name)]
    lines: list[Line] = []
    for cell, group in _groups(rows, results):
        labels: Line = {"keep": keep_label(cell[0]), "steps": step_label(cell[1])}
        for stratum in sorted(dict.fromkeys(group["stratum"]), key=lambda text: text == ""):
            own = group[group["stratum"] == stratum]
            line = labels | {evaluation.stratum: stratum or "all", "n": str(own["num_examples"].max())}
            for _, row in own.iterrows():
                printed = results.paper.printed(row["model"], method, cell[0], cell[1], name, stratum)
                line[row["model"]] = summary_figure(row, printed)
            lines.append(line)
        if results.config["evaluation"] == "qa":
            lines += [labels | line for line in _average_lines(group, results.paper)]
    caption = f"{method}: {head(name)} by {evaluation.stratum}."
    title = f"{method} by {evaluation.stratum}"
    return _table(results, rows, f"{evaluation.stratum}-{slug(method)}", title, caption, lines)


def costs_table(results: Results) -> Table:
    """Quality and cost side by side, at the last step of every method."""
    rows = final_steps(results.whole)
    rows = rows[rows["metric"] == results.evaluation.deciding].merge(results.costs, on=["model", *CELL])
    lines: list[Line] = []
    for _, row in rows.sort_values(["method", "keep_ratio"], kind="stable").iterrows():
        line: Line = {"method": row["method"], "keep": keep_label(row["keep_ratio"]), "model": row["model"]}
        line[head(row["metric"])] = summary_figure(row)
        lines.append(line | {title: Figure(row[key], decimals=n) for key, (title, n) in _COSTS.items()})
    return _table(results, rows, "costs", "Quality and cost", "Quality and cost per example, as measured here.", lines)


def headline_text(folder: Path) -> str:
    """The figures of a results folder over all examples as aligned text, after what a reader must know first."""
    results = read_results(folder)
    names = results.methods or dict.fromkeys(results.whole["method"])
    frames = [quality_table(results, name).frame.assign(method=name) for name in names]
    frame = pd.concat(frames).fillna("").set_index(["method", "model", "keep"]).reset_index()
    shown = frame.map(lambda cell: cell.text if isinstance(cell, Figure) else cell).to_string(index=False)
    return "".join(f"{line}\n" for line in [*results.warnings, sizes(results.whole, results.evaluation.example), shown])


def pair_rows(results: Results, model: str, reference: str) -> pd.DataFrame:
    """Comparisons of a pair over all strata at the reported steps; of baselines only where nothing else was scored."""
    rows = results.comparisons
    rows = rows[(rows["model"] == model) & (rows["reference"] == reference) & (rows["stratum"] == "")]
    rows = rows[rows["method"].isin(results.methods)] if results.methods else rows
    return final_steps(rows, results.evaluation.steps)


def summary_figure(row: pd.Series, paper: str = "") -> Figure:
    """The figure of a row of the summary; its metric is a field or the row's name."""
    name = row.get("metric", row.name)
    percent, verdict = METRICS[name].percent, row.get("verdict", "")
    decimals = 1 if percent else 4 if name in ("kl", "delta_nll") else 3
    return Figure(row["value"], row["low"], row["high"], decimals, percent, verdict=verdict, paper=paper)


def difference_figure(row: pd.Series) -> Figure:
    """The difference of a row of the comparisons."""
    percent = METRICS[row.get("metric", row.name)].percent
    ends = (row["difference"], row["low"], row["high"])
    return Figure(*ends, 1 if percent else 4, percent, signed=True, **_judgement(row))


def ratio_figure(row: pd.Series) -> Figure:
    """The ratio of a row of the comparisons."""
    return Figure(row["ratio"], row["ratio_low"], row["ratio_high"], **_judgement(row))


def head(metric: str, *, difference: bool = False) -> str:
    """The head of a metric's column."""
    unit = (" (pt)" if difference else " (%)") if METRICS[metric].percent else ""
    return METRICS[metric].label + (" diff." if difference else "") + unit


def keep_label(keep_ratio: float) -> str:
    """A keep ratio in percent, e.g. ``5%``."""
    return f"{100.0 * keep_ratio:g}%"


def step_label(step: int) -> str:
    """A number of gradient steps; empty without."""
    return "" if step == NO_STEP else str(step)


def sizes(rows: pd.DataFrame, example: str) -> str:
    """How much data stands behind the rows, e.g. ``128 windows of 64 documents``."""
    counts = sorted(set(zip(rows["num_examples"], rows["num_documents"], strict=True)))
    several = [(n, f"{example}{'s' if n > 1 else ''}", m, f"document{'s' if m > 1 else ''}") for n, m in counts]
    return ", or ".join(f"{n} {examples} of {m} {documents}" for n, examples, m, documents in several)


def slug(text: str) -> str:
    """A text as a part of a file's name or a label."""
    return "-".join("".join(c if c.isascii() and (c.isalnum() or c in ".-") else " " for c in text).split())


def _average_lines(group: pd.DataFrame, paper: Paper) -> list[Line]:
    """Averages over tasks, which count alike; their intervals add up in squares (Zou and Donner 2008)."""
    lines: list[Line] = []
    for name, tasks in AVERAGES.items():
        own = group[group["stratum"].isin(tasks)]
        if own["stratum"].nunique() < len(tasks):
            continue
        line: Line = {"task": f"average of {name}", "n": str(own.drop_duplicates("stratum")["num_examples"].sum())}
        for model, rows in own.groupby("model", sort=False):
            value = rows["value"].mean()
            low, high = (math.hypot(*(rows["value"] - rows[end])) / len(tasks) for end in ("low", "high"))
            printed = paper.printed(str(model), "", 1.0, NO_STEP, "acc_per_char", "average") if name == "six" else ""
            line[str(model)] = Figure(value, value - low, value + high, 1, True, paper=printed)
        lines.append(line)
    return lines


def _judgement(row: pd.Series) -> dict:
    exploratory = not row["primary"] and not row["p_holm"] < 0.05
    return {"verdict": row["verdict"], "exploratory": exploratory, "primary": bool(row["primary"])}


def _groups(rows: pd.DataFrame, results: Results, *more: str) -> list[tuple[tuple, pd.DataFrame]]:
    """Groups of the reported steps by keep ratio, step and more in rising order; models in the order of the results."""
    keys, rank = ["keep_ratio", "step", *more], {model: i for i, model in enumerate(results.models)}
    rows = final_steps(rows, results.evaluation.steps)
    rows = rows.sort_values(keys, key=lambda c: c.map(rank) if c.name == "model" else c, kind="stable")
    return list(rows.groupby(keys, sort=False))  # type: ignore[arg-type]


def _table(
    results: Results, rows: pd.DataFrame, name: str, title: str, caption: str, lines: Sequence[Line],
    notes: Sequence[str] = (),
) -> Table:  # fmt: skip
    """The table without steps where there are none, and without a number of examples that is the same everywhere.

    ``rows`` are those that its figures come from: how few they stand on is told below it.
    """
    frame = pd.DataFrame(lines).fillna("")
    same = [name for name in ("steps", "n") if name in frame and frame[name].nunique() == 1]
    frame = frame.drop(columns=[name for name in same if name == "n" or not frame[name].iloc[0]])
    whole = rows[rows["stratum"] == ""]
    documents, seeds = whole["num_documents"].min(), whole["num_seeds"].max()
    few = [
        f"{n} {what}"
        for n, what, least in ((documents, "documents", 10), (seeds, "training seeds", 5))
        if 1 < n < least
    ]
    notes = [*(f"Only {count}: the intervals are likely too narrow." for count in few), *notes]
    if results.paper.note and any(getattr(cell, "paper", "") for cell in frame.to_numpy().flat):
        notes = [*notes, results.paper.note]
    where = f"{results.evaluation.title}, {results.config['dataset']}. "
    if results.pairs and not name.startswith("differences"):
        caption += f" Marked: better or worse than {results.pairs[0][1]}."
    return Table(name, title, where + caption, frame, ("95% intervals.", *results.warnings, *notes))


def write_table(table: Table, folder: Path, prefix: str = "") -> None:
    """Write ``folder/PREFIXNAME`` as ``.md`` and ``.tex``."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{prefix}{table.name}"
    (folder / f"{name}.md").write_text(markdown(table), encoding="utf-8")
    (folder / f"{name}.tex").write_text(latex(table, f"tab:{name}"), encoding="utf-8")


def markdown(table: Table) -> str:
    """The table with its caption above and its notes below."""
    columns = list(table.frame.columns)
    lines = [columns, ["---"] * len(columns), *table.frame.map(_markdown_cell).to_numpy().tolist()]
    body = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    return f"### {table.caption}\n\n{body}\n{' '.join(table.notes)}\n"


def latex(table: Table, label: str) -> str:
    """A ``table`` environment for a document that loads ``booktabs`` and ``adjustbox``.

    Intervals, and the paper's figures, stand small below the figures. What is larger than a page is scaled down to it.
    """
    letters = "@{}" + "l" * table.num_labels + "r" * (table.frame.shape[1] - table.num_labels) + "@{}"
    heads = [escape(str(name)) for name in table.frame.columns]
    frame = table.frame.map(_latex_cell)
    tabular = frame.to_latex(index=False, escape=False, header=heads, column_format=letters)
    notes = "".join(f"\\par\\smallskip\n{{\\footnotesize {escape(note)}}}\n" for note in table.notes)
    return (
        "\\begin{table}[t]\n\\centering\n\\small\n"
        f"\\caption{{{escape(table.caption)}}}\n\\label{{{label}}}\n"
        "\\begin{adjustbox}{max width=\\linewidth, max totalheight=0.8\\textheight}\n"
        f"{tabular}\\end{{adjustbox}}\n{notes}\\end{{table}}\n"
    )


def escape(text: str) -> str:
    """Plain text as LaTeX; line breaks become spaces."""
    return "".join(_ESCAPES.get(c, c) for c in " ".join(text.split()))


def _markdown_cell(cell: str | Figure) -> str:
    if isinstance(cell, str):
        return cell.replace("|", "\\|")
    text = f"**{cell.text}**" if cell.primary else cell.text
    return " ".join(part for part in (text, cell.interval, cell.decided, cell.paper) if part)


def _latex_cell(cell: str | Figure) -> str:
    if isinstance(cell, str):
        text = escape(cell)
        return f"{{}}{text}" if text.startswith(("[", "*")) else text  # \\ would take these as its own
    marks = {"better": "$^+$", "worse": "$^-$"}.get(cell.decided, "")
    lines = [_minus(f"\\textbf{{{cell.text}}}" if cell.primary else cell.text) + marks]
    lines += [f"{{\\scriptsize {_minus(part)}}}" for part in (cell.interval, cell.paper) if part]
    return "\\shortstack[r]{" + "\\\\".join(lines) + "}" if len(lines) > 1 else lines[0]


def _minus(number: str) -> str:
    """Hyphens of numbers as minus signs."""
    return number if number == "--" else number.replace("-", "$-$")
