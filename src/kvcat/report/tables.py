"""Summary rows as Markdown, CSV and aligned text."""

import csv
import io
import math
from collections.abc import Sequence

from kvcat.evals import METRICS, ComparisonRow, Estimate, Metric, SummaryRow

PAPER_METRICS = ("delta_ppl", "kl", "top1")
TABLE_METRICS = (*PAPER_METRICS, "nll", "delta_nll", "retention", "nll_dense", "context_gain")
HEADLINE_METRICS = ("kl", "nll", "delta_nll", "top1", "retention", "nll_dense", "context_gain")


def figure(estimate: Estimate, metric: Metric, *, interval: bool = True) -> str:
    """A figure as text, e.g. ``0.0321 [0.0290, 0.0355]``; without ends where one document gives none."""
    value = number(estimate.value, metric)
    if not interval:
        return value
    if math.isnan(estimate.low):
        return f"{value} [one document]"
    return f"{value} [{number(estimate.low, metric)}, {number(estimate.high, metric)}]"


def number(value: float, metric: Metric, *, sign: bool = False) -> str:
    """A value of a metric with the digits it deserves; with ``sign`` a difference, of shares in percentage points."""
    plus = "+" if sign else ""
    if metric.percent:
        return f"{100.0 * value:{plus}.1f}{' pt' if sign else '%'}"
    if abs(value) >= 1000.0:
        return f"{value:{plus}.3g}"
    return f"{value:{plus}.{3 if metric.name.startswith('delta_ppl') else 4}f}"


def keep_label(keep_ratio: float) -> str:
    """A keep ratio in percent, e.g. ``5%``."""
    return f"{100.0 * keep_ratio:g}%"


def final_steps(rows: Sequence[SummaryRow]) -> list[SummaryRow]:
    """Rows of methods without steps, and the last step of those with."""
    last: dict[tuple[str, str, str, float], int | None] = {}
    for row in rows:
        last[row.dataset, row.model, row.method, row.keep_ratio] = row.step
    return [row for row in rows if last[row.dataset, row.model, row.method, row.keep_ratio] == row.step]


