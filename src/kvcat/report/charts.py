"""Plots beyond lines: quality against seconds with its Pareto front, heat maps, dots by stratum."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvcat.evals.rows import SummaryRow
from kvcat.evals.rows_metrics import METRICS
from kvcat.report.costs import CostRow
from kvcat.report.plots import log_axis, metric_label
from kvcat.report.style import colours, markers
from kvcat.report.tables import keep_label

_DARK, _LIGHT = "#101418", "#ffffff"


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Ranks of the points (cost, loss) that no other point beats: none is at most as high in both and lower in one."""
    return [
        i
        for i, (cost, loss) in enumerate(points)
        if not any(c <= cost and q <= loss and (c < cost or q < loss) for c, q in points)
    ]


def draw_pareto(
    axes: Any, rows: Sequence[SummaryRow], costs: Sequence[CostRow], metric: str, methods: Sequence[str]
) -> None:
    """Quality against seconds of compression, of one model: a line per method, a ring around the Pareto front.

    Args:
        axes: matplotlib axes.
        rows: of one model, the last step of each method and keep ratio.
        costs: of the same model.
        metric: name in ``METRICS``.
        methods: all methods in order; they fix colours.
    """
    seconds = {(cost.method, cost.keep_ratio, cost.step): cost.seconds for cost in costs}
    own = [row for row in rows if (row.method, row.keep_ratio, row.step) in seconds]
    scale = 100.0 if METRICS[metric].percent else 1.0
    places = [(seconds[row.method, row.keep_ratio, row.step], scale * row[metric].value) for row in own]
    for rank, method in enumerate(methods):
        colour = colours(methods)[method]
        side = {"xytext": (6, 4), "ha": "left"} if rank % 2 == 0 else {"xytext": (-6, -10), "ha": "right"}
        line = [(place, row.keep_ratio) for place, row in zip(places, own, strict=True) if row.method == method]
        if line:
            x, y = zip(*(place for place, _ in line), strict=True)
            axes.plot(x, y, color=colour, marker=markers(methods)[method], label=method)
            for place, keep in {line[0], line[-1]}:
                axes.annotate(keep_label(keep), place, textcoords="offset points", fontsize=7.5, color=colour, **side)
    sign = 1.0 if METRICS[metric].better == "lower" else -1.0
    front = [places[i] for i in pareto_front([(x, sign * y) for x, y in places])]
    if front:
        x, y = zip(*front, strict=True)
        axes.plot(
            x, y, linestyle="none", marker="o", markersize=11, markerfacecolor="none", markeredgecolor="#808080",
            label="Pareto front",
        )  # fmt: skip
    axes.set_xscale("log")
    axes.margins(x=0.12)
    axes.set_xlabel("seconds to compress an example (log axis)")
    log = METRICS[metric].name == "kl" and all(y > 0.0 for _, y in places)
    axes.set_ylabel(metric_label(metric, log=log))
    if log:
        log_axis(axes)


def draw_heat(axes: Any, rows: Sequence[SummaryRow], metric: str, strata: Sequence[str], name: str) -> None:
    """A metric by stratum and keep ratio, of one model and method, in percent, with the number in every cell.

    Args:
        axes: matplotlib axes.
        rows: one per stratum and keep ratio.
        metric: name in ``METRICS``, a share.
        strata: from top to bottom.
        name: what a stratum is.
    """
    keeps = sorted({row.keep_ratio for row in rows})
    grid = np.full((len(strata), len(keeps)), np.nan)
    for row in rows:
        grid[list(strata).index(row.stratum), keeps.index(row.keep_ratio)] = 100.0 * row[metric].value
    axes.pcolormesh(grid, cmap="Blues", vmin=0.0, vmax=100.0, edgecolors="#808080", linewidth=0.4)
    for (line, column), value in np.ndenumerate(grid):
        if not np.isnan(value):
            colour = _LIGHT if value > 70.0 else _DARK
            axes.text(column + 0.5, line + 0.5, f"{value:.0f}", ha="center", va="center", color=colour, fontsize=9)
    axes.set_xticks(np.arange(len(keeps)) + 0.5, [keep_label(keep).rstrip("%") for keep in keeps])
    axes.set_yticks(np.arange(len(strata)) + 0.5, list(strata))
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.tick_params(length=0)
    axes.set_xlabel("slots kept (%)")
    axes.set_ylabel(name)


def draw_strata(
    axes: Any, rows: Sequence[SummaryRow], metric: str, models: Sequence[str], strata: Sequence[str]
) -> None:
    """A share by stratum with intervals: a line per stratum, a dot per model.

    Args:
        axes: matplotlib axes.
        rows: of one method, keep ratio and step, one per stratum and model.
        metric: name in ``METRICS``, a share.
        models: all labels of the page, in order; they fix colours.
        strata: from top to bottom.
    """
    shown = [model for model in models if any(row.model == model for row in rows)]
    for rank, model in enumerate(shown):
        own = [row for row in rows if row.model == model]
        y = [list(strata).index(row.stratum) + 0.16 * (rank - (len(shown) - 1) / 2) for row in own]
        value, low, high = (
            100.0 * np.array([getattr(row[metric], end) for row in own]) for end in ("value", "low", "high")
        )
        errors = np.nan_to_num(np.stack([value - low, high - value]))
        axes.errorbar(
            value, y, xerr=np.maximum(errors, 0.0), linestyle="none", color=colours(models)[model],
            marker=markers(models)[model], capsize=2.0, elinewidth=1.0, label=model,
        )  # fmt: skip
    axes.set_yticks(range(len(strata)), list(strata))
    axes.set_ylim(len(strata) - 0.4, -0.6)
    axes.set_xlim(-2.0, 102.0)
    axes.set_xlabel(metric_label(metric))
