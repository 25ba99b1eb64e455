"""Pieces of the page: tables, legends, lists, and the page around them. No request leaves it."""

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from kvcat.evals import METRICS, ComparisonRow, SummaryRow
from kvcat.report.style import css_colours, markers
from kvcat.report.tables import (
    HEADLINE_METRICS,
    TABLE_METRICS,
    final_comparisons,
    keep_label,
    number,
    sizes,
    sorted_by_keep,
)
from kvcat.report.verdict import PairVerdict

_SHAPES = {
    "o": '<circle cx="15" cy="7" r="4.5"/>',
    "s": '<rect x="11" y="3" width="8" height="8"/>',
    "^": '<path d="M15 2 L20 11 L10 11 Z"/>',
    "D": '<path d="M15 1.5 L20.5 7 L15 12.5 L9.5 7 Z"/>',
    "v": '<path d="M15 12 L20 3 L10 3 Z"/>',
    "P": '<path d="M13 2 h4 v3 h3 v4 h-3 v3 h-4 v-3 h-3 v-4 h3 Z"/>',
}


def page(title: str, subtitle: str, sections: Mapping[str, str]) -> str:
    """The whole page: sections by heading, in order, with links to them on top."""
    css = files("kvcat.report").joinpath("page.css").read_text(encoding="utf-8")
    anchors = {name: f"s{i}" for i, name in enumerate(sections)}
    links = "".join(f'<a href="#{anchors[name]}">{escape(name)}</a>' for name in sections)
    body = "".join(f'<h2 id="{anchors[name]}">{escape(name)}</h2>\n{content}\n' for name, content in sections.items())
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>\n{css}</style>\n</head>\n<body>\n<main>\n"
        f'<h1>{escape(title)}</h1>\n<p class="soft">{escape(subtitle)}</p>\n<nav>{links}</nav>\n{body}</main>\n'
        "</body>\n</html>\n"
    )


def legend(models: Sequence[str], shown: Sequence[str] | None = None, *, dense: bool = False) -> str:
    """Colours and markers of the models shown (None: all); with ``dense`` also what a dashed line means."""
    items = []
    for name in models if shown is None else shown:
        colour = css_colours(models)[name]
        mark = f'<g style="fill:{colour}">{_SHAPES[markers(models)[name]]}</g>'
        line = f'<path d="M0 7 H30" style="stroke:{colour};stroke-width:2"/>'
        items.append(f'<span><svg viewBox="0 0 30 14" aria-hidden="true">{line}{mark}</svg>{escape(name)}</span>')
    if dense:
        line = '<path d="M0 7 H30" stroke="currentColor" stroke-width="1.5" stroke-dasharray="5 3"/>'
        items.append(f'<span><svg viewBox="0 0 30 14" aria-hidden="true">{line}</svg>dense level of the model</span>')
    return f'<div class="legend">{"".join(items)}</div>\n'


def plots(figures: Sequence[tuple[str, str]]) -> str:
    """Captioned plots side by side, below one another on a narrow screen; pairs (caption, SVG)."""
    body = "".join(f"<figure><figcaption>{escape(head)}</figcaption>{drawing}</figure>\n" for head, drawing in figures)
    return f'<div class="plots">\n{body}</div>\n'


def summary_table(rows: Sequence[SummaryRow]) -> str:
    """Rows of one method with every figure's interval below it."""
    rows = sorted_by_keep(rows)
    steps = any(row.step is not None for row in rows)
    heads = [("t", "keep"), *([("", "step")] if steps else []), ("t", "model")]
    heads += [("", METRICS[name].label) for name in TABLE_METRICS]
    lines, previous = [], None
    for row in rows:
        group = (row.keep_ratio, row.step)
        cells = [_tag("td", "t", keep_label(row.keep_ratio)), *([_tag("td", "", str(row.step))] if steps else [])]
        cells += [_tag("td", "t", escape(row.model)), *(_summary_cell(row, name) for name in TABLE_METRICS)]
        lines.append(_tag("tr", "" if group == previous else "new", "".join(cells)))
        previous = group
    return f'<p class="soft">{sizes(rows)}.</p>\n' + _table(heads, lines)


