"""Figures with intervals and tables of them, as Markdown and LaTeX."""

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any

import pandas as pd

from kvcat.evals import METRICS

NO_STEP = -1
"""The value of a missing number of gradient steps, so that rows compare equal."""
_MISSING = "--"
_LATEX_ESCAPES = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    **{character: "\\" + character for character in "&%$#_{}"},
}
_LATEX_MARKS = {"better": "$^+$", "worse": "$^-$"}


@dataclass(frozen=True)
class Figure:
    """A number in a table, with its interval and, if models are compared, its verdict."""

    value: float  # shares in [0, 1], not percent
    low: float = math.nan  # NaN: no interval
    high: float = math.nan
    decimals: int = 3
    percent: bool = False
    signed: bool = False
    verdict: str = ""  # better, worse or level
    exploratory: bool = False  # not significant after the correction for many comparisons
    primary: bool = False  # belongs to the primary cell
    paper: str = ""  # the paper's figure for the same cell

    def shown(self, value: float) -> str:
        """A value with the digits of this figure; ``--`` if it is missing."""
        if math.isnan(value):
            return _MISSING
        sign = "+" if self.signed else ""
        if self.percent:
            value = 100.0 * value
        elif abs(value) >= 1000.0:
            return f"{value:{sign}.3g}"
        text = f"{value:{sign}.{self.decimals}f}"
        return text.lstrip("+-") if float(text) == 0.0 else text

    @property
    def text(self) -> str:
        """The value as it is shown."""
        return self.shown(self.value)

    @property
    def interval(self) -> str:
        """The interval as it is shown; empty if there is none."""
        if math.isnan(self.low):
            return ""
        return f"[{self.shown(self.low)}, {self.shown(self.high)}]"

    @property
    def decided(self) -> str:
        """``better`` or ``worse``; empty for any other verdict."""
        return self.verdict if self.verdict in ("better", "worse") else ""


Cell = str | Figure
Line = dict[str, Cell]
"""The cells of a row, by the heading of the column."""


@dataclass(frozen=True)
class Table:
    """A table for all formats, with cells ``str`` or ``Figure``; columns of texts come first."""

    name: str  # name of its files
    title: str
    caption: str
    frame: pd.DataFrame = field(repr=False)
    notes: tuple[str, ...] = ()  # sentences that readers need to interpret the figures

    @property
    def num_labels(self) -> int:
        """The number of columns of texts, which come first."""
        for rank, name in enumerate(self.frame):
            if not all(isinstance(cell, str) for cell in self.frame[name]):
                return rank
        return self.frame.shape[1]

    @property
    def csv(self) -> str:
        """The table as CSV in full precision; a figure has a column for each end of its interval.

        Figures are as in the records: shares in [0, 1].
        """
        columns = {}
        for name in self.frame:
            cells = self.frame[name]
            figures = [cell for cell in cells if isinstance(cell, Figure)]
            columns[str(name)] = [_number(cell, "value") for cell in cells]
            if any(figure.interval for figure in figures):
                columns[f"{name}, low"] = [_number(cell, "low") for cell in cells]
                columns[f"{name}, high"] = [_number(cell, "high") for cell in cells]
            if any(figure.verdict for figure in figures):
                columns[f"{name}, verdict"] = [getattr(cell, "verdict", "") for cell in cells]
        return pd.DataFrame(columns).to_csv(index=False)

    @property
    def csv_address(self) -> str:
        """A ``data:`` address of the table as CSV."""
        encoded = base64.b64encode(self.csv.encode("utf-8")).decode()
        return f"data:text/csv;charset=utf-8;base64,{encoded}"

    def frames(self, most: int) -> list[pd.DataFrame]:
        """The columns in tables of at most ``most`` columns of figures, each with all labels."""
        labels = self.frame.columns[: self.num_labels]
        figures = self.frame.columns[self.num_labels :]
        starts = range(0, max(1, len(figures)), most)
        return [self.frame[[*labels, *figures[start : start + most]]] for start in starts]


def _number(cell: Cell, name: str) -> Any:
    """The value or an end of a figure; a text itself, or nothing for its ends."""
    if isinstance(cell, Figure):
        return getattr(cell, name)
    return cell if name == "value" else ""


def summary_figure(row: pd.Series, paper: str = "") -> Figure:
    """The figure in a row of the summary; its metric is a field or the row's name."""
    metric = METRICS[row.get("metric", row.name)]
    return Figure(
        row["value"],
        row["low"],
        row["high"],
        decimals=metric.decimals,
        percent=metric.percent,
        verdict=row.get("verdict", ""),
        paper=paper,
    )


def difference_figure(row: pd.Series) -> Figure:
    """The difference in a row of the comparisons."""
    metric = METRICS[row.get("metric", row.name)]
    return Figure(
        row["difference"],
        row["low"],
        row["high"],
        decimals=metric.difference_decimals,
        percent=metric.percent,
        signed=True,
        **_judgement(row),
    )


