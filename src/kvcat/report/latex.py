"""Tables in LaTeX with booktabs: intervals small below the figures, the paper's figures in a column of their own."""

import math

from kvcat.report.tabledata import Cell, Column, Figure, TableData

_ESCAPES = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    **{c: "\\" + c for c in "&%$#_{}"},
}
_FITTING = r"\ifdim\width>\linewidth\linewidth\else\width\fi"
_LINES = 52  # of a page, lines of intervals counted
_LINE_WIDTH = 5.2  # of a line, in figures with an interval
_LONG = 14  # characters of a first column that are worth a line of their own


def latex_table(table: TableData) -> str:
    """A ``table`` environment, or several, for a document that loads ``booktabs`` and ``graphicx``.

    Intervals stand below their figures. A figure is bold where it stands out from every other row of its block
    (``standing_out``), not wherever it is the best number; the caption says so. In a column where the paper has
    figures, they stand to the right of ours. Texts at the beginning of a row are not repeated within a block; a long
    one that a whole block shares becomes a line of its own. What is still wider than the line is scaled down to it;
    more columns than a line holds, or rows than a page holds, go on in a table of their own.
    """
    first = 1 if _shares_a_long_lead(table) else 0
    parts = [
        (_letters(table, panel), _heads(table, panel), page)
        for panel in _panels(table, first)
        for page in _pages([_rows(table, block, panel, first) for block in table.blocks])
    ]
    caption = f"\\caption{{{escape(table.caption)}{_legend(table)}}}\n\\label{{{table.label}}}\n"
    again = f"Table~\\ref{{{table.label}}}, continued.\\par\\smallskip\n"
    notes = "".join(f"\\par\\smallskip\n{{\\footnotesize {escape(note)}}}\n" for note in table.notes)
    return "".join(
        f"\\begin{{table}}[t]\n\\centering\n\\small\n{again if i else caption}\\resizebox{{{_FITTING}}}{{!}}{{%\n"
        f"\\begin{{tabular}}{{@{{}}{letters}@{{}}}}\n\\toprule\n{heads}\\midrule\n{page}"
        f"\\bottomrule\n\\end{{tabular}}}}\n{notes if i == len(parts) - 1 else ''}\\end{{table}}\n"
        for i, (letters, heads, page) in enumerate(parts)
    )


def _panels(table: TableData, first: int) -> list[list[int]]:
    """Ranks of the columns of each part of a wide table: its leading texts, then as many figures as a line holds."""
    figures = [i for i in range(len(table.columns)) if any(isinstance(row[i], Figure) for row in table.rows)]
    lead = [i for i in range(first, len(table.columns)) if i not in figures and i < min(figures, default=i + 1)]
    rest = [i for i in range(first, len(table.columns)) if i not in lead]
    widths = [_width(table, i) for i in rest]
    count = max(1, math.ceil(sum(widths) / _LINE_WIDTH))
    panels: list[list[int]] = [[*lead] for _ in range(count)]
    before = 0.0
    for i, width in zip(rest, widths, strict=True):
        panels[min(count - 1, int(before * count / sum(widths)))].append(i)
        before += width
    return panels


def _width(table: TableData, column: int) -> float:
    """Of a column of figures, in figures with an interval."""
    cells = [row[column] for row in table.rows]
    intervals = any(isinstance(cell, Figure) and cell.has_interval for cell in cells)
    return (1.0 if intervals else 0.7) + (0.5 if table.has_paper(column) else 0.0)


def _letters(table: TableData, panel: list[int]) -> str:
    return "".join(table.columns[i].align[0] + ("r" if table.has_paper(i) else "") for i in panel)


def _rows(table: TableData, block: tuple[tuple[Cell, ...], ...], panel: list[int], first: int) -> list[str]:
    """The rows of a block; before them the text that all share, where it has a line of its own."""
    rows = [_row(table, block, i, panel) for i in range(len(block))]
    if first:
        span = len(_letters(table, panel))
        rows[0] = f"\\multicolumn{{{span}}}{{@{{}}l@{{}}}}{{{escape(str(block[0][0]))}}} \\\\\n{rows[0]}"
    return rows


