"""Plots of an evaluation: quality against keep ratio, and against gradient steps."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvcat.evals import METRICS, ComparisonRow, Estimate, SummaryRow
from kvcat.report.style import colours, markers
from kvcat.report.tables import final_steps, keep_label

QUALITY_METRICS = ("kl", "nll", "delta_nll")
STEP_METRICS = ("kl", "delta_nll")
DIFFERENCE_METRICS = ("kl", "nll")
_LOG_METRICS = ("kl",)


def draw_quality(axes: Any, rows: Sequence[SummaryRow], metric: str, models: Sequence[str]) -> None:
    """One metric of one method against the keep ratio, with intervals; for NLL each model's dense level, dashed.

    Args:
        axes: matplotlib axes.
        rows: of one method.
        metric: name in ``METRICS``.
        models: all labels of the page, in order; they fix colours.
    """
    rows = final_steps(rows)
    keeps = sorted({row.keep_ratio for row in rows})
    for rank, model in enumerate(models):
        own = sorted((row for row in rows if row.model == model), key=lambda row: row.keep_ratio)
        if not own:
            continue
        dodge = 1.0 + 0.03 * (rank - (len(models) - 1) / 2)
        _line(axes, [row.keep_ratio * dodge for row in own], own, metric, model, models)
        if metric == "nll":
            level = own[-1]["nll_dense"].value
            axes.axhline(level, color=colours(models)[model], linestyle="--", linewidth=1.0)
    if metric == "nll":
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
        _errorbar(axes, [row.keep_ratio * dodge for row in own], estimates, model, models)
    axes.axhline(1.0 if metric == "kl" else 0.0, color="#808080", linewidth=1.2)
    _keep_axis(axes, sorted({row.keep_ratio for row in rows}))
    axes.set_ylabel("ratio" if metric == "kl" else "difference (nats per token)")


def draw_steps(axes: Any, rows: Sequence[SummaryRow], metric: str, models: Sequence[str]) -> None:
    """One metric of one method and keep ratio against gradient steps, with intervals.

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
    _errorbar(axes, x, [row[metric] for row in rows], model, models, positive=metric in _LOG_METRICS)


def _errorbar(
    axes: Any,
    x: Sequence[float],
    estimates: Sequence[Estimate],
    model: str,
    models: Sequence[str],
    *,
    positive: bool = False,
) -> None:
    """A model's line with intervals; with ``positive``, for a log axis, figures of zero are left out."""
    value, low, high = (
        np.array([getattr(estimate, end) for estimate in estimates]) for end in ("value", "low", "high")
    )
    low, high = np.where(np.isnan(low), value, low), np.where(np.isnan(high), value, high)
    shown = np.isfinite(value) & ((value > 0.0) | (not positive))
    if positive:
        low = np.maximum(low, value * 1e-3)
    errors = np.stack([np.maximum(value - low, 0.0), np.maximum(high - value, 0.0)])
    axes.errorbar(
        np.asarray(x)[shown], value[shown], yerr=errors[:, shown], color=colours(models)[model],
        marker=markers(models)[model], capsize=2.5, elinewidth=1.0, label=model,
    )  # fmt: skip


def _keep_axis(axes: Any, keeps: Sequence[float]) -> None:
    axes.set_xscale("log")
    axes.set_xticks(keeps, [keep_label(keep) for keep in keeps])
    axes.minorticks_off()
    axes.set_xlim(keeps[0] / 1.25, keeps[-1] * 1.25)
    axes.set_xlabel("slots kept")


def _finish(axes: Any, metric: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    positive = any((container.lines[0].get_ydata() > 0.0).any() for container in axes.containers)
    log = metric in _LOG_METRICS and positive
    axes.set_ylabel(f"{METRICS[metric].label} (nats per token{', log axis' if log else ''})")
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
