"""Tables as Markdown, CSV and aligned text; LaTeX and HTML have files of their own."""

import csv
import io
import math
from collections.abc import Sequence

from kvcat.report.tabledata import Cell, Column, Figure, TableData


def markdown_table(table: TableData, *, intervals: bool = True) -> str:
    """Lines of a Markdown table; the paper's figures in a column of their own, what stands out in bold.

    Args:
        table: what to write.
        intervals: with the intervals of the figures.
    """
    lines = [_with_paper(table, [column.title for column in table.columns], ["paper"] * len(table.columns))]
    lines.append(["---"] * len(lines[0]))
    for row in table.rows:
        ours = [_markdown_cell(column, cell, intervals) for column, cell in zip(table.columns, row, strict=True)]
        lines.append(_with_paper(table, ours, [cell.paper if isinstance(cell, Figure) else "" for cell in row]))
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def markdown_section(table: TableData) -> str:
    """The table with its caption above and its notes below."""
    notes = "".join(f"\n{note}\n" for note in table.notes)
    return f"### {table.caption}\n\n{markdown_table(table)}{notes}"


def csv_table(table: TableData) -> str:
    """One column per value, interval end, verdict and figure of the paper, in full precision; shares, not percent."""
    figures = [any(isinstance(row[i], Figure) for row in table.rows) for i in range(len(table.columns))]
    judged = [any(isinstance(row[i], Figure) and row[i].verdict for row in table.rows) for i in range(len(figures))]  # type: ignore[union-attr]
    heads, lines = [], []
    for i, column in enumerate(table.columns):
        heads.append(column.head)
        heads += [f"{column.head} {end}" for end in ("low", "high")] if figures[i] else []
        heads += [f"{column.head} verdict"] if judged[i] else []
        heads += [f"{column.head} paper{' (%)' if column.percent else ''}"] if table.has_paper(i) else []
    for row in table.rows:
        line: list[object] = []
        for i, cell in enumerate(row):
            if not isinstance(cell, Figure):
                extra = 2 * figures[i] + judged[i] + table.has_paper(i)
                line += [cell, *[""] * extra]
                continue
            line += [_precise(value) for value in (cell.estimate.value, cell.estimate.low, cell.estimate.high)]
            line += [cell.verdict] if judged[i] else []
            line += [cell.paper] if table.has_paper(i) else []
        lines.append(line)
    return csv_text([heads, *lines])


def csv_text(lines: Sequence[Sequence[object]]) -> str:
    """Lines as CSV."""
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows(lines)
    return stream.getvalue()


def text_table(table: TableData) -> str:
    """Aligned text for a terminal, without intervals; an empty line between blocks, first cells not repeated."""
    heads = [column.title for column in table.columns]
    shown = [[_shown(column, cell) for column, cell in zip(table.columns, row, strict=True)] for row in table.rows]
    widths = [max(len(line[i]) for line in [heads, *shown]) for i in range(len(heads))]
    parts, lines = [_aligned(table, heads, widths)], iter(shown)
    for block in table.blocks:
        parts.append("")
        for index in range(len(block)):
            blank, line = table.repeated(block, index), next(lines)
            parts.append(_aligned(table, [*[""] * blank, *line[blank:]], widths))
    return "\n".join(parts) + "\n"


def _aligned(table: TableData, cells: list[str], widths: list[int]) -> str:
    padded = [
        cell.ljust(width) if column.align == "left" else cell.rjust(width)
        for column, cell, width in zip(table.columns, cells, widths, strict=True)
    ]
    return "  ".join(padded).rstrip()


def _markdown_cell(column: Column, cell: Cell, intervals: bool) -> str:
    if isinstance(cell, str):
        return cell.replace("|", "\\|")
    value = _shown(column, cell)
    text = f"**{value}**" if cell.best else value
    if intervals and cell.has_interval:
        text += f" [{column.number(cell.estimate.low)}, {column.number(cell.estimate.high)}]"
    return f"{text} {cell.verdict}".rstrip()


def _with_paper(table: TableData, ours: list[str], paper: list[str]) -> list[str]:
    pairs = enumerate(zip(ours, paper, strict=True))
    return [text for i, (own, theirs) in pairs for text in ([own, theirs] if table.has_paper(i) else [own])]


def _shown(column: Column, cell: Cell) -> str:
    return cell if isinstance(cell, str) else column.number(cell.estimate.value)


def _precise(value: float) -> object:
    return "" if math.isnan(value) else value
