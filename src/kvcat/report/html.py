"""Pieces of the page: tables, legends, lists, and the page around them. No request leaves it."""

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from kvcat.evals.rows_metrics import METRICS
from kvcat.report.style import css_colours, markers
from kvcat.report.tabledata import Cell, Column, TableData
from kvcat.report.verdict import PairVerdict

_SHAPES = {
    "o": '<circle cx="15" cy="7" r="4.5"/>',
    "s": '<rect x="11" y="3" width="8" height="8"/>',
    "^": '<path d="M15 2 L20 11 L10 11 Z"/>',
    "D": '<path d="M15 1.5 L20.5 7 L15 12.5 L9.5 7 Z"/>',
    "v": '<path d="M15 12 L20 3 L10 3 Z"/>',
    "P": '<path d="M13 2 h4 v3 h3 v4 h-3 v3 h-4 v-3 h-3 v-4 h3 Z"/>',
}


def page(title: str, lead: str, sections: Mapping[str, str]) -> str:
    """The whole page: what comes first, then sections by heading, in order, with links to them on top.

    Args:
        title: plain text.
        lead: HTML below the title.
        sections: heading, plain text, to HTML.
    """
    css = files("kvcat.report").joinpath("page.css").read_text(encoding="utf-8")
    anchors = {name: f"s{i}" for i, name in enumerate(sections)}
    links = "".join(f'<a href="#{anchors[name]}">{escape(name)}</a>' for name in sections)
    body = "".join(f'<h2 id="{anchors[name]}">{escape(name)}</h2>\n{content}\n' for name, content in sections.items())
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>\n{css}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{escape(title)}</h1>\n<nav>{links}</nav>\n{lead}{body}</main>\n"
        "</body>\n</html>\n"
    )


def legend(
    models: Sequence[str], shown: Sequence[str] | None = None, *, dense: bool = False, front: bool = False
) -> str:
    """Colours and markers of the labels shown (None: all); with ``dense`` the dashed line, with ``front`` the ring."""
    items = []
    for name in models if shown is None else shown:
        colour = css_colours(models)[name]
        mark = f'<g style="fill:{colour}">{_SHAPES[markers(models)[name]]}</g>'
        line = f'<path d="M0 7 H30" style="stroke:{colour};stroke-width:2"/>'
        items.append(f'<span><svg viewBox="0 0 30 14" aria-hidden="true">{line}{mark}</svg>{escape(name)}</span>')
    if dense:
        line = '<path d="M0 7 H30" stroke="currentColor" stroke-width="1.5" stroke-dasharray="5 3"/>'
        items.append(f'<span><svg viewBox="0 0 30 14" aria-hidden="true">{line}</svg>dense level of the model</span>')
    if front:
        ring = '<circle cx="15" cy="7" r="5.5" fill="none" stroke="currentColor" stroke-width="1.2"/>'
        items.append(f'<span><svg viewBox="0 0 30 14" aria-hidden="true">{ring}</svg>Pareto front</span>')
    return f'<div class="legend">{"".join(items)}</div>\n'


def plots(figures: Sequence[tuple[str, str]]) -> str:
    """Captioned plots side by side, below one another on a narrow screen; pairs (caption, SVG)."""
    body = "".join(f"<figure><figcaption>{escape(head)}</figcaption>{drawing}</figure>\n" for head, drawing in figures)
    return f'<div class="plots">\n{body}</div>\n'


def data_table(table: TableData) -> str:
    """A table with its caption, every interval below its figure, and the notes."""
    heads = [("t" if column.align == "left" else "", column.title) for column in table.columns]
    lines = []
    for block in table.blocks:
        for rank, row in enumerate(block):
            repeated = table.repeated(block, rank)
            cells = [_data_cell(column, cell) for column, cell in zip(table.columns, row, strict=True)]
            cells[:repeated] = ["<td></td>"] * repeated
            lines.append(_tag("tr", "" if rank else "new", "".join(cells)))
    notes = "".join(f'<p class="note">{escape(note)}</p>\n' for note in table.notes)
    return f'<p class="soft">{escape(table.caption)}</p>\n{_table(heads, lines)}{notes}'


