"""Tables in LaTeX with booktabs: intervals small beside the figures, the paper's figures in a column of their own."""

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


def latex_table(table: TableData) -> str:
    """A ``table`` environment for a document that loads ``booktabs``.

    A figure is bold where it stands out from every other row of its block (``standing_out``), not wherever it is the
    best number; the caption says so. In a column where the paper has figures, they stand to the right of ours. Texts
    at the beginning of a row are not repeated within a block.
    """
    paper = [table.has_paper(i) for i in range(len(table.columns))]
    letters = "".join(c.align[0] + ("r" if p else "") for c, p in zip(table.columns, paper, strict=True))
    blocks = "\\midrule\n".join(
        "".join(_row(table, paper, block, i) for i in range(len(block))) for block in table.blocks
    )
    bold = any(isinstance(cell, Figure) and cell.best for row in table.rows for cell in row)
    told = "".join(f"\\par\\smallskip\n{{\\footnotesize {escape(note)}}}\n" for note in table.notes)
    note = " Bold: better than every other model of its block, the 95\\,\\% interval of the difference excludes 0."
    figures = [cell for row in table.rows for cell in row if isinstance(cell, Figure)]
    note = note if bold else " Bold: better; $^-$: worse." if any(figure.verdict for figure in figures) else ""
    return (
        "\\begin{table}[t]\n\\centering\n\\small\n"
        f"\\caption{{{escape(table.caption)}{note}}}\n\\label{{{table.label}}}\n"
        f"\\begin{{tabular}}{{@{{}}{letters}@{{}}}}\n\\toprule\n{_heads(table, paper)}\\midrule\n{blocks}"
        f"\\bottomrule\n\\end{{tabular}}\n{told}\\end{{table}}\n"
    )


def escape(text: str) -> str:
    """Plain text as LaTeX; line breaks become spaces."""
    return "".join(_ESCAPES.get(c, c) for c in " ".join(text.split()))


def _heads(table: TableData, paper: list[bool]) -> str:
    """One line of heads, two where a column has a part of the paper's."""
    upper, rules, lower, position = [], [], [], 1
    for column, beside in zip(table.columns, paper, strict=True):
        head = escape(column.title)
        if beside:
            upper.append(f"\\multicolumn{{2}}{{c}}{{{head}}}")
            rules.append(f"\\cmidrule(lr){{{position}-{position + 1}}}")
            lower.append("ours & paper")
        else:
            upper.append("" if any(paper) else head)
            lower.append(head)
        position += 2 if beside else 1
    first = _line(upper)
    return f"{first}{''.join(rules)}\n{_line(lower)}" if any(paper) else first


def _row(table: TableData, paper: list[bool], block: tuple[tuple[Cell, ...], ...], index: int) -> str:
    cells, repeated = [], table.repeated(block, index)
    for i, (column, cell) in enumerate(zip(table.columns, block[index], strict=True)):
        cells.append("" if i < repeated else _cell(column, cell))
        if paper[i]:
            cells.append(_minus(escape(cell.paper)) if isinstance(cell, Figure) else "")
    return _line(cells)


def _cell(column: Column, cell: Cell) -> str:
    if isinstance(cell, str):
        return escape(cell)
    estimate = cell.estimate
    value = _minus(column.number(estimate.value))
    value = f"\\textbf{{{value}}}" if cell.best or cell.verdict == "better" else value
    value += "$^-$" if cell.verdict == "worse" else ""
    if not cell.has_interval:
        return value
    return f"{value} {{\\scriptsize [{_minus(column.number(estimate.low))}, {_minus(column.number(estimate.high))}]}}"


def _minus(number: str) -> str:
    return f"$-${number[1:]}" if number.startswith("-") and number != "--" else number


def _line(cells: list[str]) -> str:
    guard = "{}" if cells[0].startswith(("[", "*")) else ""  # the line break before it would take these as its own
    return f"{guard}{' & '.join(cells)} \\\\\n"
