"""Plots of an evaluation: quality against keep ratio, and against gradient steps."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvcat.evals import Estimate
from kvcat.evals.rows import ComparisonRow, SummaryRow
from kvcat.evals.rows_metrics import METRICS
from kvcat.report.reading import final_steps
from kvcat.report.style import colours, markers
from kvcat.report.tables import keep_label

DENSE = {
    "nll": "nll_dense", "exact_match": "dense_exact_match", "string_match": "dense_string_match",
    "accuracy": "dense_accuracy",
}  # fmt: skip
"""Metric on the compact cache to the same with the whole cache."""
_LOG_METRICS = ("kl",)


def draw_quality(axes: Any, rows: Sequence[SummaryRow], metric: str, models: Sequence[str]) -> None:
    """One metric of one method against the keep ratio in bands of intervals; dashed the levels with the whole cache.

    Args:
        axes: matplotlib axes.
        rows: of one method.
        metric: name in ``METRICS``.
        models: all labels of the page, in order; they fix colours.
    """
    rows = final_steps(rows)
    keeps = sorted({row.keep_ratio for row in rows})
    for model in models:
        own = sorted((row for row in rows if row.model == model), key=lambda row: row.keep_ratio)
        if not own:
            continue
        _line(axes, [row.keep_ratio for row in own], own, metric, model, models)
        if DENSE.get(metric) in own[-1].metrics:
            level = _scaled(metric, own[-1][DENSE[metric]].value)
            axes.axhline(level, color=colours(models)[model], linestyle="--", linewidth=1.0)
    if DENSE.get(metric) in rows[0].metrics:
        axes.plot([], [], color="#808080", linestyle="--", linewidth=1.0, label="dense level of the model")
    _keep_axis(axes, keeps)
    _finish(axes, metric)


def draw_difference(axes: Any, rows: Sequence[ComparisonRow], metric: str, models: Sequence[str]) -> None:
    """Paired difference of one method to one reference against the keep ratio, with intervals; KL as a ratio.

    Args:
        axes: matplotlib axes.
        rows: of one method and one reference, the last step each.
        metric: name in ``METRICS``.
        models: all labels of the page, in order; they fix colours.
    """
    shown = [model for model in models if any(row.model == model for row in rows)]
    for rank, model in enumerate(shown):
        own = sorted((row for row in rows if row.model == model), key=lambda row: row.keep_ratio)
        dodge = 1.0 + 0.03 * (rank - (len(shown) - 1) / 2)
        estimates = [row.kl_ratio if metric == "kl" else row.differences[metric] for row in own]
        scale = 100.0 if METRICS[metric].percent else 1.0
        _errorbar(axes, [row.keep_ratio * dodge for row in own], estimates, model, models, scale)
    axes.axhline(1.0 if metric == "kl" else 0.0, color="#808080", linewidth=1.2)
    _keep_axis(axes, sorted({row.keep_ratio for row in rows}))
    unit = "points" if METRICS[metric].percent else "nats per token"
    axes.set_ylabel("ratio" if metric == "kl" else f"difference ({unit})")


def draw_steps(axes: Any, rows: Sequence[SummaryRow], metric: str, models: Sequence[str]) -> None:
    """One metric of one method and keep ratio against gradient steps, with bands of intervals.

    Args:
        axes: matplotlib axes.
        rows: of one method and keep ratio, one per model and step.
        metric: name in ``METRICS``.
        models: all labels of the page, in order; they fix colours.
    """
    steps = sorted({row.step for row in rows if row.step is not None})
    for model in models:
        own = sorted((row for row in rows if row.model == model), key=lambda row: row.step or 0)
        if own:
            _line(axes, [float(row.step or 0) for row in own], own, metric, model, models)
    axes.set_xscale("symlog", linthresh=1.0, linscale=0.5)
    axes.set_xticks(steps, [str(step) for step in steps])
    axes.minorticks_off()
    axes.set_xlabel("gradient steps")
    _finish(axes, metric)


def _line(
    axes: Any, x: Sequence[float], rows: Sequence[SummaryRow], metric: str, model: str, models: Sequence[str]
) -> None:
    """A model's line in the band of its intervals; figures of zero are left out on a log axis."""
    values = _scaled(metric, 1.0) * np.array(
        [[getattr(row[metric], e) for e in ("value", "low", "high")] for row in rows]
    )
    shown = np.isfinite(values[:, 0]) & ((values[:, 0] > 0.0) | (metric not in _LOG_METRICS))
    places, (value, low, high) = np.asarray(x)[shown], values[shown].T
    low, high = np.where(np.isnan(low), value, low), np.where(np.isnan(high), value, high)
    low = np.maximum(low, value * 1e-3) if metric in _LOG_METRICS else low
    axes.fill_between(places, low, high, color=colours(models)[model], alpha=0.13, linewidth=0.0)
    axes.plot(places, value, color=colours(models)[model], marker=markers(models)[model], label=model)


def _errorbar(
    axes: Any,
    x: Sequence[float],
    estimates: Sequence[Estimate],
    model: str,
    models: Sequence[str],
    scale: float,
) -> None:
    """A model's line with intervals."""
    value, low, high = (
        scale * np.array([getattr(estimate, end) for estimate in estimates]) for end in ("value", "low", "high")
    )
    low, high = np.where(np.isnan(low), value, low), np.where(np.isnan(high), value, high)
    shown = np.isfinite(value)
    errors = np.stack([np.maximum(value - low, 0.0), np.maximum(high - value, 0.0)])
    axes.errorbar(
        np.asarray(x)[shown], value[shown], yerr=errors[:, shown], color=colours(models)[model],
        marker=markers(models)[model], capsize=2.5, elinewidth=1.0, label=model,
    )  # fmt: skip


def _keep_axis(axes: Any, keeps: Sequence[float]) -> None:
    axes.set_xscale("log")
    axes.set_xticks(keeps, [keep_label(keep).rstrip("%") for keep in keeps], fontsize=10 if len(keeps) < 7 else 8)
    axes.minorticks_off()
    axes.set_xlim(keeps[0] / 1.25, keeps[-1] * 1.25)
    axes.set_xlabel("slots kept (%)")


def metric_label(metric: str, *, log: bool = False) -> str:
    """The name of a metric with its unit, for an axis."""
    unit = {"nll_choice": "nats", "nll_per_char": "nats per character"}.get(metric, "nats per token")
    unit = "%" if METRICS[metric].percent else unit
    return f"{METRICS[metric].label} ({unit}{', log axis' if log else ''})"


def log_axis(axes: Any) -> None:
    """A logarithmic y axis with plain numbers at 1, 2 and 5."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _scaled(metric: str, value: float) -> float:
    return 100.0 * value if METRICS[metric].percent else value


def _finish(axes: Any, metric: str) -> None:
    positive = any((np.asarray(line.get_ydata()) > 0.0).any() for line in axes.lines)
    log = metric in _LOG_METRICS and positive
    axes.set_ylabel(metric_label(metric, log=log))
    if log:
        log_axis(axes)
    if METRICS[metric].percent and METRICS[metric].binary:
        axes.set_ylim(-3.0, 103.0)