def comparison_table(rows: Sequence[ComparisonRow]) -> str:
    """Paired differences of one pair of models, coloured and named where the interval excludes zero."""
    heads = [("t", "method"), ("t", "keep"), ("", "KL ratio")]
    heads += [("", f"{METRICS[name].label} diff.") for name in HEADLINE_METRICS]
    lines, previous = [], None
    for row in final_comparisons(rows):
        step = "" if row.step is None else f" after {row.step} steps"
        ratio = row.kl_ratio
        cells = [_tag("td", "t", escape(row.method + step)), _tag("td", "t", keep_label(row.keep_ratio))]
        cells.append(_cell(f"{ratio.value:.3f}", f"{ratio.low:.3f}", f"{ratio.high:.3f}", row.verdict("kl")))
        cells += [_difference_cell(row, name) for name in HEADLINE_METRICS]
        lines.append(_tag("tr", "" if row.method == previous else "new", "".join(cells)))
        previous = row.method
    return _table(heads, lines)


def verdict_box(verdict: PairVerdict) -> str:
    """A verdict with its points."""
    points = "".join(f"<li>{escape(point)}</li>" for point in verdict.points)
    return f'<div class="verdict"><p>{escape(verdict.headline)}</p><ul>{points}</ul></div>\n'


def definitions() -> str:
    """Each metric in one line, and what the intervals and the colours mean."""
    items = "".join(
        f"<dt>{escape(metric.label)}</dt><dd>{escape(metric.definition)} "
        f'<span class="soft">{metric.better.capitalize()} is better.</span></dd>'
        for metric in METRICS.values()
    )
    return (
        "<p>Every window is a prefix and a suffix of one held-out document. The prefix's KV cache is compressed to the "
        "given fraction of slots, the real suffix is scored on it. Intervals are 95% percentile-bootstrap intervals "
        "that resample whole documents; differences are paired, window by window. <em>Better</em> and <em>worse</em> "
        "are said only where the interval of a difference excludes zero; no correction is made for the number of "
        "comparisons. Intervals of single models are wide because documents differ, for all models alike: the paired "
        "differences say who is better. KL and the deltas compare a model with its own dense pass, and so reward a "
        "worse dense model or one that ignores its prefix: read them beside NLL compact, NLL dense and context "
        "gain.</p>\n"
        f"<dl>{items}</dl>\n"
    )


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


def _summary_cell(row: SummaryRow, name: str) -> str:
    estimate, metric = row[name], METRICS[name]
    return _cell(number(estimate.value, metric), number(estimate.low, metric), number(estimate.high, metric))


def _difference_cell(row: ComparisonRow, name: str) -> str:
    estimate, metric = row.differences[name], METRICS[name]
    ends = (number(estimate.low, metric, sign=True), number(estimate.high, metric, sign=True))
    return _cell(number(estimate.value, metric, sign=True), *ends, row.verdict(name))


def _cell(value: str, low: str, high: str, verdict: str = "") -> str:
    known = verdict in ("better", "worse")
    ends = "no interval: one document" if "nan" in low else f"{low} .. {high}"
    word = f"<b>{verdict}</b>" if known else ""
    return _tag("td", verdict if known else "", f'{value}<span class="iv">{ends}</span>{word}')


def _table(heads: Sequence[tuple[str, str]], lines: Sequence[str]) -> str:
    top = "".join(_tag("th", kind, escape(text)) for kind, text in heads)
    body = "\n".join(lines)
    return f'<div class="scroll"><table>\n<thead><tr>{top}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>\n'


def _tag(name: str, kind: str, content: str) -> str:
    return f'<{name} class="{kind}">{content}</{name}>' if kind else f"<{name}>{content}</{name}>"
