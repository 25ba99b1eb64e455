"""Which plots an evaluation has; the same panels go into the page as SVG and side by side into PNG files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from kvcat.evals.rows import SummaryRow
from kvcat.evals.rows_metrics import METRICS
from kvcat.report import html
from kvcat.report.charts import draw_heat, draw_pareto, draw_strata
from kvcat.report.diagnostics import LOSSES, Records, draw_kept, draw_loss, has_field, has_kept
from kvcat.report.plots import DENSE, draw_difference, draw_quality, draw_steps
from kvcat.report.reading import Results, final_steps
from kvcat.report.style import plotting, svg
from kvcat.report.tables import STRATA, keep_label

Panel = tuple[str, Callable[[Any], None]]
_QUALITY = {
    "suffix": ("kl", "nll", "delta_nll"), "needle": ("exact_match", "native_exact_match", "correct_prefix"),
    "ruler": ("string_match", "exact_match"), "longbench": ("accuracy", "nll_choice"),
}  # fmt: skip
_STEPS = {"suffix": ("kl", "delta_nll")}
_DIFFERENCES = {"suffix": ("kl", "nll")}
_WIDTH, _HEIGHT, _LINE = 4.6, 3.2, 0.34  # inches, of a panel and of a category
_LEFT, _RIGHT, _BOTTOM, _TITLE, _LEGEND = 0.84, 0.08, 0.5, 0.3, 0.55


@dataclass(frozen=True)
class PlotGroup:
    """Plots that stand together under one heading and in one PNG file.

    Args:
        part: of the evaluation's section.
        name: of the file.
        title: heading.
        panels: title of each and what draws it.
        labels: all labels that fix colours, in order; empty where the panels need no common legend.
        shown: those of them in the legend; None shows all.
        dense: a dashed line is a model's level with the whole cache.
        front: a ring marks the Pareto front.
        categories: on the y axis, which need room.
    """

    part: str
    name: str
    title: str
    panels: Sequence[Panel]
    labels: Sequence[str] = ()
    shown: Sequence[str] | None = None
    dense: bool = False
    front: bool = False
    categories: Sequence[str] = ()

    @property
    def inches(self) -> tuple[float, float]:
        """Width and height of a panel; margins are fixed, for layout by the sizes of texts is slow."""
        return _WIDTH, max(_HEIGHT, 1.0 + _LINE * len(self.categories))

    @property
    def left(self) -> float:
        """Inches to the left of the axes."""
        return max(_LEFT, 0.45 + 0.085 * max(map(len, self.categories), default=0))

    def page(self, name: str) -> str:
        """Heading, legend and SVG panels.

        Args:
            name: of the evaluation's section, so that ids are unique in the page.
        """
        drawings = []
        width, height = self.inches
        with plotting() as plt:
            for i, (title, draw) in enumerate(self.panels):
                figure, axes = plt.subplots(figsize=self.inches)
                figure.subplots_adjust(self.left / width, _BOTTOM / height, 1.0 - _RIGHT / width, 1.0 - _RIGHT / height)
                draw(axes)
                told = f"{title}: {axes.get_ylabel() or axes.get_xlabel()}"
                drawings.append((title, svg(figure, f"{name}-{self.name}-{i}", told)))
                plt.close(figure)
        legend = html.legend(self.labels, self.shown, dense=self.dense, front=self.front) if self.labels else ""
        return f"<h4>{escape(self.title)}</h4>\n{legend}{html.plots(drawings)}"

    def save(self, target: Path) -> None:
        """The panels side by side as a PNG file."""
        target.parent.mkdir(parents=True, exist_ok=True)
        columns = 2 if len(self.panels) == 4 else min(3, len(self.panels))
        lines = -(-len(self.panels) // columns)
        width, height = self.inches[0], self.inches[1] + _TITLE
        whole = (width * columns, height * lines + _LEGEND)
        with plotting() as plt:
            figure, grid = plt.subplots(lines, columns, figsize=whole, squeeze=False)
            axes_width, axes_height = width - self.left - _RIGHT, height - _BOTTOM - _TITLE
            figure.subplots_adjust(
                self.left / whole[0], _BOTTOM / whole[1], 1.0 - _RIGHT / whole[0], 1.0 - (_LEGEND + _TITLE) / whole[1],
                (width - axes_width) / axes_width, (height - axes_height) / axes_height,
            )  # fmt: skip
            for axes, (title, draw) in zip(grid.flat, self.panels, strict=False):
                draw(axes)
                axes.set_title(title)
            for axes in list(grid.flat)[len(self.panels) :]:
                axes.set_visible(False)
            entries: dict[str, Any] = {}
            for axes in grid.flat:
                if axes.get_legend() is None:
                    handles, labels = axes.get_legend_handles_labels()
                    entries |= dict(zip(labels, handles, strict=True))
            if entries:
                figure.legend(
                    list(entries.values()), list(entries), loc="upper center", ncols=max(1, int(whole[0] / 1.5)),
                    borderaxespad=0.3,
                )  # fmt: skip
            figure.savefig(target, dpi=150, metadata={"Software": None})


def result_plots(results: Results, models: Sequence[str]) -> list[PlotGroup]:
    """All plots of an evaluation, in order.

    Args:
        results: of a folder.
        models: all labels of the page, as this folder shows them.
    """
    groups = [*_quality(results, models), *_by_stratum(results, models)]
    groups += [*_step_groups(results, models), *_difference_groups(results, models), *_pareto(results)]
    return [group for group in groups if group.panels]


def training_plots(metrics: Mapping[str, Records], models: Sequence[str]) -> PlotGroup:
    """Losses of all runs, and kept fractions run by run.

    Args:
        metrics: label to metrics of a run.
        models: all labels of the page.
    """
    losses = [
        (label, lambda axes, field=field: draw_loss(axes, metrics, field, models))
        for field, label in LOSSES.items()
        if any(has_field(records, field) for records in metrics.values())
    ]
    kept = [
        (f"{label}: kept", lambda axes, own=records: draw_kept(axes, own))
        for label, records in metrics.items()
        if has_kept(records)
    ]
    shown = [label for label in models if label in metrics]
    title = "Losses, and the kept fraction per router" if kept else "Losses"
    return PlotGroup("Training", "training", title, [*losses, *kept], models, shown)


def _quality(results: Results, models: Sequence[str]) -> list[PlotGroup]:
    if not results.rows:
        return []
    shown, groups = [model for model in models if model in results.models], []
    for metric in _QUALITY.get(results.evaluation, (results.deciding,)):
        if metric in results.rows[0].metrics:
            title = f"{METRICS[metric].label} against the fraction kept"
            panels = _quality_panels(results.rows, metric, models)
            dense = DENSE.get(metric) in results.rows[0].metrics
            groups.append(PlotGroup("Plots", f"quality-{metric}", title, panels, models, shown, dense=dense))
    return groups


def headline_plot(results: Results, models: Sequence[str]) -> PlotGroup | None:
    """The quality plots of the headline method side by side, a file for a README; None where nothing was compressed."""
    if not results.rows:
        return None
    own = [row for row in results.rows if row.method == results.headline_method]
    names = [name for name in _QUALITY.get(results.evaluation, (results.deciding,)) if name in own[0].metrics]
    panels = [
        (f"{METRICS[name].label}, {title}", draw)
        for name in names
        for title, draw in _quality_panels(own, name, models)
    ]
    return PlotGroup("", "headline", "", panels, models)


def _quality_panels(rows: Sequence[SummaryRow], metric: str, models: Sequence[str]) -> list[Panel]:
    return [
        (method, lambda axes, own=[r for r in rows if r.method == method]: draw_quality(axes, own, metric, models))
        for method in dict.fromkeys(row.method for row in rows)
    ]


def _by_stratum(results: Results, models: Sequence[str]) -> list[PlotGroup]:
    """Heat maps where keep ratios and strata are regular, dots with intervals elsewhere."""
    name, rows = results.deciding, final_steps(results.strata)
    if not rows:
        return []
    strata = list(dict.fromkeys(row.stratum for row in rows))
    shown = [model for model in models if model in results.models]
    if results.evaluation in ("needle", "ruler"):
        panels = [
            (
                f"{model}, {method}" if len(results.methods) > 1 else model,
                lambda axes, own=[r for r in rows if (r.model, r.method) == (model, method)]: draw_heat(
                    axes, own, name, strata, STRATA[results.evaluation]
                ),
            )
            for method in results.methods
            for model in shown
        ]
        title = f"{METRICS[name].label} (%) by {STRATA[results.evaluation]} and fraction kept"
        return [PlotGroup("Plots", "heat", title, panels, categories=strata)]
    method = results.headline_method
    panels = [
        (
            f"{method}, {keep_label(keep)} kept" if results.rows else "",
            lambda axes, own=[r for r in rows if (r.method, r.keep_ratio) == (method, keep)]: draw_strata(
                axes, own, name, models, strata
            ),
        )
        for keep in sorted({row.keep_ratio for row in rows if row.method == method})
    ]
    title = f"{METRICS[name].label} by {STRATA[results.evaluation]}"
    return [PlotGroup("Plots", "strata", title, panels, models, shown, categories=strata)]


def _step_groups(results: Results, models: Sequence[str]) -> list[PlotGroup]:
    rows = [row for row in results.rows if row.step is not None]
    cells = dict.fromkeys((row.method, row.keep_ratio) for row in rows)
    shown, groups = [model for model in models if model in results.models], []
    for metric in _STEPS.get(results.evaluation, (results.deciding,)) if rows else ():
        panels = [
            (
                f"{method}, {keep_label(keep)} kept",
                lambda axes, own=[r for r in rows if (r.method, r.keep_ratio) == (method, keep)], name=metric: (
                    draw_steps(axes, own, name, models)
                ),
            )
            for method, keep in cells
        ]
        title = f"{METRICS[metric].label} against gradient steps"
        groups.append(PlotGroup("Optimization steps", f"steps-{metric}", title, panels, models, shown))
    return groups


def _difference_groups(results: Results, models: Sequence[str]) -> list[PlotGroup]:
    """Against the first reference (the control where there is one)."""
    if not results.comparisons or not results.rows:
        return []
    reference = results.comparisons[0].reference
    rows = final_steps([r for r in results.comparisons if r.reference == reference and r.method in results.methods])
    shown, groups = [model for model in models if any(row.model == model for row in rows)], []
    for metric in _DIFFERENCES.get(results.evaluation, (results.deciding,)):
        title = f"{METRICS[metric].label} minus that of {reference}"
        title = f"KL divided by that of {reference}" if metric == "kl" else title
        panels = [
            (
                method,
                lambda axes, own=[r for r in rows if r.method == method], name=metric: draw_difference(
                    axes, own, name, models
                ),
            )
            for method in dict.fromkeys(row.method for row in rows)
        ]
        groups.append(PlotGroup("Differences", f"difference-{metric}", title, panels, models, shown))
    return groups


def _pareto(results: Results) -> list[PlotGroup]:
    costs, rows, name = final_steps(results.costs), final_steps(results.rows), results.deciding
    panels = [
        (
            model,
            lambda axes, own=[r for r in rows if r.model == model], spent=[c for c in costs if c.model == model]: (
                draw_pareto(axes, own, spent, name, results.methods)
            ),
        )
        for model in dict.fromkeys(cost.model for cost in costs)
    ]
    title = f"{METRICS[name].label} against the seconds that compression takes"
    return [PlotGroup("Costs", "pareto", title, panels, results.methods, front=True)]