def ratio_figure(row: pd.Series) -> Figure:
    """The ratio in a row of the comparisons."""
    return Figure(row["ratio"], row["ratio_low"], row["ratio_high"], **_judgement(row))


def _judgement(row: pd.Series) -> dict[str, Any]:
    is_primary = bool(row["primary"])
    return {
        "verdict": row["verdict"],
        "exploratory": not is_primary and not row["p_holm"] < 0.05,
        "primary": is_primary,
    }


def keep_label(keep_ratio: float) -> str:
    """A keep ratio in percent, e.g. ``5 %``."""
    return f"{100.0 * keep_ratio:g} %"


def step_label(step: int) -> str:
    """A number of gradient steps as text; empty if there are none."""
    return "" if step == NO_STEP else str(step)


def slug(text: str) -> str:
    """A text, changed so that it can be part of a file's name or of a label."""
    kept = [c if c.isascii() and (c.isalnum() or c in ".-") else " " for c in text]
    return "-".join("".join(kept).split())


def distinct(names: Sequence[str]) -> list[str]:
    """Names of files, in order: one that occurred before gets a number, as in ``a``, ``a-2``.

    Names that differ in capitals alone count as equal, as some file systems take them for one.
    """
    taken: set[str] = set()
    unique = []
    for name in names:
        candidates = chain([name], (f"{name}-{number}" for number in count(2)))
        free = next(candidate for candidate in candidates if candidate.lower() not in taken)
        taken.add(free.lower())
        unique.append(free)
    return unique


def write_table(table: Table, folder: Path, prefix: str = "") -> None:
    """Write a table to ``folder/PREFIXNAME.md``, ``.tex`` and ``.csv``."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{prefix}{table.name}"
    (folder / f"{name}.md").write_text(markdown(table), encoding="utf-8")
    (folder / f"{name}.tex").write_text(latex(table, f"tab:{name}"), encoding="utf-8")
    (folder / f"{name}.csv").write_text(table.csv, encoding="utf-8")


def markdown(table: Table) -> str:
    """The table as Markdown, between its caption and its notes."""
    columns = list(table.frame.columns)
    rows = table.frame.map(_markdown_cell).to_numpy().tolist()
    lines = [" | ".join(row) for row in [columns, ["---"] * len(columns), *rows]]
    body = "".join(f"| {line} |\n" for line in lines)
    return f"### {table.caption}\n\n{body}\n{' '.join(table.notes)}\n"


def latex(table: Table, label: str) -> str:
    """A ``table`` environment for a document that loads ``booktabs`` and ``adjustbox``.

    Intervals and the paper's figures are printed in small type below the figures. A table that is
    larger than a page is scaled down to fit.
    """
    num_figures = table.frame.shape[1] - table.num_labels
    tabular = table.frame.map(_latex_cell).to_latex(
        index=False,
        escape=False,
        header=[escape(str(name)) for name in table.frame.columns],
        column_format="@{}" + "l" * table.num_labels + "r" * num_figures + "@{}",
    )
    notes = [f"\\par\\smallskip\n{{\\footnotesize {escape(note)}}}\n" for note in table.notes]
    return (
        "\\begin{table}[t]\n\\centering\n\\small\n"
        f"\\caption{{{escape(table.caption)}}}\n\\label{{{label}}}\n"
        "\\begin{adjustbox}{max width=\\linewidth, max totalheight=0.8\\textheight}\n"
        f"{tabular}\\end{{adjustbox}}\n{''.join(notes)}\\end{{table}}\n"
    )


def escape(text: str) -> str:
    """Plain text, escaped for LaTeX; line breaks become spaces."""
    characters = " ".join(text.split())
    return "".join(_LATEX_ESCAPES.get(character, character) for character in characters)


def _markdown_cell(cell: Cell) -> str:
    if isinstance(cell, str):
        return cell.replace("|", "\\|")
    text = f"**{cell.text}**" if cell.primary else cell.text
    texts = (text, cell.interval, cell.decided, cell.paper)
    return " ".join(text for text in texts if text)


def _latex_cell(cell: Cell) -> str:
    if isinstance(cell, str):
        text = escape(cell)
        if text.startswith(("[", "*")):  # \\ would treat these as its argument
            return f"{{}}{text}"
        return text
    text = f"\\textbf{{{cell.text}}}" if cell.primary else cell.text
    lines = [_minus(text) + _LATEX_MARKS.get(cell.decided, "")]
    small_lines = [text for text in (cell.interval, cell.paper) if text]
    lines += [f"{{\\scriptsize {_minus(text)}}}" for text in small_lines]
    return "\\shortstack[r]{" + "\\\\".join(lines) + "}" if len(lines) > 1 else lines[0]


def _minus(number: str) -> str:
    """A number in LaTeX with minus signs instead of hyphens."""
    return number if number == _MISSING else number.replace("-", "$-$")
