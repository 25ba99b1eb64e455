"""Whole figures: panels for the page as SVG, and the same panels side by side as PNG files."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from kvcat.evals import METRICS, ComparisonRow, SummaryRow
from kvcat.report import html
from kvcat.report.diagnostics import LOSSES, Records, draw_kept, draw_loss, has_field, has_kept
from kvcat.report.plots import (
    DIFFERENCE_METRICS,
    QUALITY_METRICS,
    STEP_METRICS,
    draw_difference,
    draw_quality,
    draw_steps,
)
from kvcat.report.style import plotting, svg
from kvcat.report.tables import final_comparisons, headline_method, keep_label

Panel = tuple[str, Callable[[Any], None]]


def quality_plots(rows: Sequence[SummaryRow], models: Sequence[str], name: str) -> str:
    """Panels for the page: each quality metric, one panel per method."""
    parts = []
    for metric in QUALITY_METRICS:
        panels = quality_panels(rows, metric, models)
        head = f"<h3>{escape(METRICS[metric].label)} against the fraction kept</h3>\n"
        parts.append(head + html.legend(models, dense=metric == "nll") + _svg_panels(panels, f"{name}-{metric}"))
    return "".join(parts)


def difference_plots(rows: Sequence[ComparisonRow], models: Sequence[str], name: str) -> str:
    """Panels for the page: KL ratio and NLL difference to the first reference, one panel per method."""
    parts, own = [], _first_reference(rows)
    shown = [model for model in models if any(row.model == model for row in own)]
    for metric in DIFFERENCE_METRICS:
        parts.append(f"<h3>{escape(_difference_title(metric, own[0].reference))}</h3>\n")
        parts.append(html.legend(models, shown))
        parts.append(_svg_panels(difference_panels(rows, metric, models), f"{name}-difference-{metric}"))
    return "".join(parts)


def step_plots(rows: Sequence[SummaryRow], models: Sequence[str], name: str) -> str:
    """Panels for the page: each step metric, one panel per method and keep ratio."""
    parts = []
    for metric in STEP_METRICS:
        head = f"<h3>{escape(METRICS[metric].label)} against gradient steps</h3>\n"
        panels = step_panels(rows, metric, models)
        parts.append(head + html.legend(models) + _svg_panels(panels, f"{name}-steps-{metric}"))
    return "".join(parts)


def diagnostic_plots(metrics: Mapping[str, Records], models: Sequence[str]) -> str:
    """Panels for the page: losses of all runs, kept fractions run by run."""
    shown = [label for label in models if label in metrics]
    parts = html.legend(models, shown) + _svg_panels(loss_panels(metrics, models), "training")
    kept = kept_panels(metrics)
    return parts + (f"<h3>Kept fraction per router</h3>\n{_svg_panels(kept, 'kept')}" if kept else "")


def quality_panels(rows: Sequence[SummaryRow], metric: str, models: Sequence[str]) -> list[Panel]:
    """One panel per method."""
    return [
        (method, lambda axes, own=[r for r in rows if r.method == method]: draw_quality(axes, own, metric, models))
        for method in dict.fromkeys(row.method for row in rows)
    ]


def difference_panels(rows: Sequence[ComparisonRow], metric: str, models: Sequence[str]) -> list[Panel]:
    """One panel per method: the other models against the first reference (the control where there is one)."""
    rows = final_comparisons(_first_reference(rows))
    return [
        (method, lambda axes, own=[r for r in rows if r.method == method]: draw_difference(axes, own, metric, models))
        for method in dict.fromkeys(row.method for row in rows)
    ]


def step_panels(rows: Sequence[SummaryRow], metric: str, models: Sequence[str]) -> list[Panel]:
    """One panel per method with steps and keep ratio."""
    cells = sorted({(row.method, row.keep_ratio) for row in rows if row.step is not None})
    return [
        (
            f"{method}, {keep_label(keep)} kept",
            lambda axes, own=[r for r in rows if (r.method, r.keep_ratio) == (method, keep)]: draw_steps(
                axes, own, metric, models
            ),
        )
        for method, keep in cells
    ]


def loss_panels(metrics: Mapping[str, Records], models: Sequence[str]) -> list[Panel]:
    """One panel per loss that any run measured."""
    return [
        (label, lambda axes, field=field: draw_loss(axes, metrics, field, models))
        for field, label in LOSSES.items()
        if any(has_field(records, field) for records in metrics.values())
    ]


def kept_panels(metrics: Mapping[str, Records]) -> list[Panel]:
    """One panel per run with routers."""
    return [
        (label, lambda axes, own=records: draw_kept(axes, own))
        for label, records in metrics.items()
        if has_kept(records)
    ]


def save_pngs(
    rows: Sequence[SummaryRow],
    comparisons: Sequence[ComparisonRow],
    models: Sequence[str],
    folder: Path,
    prefix: str = "",
    metrics: Mapping[str, Records] | None = None,
) -> list[Path]:
    """PNG files of what there is: headline, quality per metric, steps, training.

    Args:
        rows: summary rows of one data set; none draws none.
        comparisons: comparison rows of the same data set.
        models: all labels of the page, in order.
        folder: made if absent.
        prefix: of the file names.
        metrics: label to metrics of training runs.
    """
    wanted: dict[str, list[Panel]] = {}
    if rows:
        best = [row for row in rows if row.method == headline_method(rows)]
        wanted["headline"] = [
            (f"{METRICS[m].label}, {p[0]}", p[1]) for m in QUALITY_METRICS for p in quality_panels(best, m, models)
        ]
        wanted |= {f"quality-{m}": quality_panels(rows, m, models) for m in QUALITY_METRICS}
        if any(row.step is not None for row in rows):
            wanted |= {f"steps-{m}": step_panels(rows, m, models) for m in STEP_METRICS}
    if comparisons:
        reference = comparisons[0].reference
        wanted |= {
            f"difference-{m}": [
                (f"{_difference_title(m, reference)}\n{title}", draw)
                for title, draw in difference_panels(comparisons, m, models)
            ]
            for m in DIFFERENCE_METRICS
        }
    if metrics:
        wanted["training"] = loss_panels(metrics, models) + kept_panels(metrics)
    return [_save_png(panels, folder / f"{prefix}{name}.png") for name, panels in wanted.items()]


def _save_png(panels: Sequence[Panel], target: Path, columns: int = 3) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    columns = 2 if len(panels) == 4 else min(columns, len(panels))
    lines = -(-len(panels) // columns)
    with plotting() as plt:
        figure, grid = plt.subplots(lines, columns, figsize=(4.1 * columns, 3.2 * lines + 0.3), squeeze=False)
        for axes, (title, draw) in zip(grid.flat, panels, strict=False):
            draw(axes)
            axes.set_title(title)
        for axes in list(grid.flat)[len(panels) :]:
            axes.set_visible(False)
        entries: dict[str, Any] = {}
        for axes in grid.flat:
            if axes.get_legend() is None:
                handles, labels = axes.get_legend_handles_labels()
                entries |= dict(zip(labels, handles, strict=True))
        if entries:
            figure.legend(list(entries.values()), list(entries), loc="outside upper center", ncols=len(entries))
        figure.savefig(target, dpi=150, metadata={"Software": None})
    return target


def _difference_title(metric: str, reference: str) -> str:
    label = METRICS[metric].label
    return f"KL divided by that of {reference}" if metric == "kl" else f"{label} minus that of {reference}"


def _first_reference(rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    return [row for row in rows if row.reference == rows[0].reference]


def _svg_panels(panels: Sequence[Panel], name: str) -> str:
    drawings = []
    with plotting() as plt:
        for i, (title, draw) in enumerate(panels):
            figure, axes = plt.subplots(figsize=(4.6, 3.2))
            draw(axes)
            drawings.append((title, svg(figure, f"{name}-{i}".replace(" ", "-"), f"{title}: {axes.get_ylabel()}")))
            plt.close(figure)
    return html.plots(drawings)
