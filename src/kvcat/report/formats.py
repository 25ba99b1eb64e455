"""A table as Markdown and LaTeX."""

from pathlib import Path

import pandas as pd

from kvcat.report.tables import Figure, Table

_ESCAPES = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", **{c: "\\" + c for c in "&%$#_{}"},
}  # fmt: skip
_ROWS_PER_PAGE = 22  # a row with an interval takes two lines
_FITTING = r"\ifdim\width>\linewidth\linewidth\else\width\fi"


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
    """One or more ``table`` environments for a document that loads ``booktabs`` and ``graphicx``.

    Intervals, and the paper's figures, stand small below the figures. What is wider than the line is scaled down to
    it; more rows than a page holds go on in a further table.
    """
    frame = table.frame.map(_latex_cell)
    pieces = [frame.iloc[start : start + _ROWS_PER_PAGE] for start in range(0, len(frame), _ROWS_PER_PAGE)]
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


def _markdown_cell(cell: str | Figure) -> str:
    if isinstance(cell, str):
        return cell.replace("|", "\\|")
    text = f"**{cell.text}**" if cell.primary else cell.text
    return " ".join(part for part in (text, cell.interval, cell.decided, cell.printed) if part)


def _latex_cell(cell: str | Figure) -> str:
    if isinstance(cell, str):
        text = escape(cell)
        return f"{{}}{text}" if text.startswith(("[", "*")) else text  # \\ would take these as its own
    marks = {"better": "$^+$", "worse": "$^-$"}.get(cell.decided, "")
    lines = [_minus(f"\\textbf{{{cell.text}}}" if cell.primary else cell.text) + marks]
    lines += [f"{{\\scriptsize {_minus(part)}}}" for part in (cell.interval, cell.printed) if part]
    return "\\shortstack[r]{" + "\\\\".join(lines) + "}" if len(lines) > 1 else lines[0]


def _minus(number: str) -> str:
    """Hyphens of numbers as minus signs."""
    return number if number == "--" else number.replace("-", "$-$")
