"""A table as Markdown, CSV and LaTeX."""

import math
from pathlib import Path

import pandas as pd

from kvcat.report.tables import Figure, Table

_ESCAPES = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", **{c: "\\" + c for c in "&%$#_{}"},
}  # fmt: skip
_ROWS_PER_PAGE = 22  # a row with an interval takes two lines
_FIGURES_PER_LINE = 6
_FITTING = r"\ifdim\width>\linewidth\linewidth\else\width\fi"


def write_table(table: Table, folder: Path, prefix: str = "") -> None:
    """Write ``folder/PREFIXNAME`` as ``.md``, ``.csv`` and ``.tex``."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{prefix}{table.name}"
    target.with_name(f"{target.name}.md").write_text(markdown(table), encoding="utf-8")
    target.with_name(f"{target.name}.csv").write_text(csv(table), encoding="utf-8")
    target.with_name(f"{target.name}.tex").write_text(latex(table, f"tab:{prefix}{table.name}"), encoding="utf-8")


def markdown(table: Table) -> str:
    """The table with its caption above and its notes below."""
    frame = _with_paper(table, table.frame)
    lines = [list(frame.columns), ["---"] * frame.shape[1], *frame.map(_markdown_cell).to_numpy().tolist()]
    body = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    return f"### {table.caption}\n\n{body}\n{' '.join(table.notes)}\n"


def csv(table: Table) -> str:
    """A column per value, end of an interval, verdict and figure of the paper; full precision, shares not percent."""
    columns = []
    for name in map(str, table.frame):
        if list(table.frame).index(name) < table.num_labels:
            columns.append(table.frame[name])
            continue
        cells = [cell if isinstance(cell, Figure) else Figure(math.nan) for cell in table.frame[name]]
        parts = ("value", "low", "high", "verdict", "paper")
        frame = pd.DataFrame({part: [getattr(cell, part) for cell in cells] for part in parts})
        given = [part for part in parts if part == "value" or not frame[part].isin(["", math.nan]).all()]
        plain = name.removesuffix(" (%)").removesuffix(" (pt)")
        columns.append(frame[given].set_axis([f"{plain} {part}".removesuffix(" value") for part in given], axis=1))
    return pd.concat(columns, axis=1).to_csv(index=False)


def latex(table: Table, label: str) -> str:
    """One or more ``table`` environments for a document that loads ``booktabs`` and ``graphicx``.

    Intervals stand small below their figures, the paper's figures in a column of their own. What is wider than the
    line is scaled down to it; more columns than a line holds, or rows than a page holds, go on in a further table.
    """
    frame = pd.DataFrame(table.without_repeated_labels(), columns=table.frame.columns)
    frame = _with_paper(table, frame).map(_latex_cell)
    labels, figures = frame.columns[: table.num_labels], frame.columns[table.num_labels :]
    per_line = math.ceil(len(figures) / max(1, math.ceil(len(figures) / _FIGURES_PER_LINE)))
    panels = [figures[i : i + per_line] for i in range(0, len(figures), per_line or 1)] or [figures]
    pieces = [
        frame.iloc[start : start + _ROWS_PER_PAGE][[*labels, *panel]]
        for panel in panels
        for start in range(0, len(frame), _ROWS_PER_PAGE)
    ]
    notes = "".join(f"\\par\\smallskip\n{{\\footnotesize {escape(note)}}}\n" for note in table.notes)
    caption = f"\\caption{{{escape(table.caption)}}}\n\\label{{{label}}}\n"
    again = f"Table~\\ref{{{label}}}, continued.\\par\\smallskip\n"
    return "".join(
        f"\\begin{{table}}[t]\n\\centering\n\\small\n{again if i else caption}"
        f"\\resizebox{{{_FITTING}}}{{!}}{{%\n{_tabular(piece, table.num_labels)}}}\n"
        f"{notes if i == len(pieces) - 1 else ''}\\end{{table}}\n"
        for i, piece in enumerate(pieces)
    )


def escape(text: str) -> str:
    """Plain text as LaTeX; line breaks become spaces."""
    return "".join(_ESCAPES.get(c, c) for c in " ".join(text.split()))


def _tabular(frame: pd.DataFrame, num_labels: int) -> str:
    letters = "@{}" + "l" * num_labels + "r" * (frame.shape[1] - num_labels) + "@{}"
    heads = [escape(str(name)) for name in frame.columns]
    return frame.to_latex(index=False, escape=False, header=heads, column_format=letters)


def _with_paper(table: Table, frame: pd.DataFrame) -> pd.DataFrame:
    """The cells with a column of the paper's figures behind each that has some."""
    columns = {}
    for name in frame:
        columns[str(name)] = list(frame[name])
        if table.has_paper(name):
            columns[f"{name}, paper"] = [cell.paper if isinstance(cell, Figure) else "" for cell in frame[name]]
    return pd.DataFrame(columns)


def _markdown_cell(cell: str | Figure) -> str:
    if isinstance(cell, str):
        return cell.replace("|", "\\|")
    text = f"**{cell.text}**" if cell.primary else cell.text
    return " ".join(part for part in (text, cell.interval, cell.decided) if part)


def _latex_cell(cell: str | Figure) -> str:
    if isinstance(cell, str):
        text = escape(cell)
        return f"{{}}{text}" if text.startswith(("[", "*")) else text  # \\ would take these as its own
    marks = {"better": "$^+$", "worse": "$^-$"}.get(cell.decided, "")
    value = _minus(f"\\textbf{{{cell.text}}}" if cell.primary else cell.text) + marks
    if not cell.interval:
        return value
    return f"\\shortstack[r]{{{value}\\\\{{\\scriptsize {_minus(cell.interval)}}}}}"


def _minus(number: str) -> str:
    """Hyphens of numbers as minus signs."""
    return number if number == "--" else number.replace("-", "$-$")
