"""The plots of a report: all panels of a plot in one PNG file, single panels on the page."""

import base64
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Canvas
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from kvcat.evals import METRICS, LinePlot, Metric
from kvcat.report.figures import NO_STEP, keep_label, slug
from kvcat.report.results import Results

# Okabe and Ito's palette; the two colours that differ most come first; markers differ as well
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GREY = "#808080"
STYLE: dict[Any, Any] = {
    "font.size": 10.0,
    "axes.titlesize": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.formatter.useoffset": False,
    "grid.color": GREY,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.0,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "kvcat",
}
_PANEL_WIDTH = 4.4  # inches
_PANEL_HEIGHT = 3.6
_PANEL_PADDING = 0.05
_DPI = 150
_PANELS_PER_ROW = 3
_LONG_LABEL = 14  # letters in a legend
Draw = Callable[[Any], None]


@dataclass(frozen=True)
class Plot:
    """Panels that belong together; each has a title and a function that draws on given axes."""

    name: str  # name of the file
    title: str
    panels: Sequence[tuple[str, Draw]]
    same_scale: bool = False  # whether all panels have the same y axis

    def draw(self) -> "DrawnPlot":
        """All panels, drawn in rows on one canvas."""
        num_columns = min(_PANELS_PER_ROW, len(self.panels))
        if len(self.panels) == 4:  # two rows of two leave no place empty
            num_columns = 2
        num_rows = -(-len(self.panels) // num_columns)
        size = (_PANEL_WIDTH * num_columns, _PANEL_HEIGHT * num_rows)
        with mpl.rc_context(STYLE):
            canvas = Canvas(figsize=size, dpi=_DPI)
            panels = []
            for rank, (title, draw) in enumerate(self.panels):
                axes = canvas.add_subplot(num_rows, num_columns, rank + 1)
                axes.set_title(title)
                draw(axes)
                _add_legend(axes)
                panels.append(axes)
            if self.same_scale:
                limits = np.array([axes.get_ylim() for axes in panels])
                for axes in panels:
                    axes.set_ylim(limits[:, 0].min(), limits[:, 1].max())
            ConstrainedLayoutEngine().execute(canvas)  # once, for all files
        return DrawnPlot(self.name, self.title, canvas, panels)


@dataclass(frozen=True)
class DrawnPlot:
    """A plot that is drawn on its canvas."""

    name: str  # name of the file
    title: str
    canvas: Canvas
    panels: list[Any]  # matplotlib axes

    def save(self, target: Path) -> None:
        """Write all panels to a PNG file."""
        target.parent.mkdir(parents=True, exist_ok=True)
        with mpl.rc_context(STYLE):
            self.canvas.savefig(target, metadata={"Software": None})

    def images(self) -> list[tuple[str, str]]:
        """The title of each panel, and a ``data:`` address of an SVG image without this title."""
        with mpl.rc_context(STYLE):
            return [(panel.get_title(), self._svg_address(panel)) for panel in self.panels]

    def _svg_address(self, panel: Any) -> str:
        for other in self.panels:
            other.set_visible(other is panel)
        panel.title.set_visible(False)
        box = panel.get_tightbbox().transformed(self.canvas.dpi_scale_trans.inverted())
        stream = io.BytesIO()
        self.canvas.savefig(
            stream,
            format="svg",
            bbox_inches=box.padded(_PANEL_PADDING),
            metadata={"Date": None, "Creator": None},
        )
        panel.title.set_visible(True)
        for other in self.panels:
            other.set_visible(True)
        return "data:image/svg+xml;base64," + base64.b64encode(stream.getvalue()).decode()


def _add_legend(axes: Any) -> None:
    """Add a legend below the axes, with every line that has a label."""
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        num_columns = 2 if max(map(len, labels)) > _LONG_LABEL else 3
        axes.legend(
            handles, labels, loc="upper center", bbox_to_anchor=(0.45, -0.2), ncols=num_columns
        )


def result_plots(
    results: Results, methods: Sequence[str] = (), models: Sequence[str] = ()
) -> list[Plot]:
    """All plots of a folder, the most important first; empty if nothing was compressed.

    ``methods`` and ``models`` are all of the page; their order determines the colours, so that a
    name has one colour in all sections. By default those of the folder.
    """
    if not results.methods:
        return []
    methods = methods or results.methods
    differences = [
        difference_plot(results, *pair, methods)
        for pair, rows in results.pair_rows.items()
        if len(rows)
    ]
    headline = headline_plot(results, methods)
    steps = _step_plots(results, models or results.models)
    return [*differences[:1], headline, *differences[1:], *steps]


def difference_plot(
    results: Results, model: str, reference: str, methods: Sequence[str] = ()
) -> Plot:
    """The plot of differences between two models in the two main metrics, a line per method."""
    rows = results.pair_rows[model, reference]
    rows = rows[rows["final"]]
    panels = []
    for name in _plotted(results):
        title = f"{METRICS[name].label}: {model} minus {reference}"
        panels.append((title, partial(_draw_differences, rows, name, methods or results.methods)))
    return Plot(
        f"differences-{slug(model)}-{slug(reference)}",
        f"{model} against {reference} by method and share of slots kept",
        panels,
        same_scale=True,
    )


def headline_plot(results: Results, methods: Sequence[str] = ()) -> Plot:
    """The plot of quality against the slots kept, a line per method, with 95 % intervals.

    One model has a panel per plotted metric, several models a panel each for the first metric.
    """
    methods = methods or results.methods
    whole = results.compressed(results.rows)
    rows = whole[whole["final"]]
    panels = []
    if len(results.models) == 1:
        recorded = set(results.metrics)
        chosen = [name for name in results.evaluation.method_metrics if name in recorded]
        panels += [
            (METRICS[name].label, partial(_draw_methods, rows, name, methods))
            for name in chosen or _plotted(results)
        ]
    else:
        name = _plotted(results)[0]
        for model in results.models:
            of_model = rows[rows["model"] == model]
            if of_model.empty:
                continue
            title = f"{METRICS[name].label}, {model}"
            panels.append((title, partial(_draw_methods, of_model, name, methods)))
    title = "Methods against the share of slots kept"
    return Plot("headline", title, panels, same_scale=len(results.models) > 1)


def _plotted(results: Results) -> list[str]:
    """The metrics that the evaluation plots; by default two with the same unit."""
    recorded = set(results.metrics)
    plotted = [name for name in results.evaluation.plotted_metrics if name in recorded]
    if plotted:
        return plotted
    names = results.metrics[:2]
    unit = METRICS[names[0]].unit
    return [name for name in names if METRICS[name].unit == unit]


def _step_plots(results: Results, models: Sequence[str]) -> Iterator[Plot]:
    """Plots of quality against gradient steps, with a panel per method and keep ratio."""
    rows = results.whole[results.whole["step"] != NO_STEP]
    if rows.empty:
        return
    evaluation = results.evaluation
    for metric in evaluation.step_metrics or (evaluation.deciding,):
        panels = []
        for (method, keep), cell in rows.groupby(["method", "keep_ratio"], sort=False):
            title = f"{method}, {keep_label(keep)} kept"
            panels.append((title, partial(_draw_steps, cell, metric, models)))
        yield Plot(f"steps-{metric}", f"{METRICS[metric].label} against gradient steps", panels)


def save_line_plot(plot: LinePlot, file: Path) -> Path:
    """The path of the PNG file, after all panels were written to it."""
    models = list(dict.fromkeys(plot.rows["model"]))
    panels = []
    for column, title in plot.panels.items():
        panels.append((title, partial(_draw_line_plot, plot, column, models)))
    Plot(file.stem, plot.title, panels, same_scale=True).draw().save(file)
    return file


def _draw_line_plot(plot: LinePlot, column: str, models: Sequence[str], axes: Any) -> None:
    """Draw one line per model on logarithmic axes; values of zero are left out."""
    positive = plot.rows[plot.rows[column] > 0.0]
    for model in models:
        line = positive[positive["model"] == model].sort_values(plot.x)
        axes.plot(
            line[plot.x].to_numpy(),
            line[column].to_numpy(),
            markersize=4.0,
            label=model,
            **line_style(model, models),
        )
    numbers = sorted(set(plot.rows[plot.x]))
    axes.set_xscale("log", base=2)
    axes.set_xticks(numbers, [str(number) for number in numbers])
    axes.minorticks_off()
    axes.set_xlabel(f"{plot.x_label}, log axis")
    axes.set_ylabel(f"{plot.y_label} ({plot.unit}, log axis)")
    if len(positive):
        log_axis(axes)


def line_style(name: str, names: Sequence[str]) -> dict[str, str]:
    """The colour and marker of a line, which depend on the position of its name.

    No two of 49 names have both in common: names with one colour have different markers.
    """
    rounds, rank = divmod(list(names).index(name), len(COLOURS))
    return {"color": COLOURS[rank], "marker": MARKERS[(rank + rounds) % len(MARKERS)]}


def log_axis(axes: Any) -> None:
    """Make the y axis logarithmic, with plain numbers at 1, 2 and 5 times powers of ten."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _draw_methods(rows: pd.DataFrame, metric: str, methods: Sequence[str], axes: Any) -> None:
    """Draw a metric with intervals against the keep ratio, a line per method."""
    facts = METRICS[metric]
    of_metric = rows[(rows["metric"] == metric) & rows["value"].notna()]
    if facts.log_scale:
        of_metric = of_metric[of_metric["value"] > 0.0]
    names = [name for name in methods if name in set(of_metric["method"])]
    for rank, name in enumerate(names):
        line = of_metric[of_metric["method"] == name].sort_values("keep_ratio")
        offset = rank - (len(names) - 1) / 2
        style = line_style(name, methods)
        _draw_intervals(axes, line, "value", facts, offset=offset, label=name, style=style)
    dense = rows[rows["metric"] == facts.dense_metric]
    if len(dense):
        level = facts.scale * dense["value"].iloc[-1]
        axes.axhline(level, color=GREY, linestyle="--", linewidth=1.0, label="whole cache")
    unit = "%" if facts.percent else facts.unit
    is_log = facts.log_scale and len(of_metric) > 0
    axes.set_ylabel(f"{facts.label} ({unit}{', log axis' if is_log else ''})")
    if is_log:
        log_axis(axes)
    _set_keep_axis(axes, rows)


def _draw_steps(rows: pd.DataFrame, metric: str, models: Sequence[str], axes: Any) -> None:
    """Draw a metric against gradient steps, a line per model."""
    _draw_lines(axes, rows, "step", metric, models)
    steps = sorted(rows["step"].unique())
    axes.set_xscale("symlog", linthresh=1.0, linscale=0.5)
    axes.set_xticks(steps, [str(step) for step in steps])
    axes.minorticks_off()
    axes.set_xlabel("gradient steps")


def _draw_differences(rows: pd.DataFrame, metric: str, methods: Sequence[str], axes: Any) -> None:
    """Draw paired differences with intervals against the keep ratio, a line per method."""
    facts = METRICS[metric]
    rows = rows[rows["metric"] == metric].sort_values("keep_ratio")
    names = [name for name in methods if name in set(rows["method"])]
    middle = (len(names) - 1) / 2
    for rank, name in enumerate(names):
        line = rows[rows["method"] == name]
        style = line_style(name, methods)
        _draw_intervals(
            axes, line, "difference", facts, offset=rank - middle, label=name, style=style
        )
    axes.axhline(0.0, color="black", linewidth=1.0, label="no difference")
    _set_keep_axis(axes, rows)
    unit = "points" if facts.percent else facts.unit
    side = "below" if facts.lower_is_better else "above"
    axes.set_ylabel(f"{unit}, {side} 0 is better")


def _draw_intervals(
    axes: Any,
    line: pd.DataFrame,
    column: str,
    metric: Metric,
    *,
    offset: float,
    label: str,
    style: Mapping[str, str],
) -> None:
    """Draw one line with error bars; an offset of 1 moves it by 3 %, which keeps bars apart."""
    ends = line[[column, "low", "high"]].to_numpy(float) * metric.scale
    value, low, high = ends.T
    lengths = np.maximum(np.stack([value - low, high - value]), 0.0)
    if metric.log_scale and column == "value":  # bars that reach 0 end at a tenth of the value
        lengths[0] = np.minimum(lengths[0], 0.9 * value)
    axes.errorbar(
        line["keep_ratio"].to_numpy() * (1.0 + 0.03 * offset),
        value,
        yerr=np.nan_to_num(lengths),
        label=label,
        capsize=2.5,
        elinewidth=1.0,
        **style,
    )


def _draw_lines(axes: Any, rows: pd.DataFrame, x: str, metric: str, models: Sequence[str]) -> None:
    """Draw a line per model, without intervals: paired differences show which model is better."""
    facts = METRICS[metric]
    rows = rows[(rows["metric"] == metric) & rows["value"].notna()].sort_values(x)
    positive = rows[rows["value"] > 0.0]
    is_log = facts.log_scale and len(positive) > 0
    if is_log:
        rows = positive
    for model in models:
        line = rows[rows["model"] == model]
        if len(line):
            axes.plot(
                line[x], facts.scale * line["value"], label=model, **line_style(model, models)
            )
    unit = "%" if facts.percent else facts.unit
    axes.set_ylabel(f"{facts.label} ({unit}{', log axis' if is_log else ''})")
    if is_log:
        log_axis(axes)


def _set_keep_axis(axes: Any, rows: pd.DataFrame) -> None:
    keeps = sorted(rows["keep_ratio"].unique())
    labels = [f"{100.0 * keep:g}" for keep in keeps]
    axes.set_xscale("log")
    axes.set_xticks(keeps, labels, fontsize=10 if len(keeps) < 7 else 8)
    axes.minorticks_off()
    axes.set_xlim(keeps[0] / 1.25, keeps[-1] * 1.25)
    axes.set_xlabel("slots kept (%)")