def _pages(blocks: list[list[str]]) -> list[str]:
    """Rows of all blocks, ruled apart, in pieces that a page holds; only a block that fills more is cut."""
    pages: list[list[str]] = [[]]
    for block in blocks:
        pieces = [block]
        while _height(pieces[-1]) > _LINES:
            fits = max(i for i in range(1, len(pieces[-1])) if _height(pieces[-1][:i]) <= _LINES)
            pieces[-1:] = [pieces[-1][:fits], pieces[-1][fits:]]
        for piece in pieces:
            if pages[-1] and _height(pages[-1]) + _height(piece) > _LINES:
                pages.append([])
            pages[-1].append("".join(piece))
    return ["\\midrule\n".join(page) for page in pages]


def _height(rows: list[str]) -> int:
    return sum(row.count("\\\\") for row in rows)


def _shares_a_long_lead(table: TableData) -> bool:
    leads = [{row[0] for row in block} for block in table.blocks]
    if len(table.columns) < 2 or not all(len(own) == 1 and isinstance(next(iter(own)), str) for own in leads):
        return False
    return max((len(str(next(iter(own)))) for own in leads), default=0) > _LONG


def _legend(table: TableData) -> str:
    figures = [cell for row in table.rows for cell in row if isinstance(cell, Figure)]
    if any(figure.best for figure in figures):
        return " Bold: better than every other model of its block, the 95\\,\\% interval of the difference excludes 0."
    return " Bold: better; $^-$: worse." if any(figure.verdict for figure in figures) else ""


def escape(text: str) -> str:
    """Plain text as LaTeX; line breaks become spaces."""
    return "".join(_ESCAPES.get(c, c) for c in " ".join(text.split()))


def _heads(table: TableData, panel: list[int]) -> str:
    """One line of heads, two where a column has a part of the paper's."""
    upper, rules, lower, position = [], [], [], 1
    for i in panel:
        head = escape(table.columns[i].title)
        if table.has_paper(i):
            upper.append(f"\\multicolumn{{2}}{{c}}{{{head}}}")
            rules.append(f"\\cmidrule(lr){{{position}-{position + 1}}}")
            lower.append("ours & paper")
            position += 1
        else:
            upper.append("")
            lower.append(head)
        position += 1
    return f"{_line(upper)}{''.join(rules)}\n{_line(lower)}" if rules else _line(lower)


def _row(table: TableData, block: tuple[tuple[Cell, ...], ...], index: int, panel: list[int]) -> str:
    """A line of figures and, where any has one, a line of intervals close below it."""
    cells, intervals, repeated = [], [], table.repeated(block, index)
    for i in panel:
        column, cell = table.columns[i], block[index][i]
        cells.append("" if i < repeated else _cell(column, cell))
        intervals.append(_interval(column, cell))
        if table.has_paper(i):
            cells.append(_minus(escape(cell.paper)) if isinstance(cell, Figure) else "")
            intervals.append("")
    if not any(intervals):
        return _line(cells)
    return _line(cells).removesuffix("\n") + f"[-2pt]\n{_line(intervals)}"


def _cell(column: Column, cell: Cell) -> str:
    if isinstance(cell, str):
        return escape(cell)
    value = _minus(column.number(cell.estimate.value))
    value = f"\\textbf{{{value}}}" if cell.best or cell.verdict == "better" else value
    return value + ("$^-$" if cell.verdict == "worse" else "")


def _interval(column: Column, cell: Cell) -> str:
    if isinstance(cell, str) or not cell.has_interval:
        return ""
    low, high = (_minus(column.number(end)) for end in (cell.estimate.low, cell.estimate.high))
    return f"{{\\scriptsize [{low}, {high}]}}"


def _minus(number: str) -> str:
    return f"$-${number[1:]}" if number.startswith("-") and number != "--" else number


def _line(cells: list[str]) -> str:
    guard = "{}" if cells[0].startswith(("[", "*")) else ""  # the line break before it would take these as its own
    return f"{guard}{' & '.join(cells)} \\\\\n"