def final_comparisons(rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """Comparison rows of methods without steps, and the last step of those with."""
    last = {(r.dataset, r.model, r.reference, r.method, r.keep_ratio): r.step for r in rows}
    return [r for r in rows if last[r.dataset, r.model, r.reference, r.method, r.keep_ratio] == r.step]


def summary_markdown(rows: Sequence[SummaryRow]) -> str:
    """One table per method: keep, model, the paper's columns, then ours, every figure with its interval."""
    parts = []
    for method in dict.fromkeys(row.method for row in rows):
        own = sorted_by_keep([row for row in rows if row.method == method])
        steps = any(row.step is not None for row in own)
        heads = ["keep", *(["step"] if steps else []), "model", *(METRICS[name].label for name in TABLE_METRICS)]
        body = [
            [
                keep_label(row.keep_ratio),
                *([str(row.step)] if steps else []),
                row.model,
                *(figure(row[name], METRICS[name]) for name in TABLE_METRICS),
            ]
            for row in own
        ]
        parts.append(f"### {method}\n\n{sizes(own)}\n\n{markdown_table(heads, body)}")
    return "\n".join(parts)


def comparison_markdown(rows: Sequence[ComparisonRow]) -> str:
    """One table per pair of models: differences on the same windows, the ratio of KL, and what can be said."""
    parts = []
    for pair in dict.fromkeys((row.model, row.reference) for row in rows):
        own = [row for row in rows if (row.model, row.reference) == pair]
        heads = ["method", "keep", "step", "KL ratio", *(f"{METRICS[name].label} diff." for name in HEADLINE_METRICS)]
        body = [
            [
                row.method,
                keep_label(row.keep_ratio),
                "" if row.step is None else str(row.step),
                f"{row.kl_ratio.value:.3f} [{row.kl_ratio.low:.3f}, {row.kl_ratio.high:.3f}]",
                *(difference(row, name) for name in HEADLINE_METRICS),
            ]
            for row in own
        ]
        parts.append(f"### {pair[0]} minus {pair[1]}\n\n{markdown_table(heads, body)}")
    return "\n".join(parts)


def difference(row: ComparisonRow, metric: str) -> str:
    """A difference with its sign, interval and verdict."""
    estimate, kind = row.differences[metric], METRICS[metric]
    ends = f"[{number(estimate.low, kind, sign=True)}, {number(estimate.high, kind, sign=True)}]"
    mark = {"better": " better", "worse": " worse", "not distinguishable": ""}[row.verdict(metric)]
    return f"{number(estimate.value, kind, sign=True)} {ends}{mark}"


def summary_csv(rows: Sequence[SummaryRow]) -> str:
    """All rows and all metrics with interval ends, in full precision."""
    heads = ["dataset", "model", "method", "keep_ratio", "step", "num_examples", "num_documents"]
    heads += [f"{name}{end}" for name in METRICS for end in ("", "_low", "_high")]
    lines = [
        [r.dataset, r.model, r.method, r.keep_ratio, r.step, r.num_examples, r.num_documents]
        + [value for name in METRICS for value in (r[name].value, r[name].low, r[name].high)]
        for r in rows
    ]
    return _csv(heads, lines)


def comparison_csv(rows: Sequence[ComparisonRow]) -> str:
    """All paired rows: KL ratio and differences with interval ends, in full precision."""
    heads = ["dataset", "model", "reference", "method", "keep_ratio", "step", "num_examples", "num_documents"]
    heads += ["kl_ratio", "kl_ratio_low", "kl_ratio_high"]
    heads += [f"{name}_difference{end}" for name in METRICS for end in ("", "_low", "_high")]
    lines = [
        [r.dataset, r.model, r.reference, r.method, r.keep_ratio, r.step, r.num_examples, r.num_documents]
        + [r.kl_ratio.value, r.kl_ratio.low, r.kl_ratio.high]
        + [value for name in METRICS for e in [r.differences[name]] for value in (e.value, e.low, e.high)]
        for r in rows
    ]
    return _csv(heads, lines)


def headline_text(rows: Sequence[SummaryRow], method: str | None = None) -> str:
    """Aligned text for a terminal: one method, keep ratio by keep ratio, models below one another.

    Args:
        rows: summary rows.
        method: name of the method; None takes ``headline_method``.
    """
    method = headline_method(rows) if method is None else method
    own = sorted_by_keep(final_steps([row for row in rows if row.method == method]))
    heads = ["keep", "model", *(METRICS[name].label for name in HEADLINE_METRICS)]
    body = [_headline_cells(row) for row in own]
    return f"{method}, {sizes(own)}\n{_aligned(heads, body, gap_before_new_first=True)}"


def headline_markdown(rows: Sequence[SummaryRow], method: str | None = None) -> str:
    """The same figures as ``headline_text`` as a Markdown table, for a README."""
    method = headline_method(rows) if method is None else method
    own = sorted_by_keep(final_steps([row for row in rows if row.method == method]))
    return markdown_table(
        ["keep", "model", *(METRICS[name].label for name in HEADLINE_METRICS)], [_headline_cells(row) for row in own]
    )


def headline_method(rows: Sequence[SummaryRow]) -> str:
    """Attention Matching where it was evaluated, else the first method."""
    methods = [row.method for row in rows]
    return next((name for name in methods if name.startswith("attention-matching")), methods[0])


def sizes(rows: Sequence[SummaryRow]) -> str:
    """How much data stands behind the rows, e.g. ``128 windows of 64 documents``."""
    counts = sorted({(row.num_examples, row.num_documents) for row in rows})
    return ", or ".join(f"{windows} windows of {documents} documents" for windows, documents in counts)


def sorted_by_keep(rows: Sequence[SummaryRow]) -> list[SummaryRow]:
    """Rows by keep ratio, then by step; models keep their order."""
    return sorted(rows, key=lambda row: (row.keep_ratio, -1 if row.step is None else row.step))


def markdown_table(heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table; cells may not hold a vertical bar."""
    lines = [heads, ["---"] * len(heads), *body]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _headline_cells(row: SummaryRow) -> list[str]:
    cells = [figure(row[name], METRICS[name], interval=False) for name in HEADLINE_METRICS]
    return [keep_label(row.keep_ratio), row.model, *cells]


def _aligned(heads: Sequence[str], body: Sequence[Sequence[str]], *, gap_before_new_first: bool) -> str:
    widths = [max(len(line[i]) for line in [heads, *body]) for i in range(len(heads))]
    lines, previous = [], None
    for line in [heads, *body]:
        first = line[0]
        if gap_before_new_first and previous is not None and first != previous:
            lines.append("")
        shown = [first if first != previous else "", *line[1:]]
        cells = [c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(shown, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
        previous = first
    return "\n".join(lines) + "\n"


def _csv(heads: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows(lines)
    return stream.getvalue()