def verdict_box(verdict: PairVerdict) -> str:
    """A verdict with its points."""
    points = "".join(f"<li>{escape(point)}</li>" for point in verdict.points)
    return f'<div class="verdict"><p>{escape(verdict.headline)}</p><ul>{points}</ul></div>\n'


def definitions(metrics: Sequence[str]) -> str:
    """These metrics in one line each, and what intervals, colours and bold figures mean.

    Args:
        metrics: names in ``METRICS``.
    """
    items = "".join(
        f"<dt>{escape(METRICS[name].label)}</dt><dd>{escape(METRICS[name].definition)} "
        f'<span class="soft">{METRICS[name].better.capitalize()} is better.</span></dd>'
        for name in metrics
    )
    suffix = (
        " KL and the deltas compare a model with its own dense pass, and so reward a worse dense model or one that "
        "ignores its prefix: read them beside NLL compact, NLL dense and context gain."
    )
    return (
        "<p>A text's KV cache is compressed to the given fraction of slots, what follows is read on it. Intervals are "
        "95% intervals: percentile bootstrap over whole documents, Wilson's for shares of right answers; differences "
        "are paired, example by example. <em>Better</em> and <em>worse</em> are said only where the interval of a "
        "difference excludes zero, and for right and wrong answers McNemar's exact p is below .05 as well; a figure is "
        "bold where its model is better than every other one in this sense. No correction is made for the number of "
        "comparisons. Intervals of single models are wide because documents differ, for all models alike: the paired "
        f"differences say who is better.{suffix if 'kl' in metrics else ''}</p>\n"
        f"<dl>{items}</dl>\n"
    )


def folded(head: str, content: str) -> str:
    """Content behind a line that opens it; print shows it open."""
    return f"<details><summary>{escape(head)}</summary>\n{content}</details>\n"


def alarm(text: str) -> str:
    """A line that cannot be overlooked."""
    return f'<p class="alarm" role="note">{escape(text)}</p>\n'


def facts(values: Mapping[str, Any]) -> str:
    """Names and values as a list; a mapping becomes ``name value`` pairs, a list one line each."""
    items = "".join(f"<dt>{escape(str(name))}</dt><dd>{_fact(value)}</dd>" for name, value in values.items())
    return f"<dl>{items}</dl>\n"


def table(heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A plain table, first column as text."""
    rows = [[_tag("td", "t" if i == 0 else "", escape(cell)) for i, cell in enumerate(line)] for line in body]
    lines = [_tag("tr", "", "".join(cells)) for cells in rows]
    return _table([("t" if i == 0 else "", head) for i, head in enumerate(heads)], lines)


def _fact(value: Any) -> str:
    if isinstance(value, Mapping):
        return escape(", ".join(f"{name} {part}" for name, part in value.items()))
    if isinstance(value, list | tuple):
        return "<br>".join(escape(str(part)) for part in value)
    return f"<code>{escape(value)}</code>" if isinstance(value, str) and " --" in value else escape(str(value))


def _data_cell(column: Column, cell: Cell) -> str:
    if isinstance(cell, str):
        return _tag("td", "t" if column.align == "left" else "", escape(cell))
    value, low, high = (column.number(getattr(cell.estimate, end)) for end in ("value", "low", "high"))
    content = f"<strong>{value}</strong>" if cell.best else value
    content += _tag("span", "iv", f"{low} .. {high}") if cell.has_interval else ""
    content += _tag("span", "iv", f"paper {escape(cell.paper)}") if cell.paper else ""
    content += f"<b>{cell.verdict}</b>" if cell.verdict else ""
    return _tag("td", cell.verdict, content)


def _table(heads: Sequence[tuple[str, str]], lines: Sequence[str]) -> str:
    top = "".join(_tag("th", kind, escape(text)) for kind, text in heads)
    body = "\n".join(lines)
    return f'<div class="scroll"><table>\n<thead><tr>{top}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>\n'


def _tag(name: str, kind: str, content: str) -> str:
    return f'<{name} class="{kind}">{content}</{name}>' if kind else f"<{name}>{content}</{name}>"
