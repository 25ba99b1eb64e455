"""The plot of a compressibility profile: error of the best cache found against its slots."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from kvcat.evals.profile_suffixes import KINDS
from kvcat.evals.profile_summary import BEST, STATISTICS, ProfileRow, Statistic
from kvcat.report.plots import STYLE, line_style, log_axis

_LABELS = {
    "kl": "KL(dense || compact) (nats, log axis)",
    "tv": "total variation (log axis)",
    "log_prob": "largest difference of log-probabilities (nats, log axis)",
    "output": "norm of the output's difference (log axis)",
}
_STYLES = {"model": "-", "true": "--", "other": "-.", "random": ":"}


def draw_profile(axes: Any, rows: Sequence[ProfileRow], statistic: Statistic, models: Sequence[str]) -> None:
    """One line per model (colour) and kind of suffix (dashes, marker), log-log; no cache stands left of one slot.

    Errors of zero, such as those with all slots, have no place on the axis: a line of text tells of them.

    Args:
        axes: matplotlib axes.
        rows: of one measure.
        statistic: "mean" or "worst".
        models: all labels, in order; they fix colours.
    """
    kinds = [kind for kind in KINDS if any(row.kind == kind for row in rows)]
    for model in models:
        for kind in kinds:
            curve = [row for row in rows if (row.model, row.kind, row.method) == (model, kind, BEST)]
            shown = sorted((row for row in curve if row.error(statistic) > 0.0), key=lambda row: row.num_slots)
            places = [row.num_slots for row in shown]
            label = f"{model}, {kind}" if len(models) > 1 else kind
            axes.plot(
                places, [row.error(statistic) for row in shown], color=line_style(model, models)["color"],
                linestyle=_STYLES[kind], marker=line_style(kind, kinds)["marker"], markersize=4.0, label=label,
            )  # fmt: skip
    slots = sorted({row.num_slots for row in rows})
    axes.set_xscale("symlog", base=2, linthresh=1.0, linscale=0.7)
    axes.set_xticks(slots, [str(count) for count in slots], fontsize=10 if len(slots) < 10 else 8)
    axes.minorticks_off()
    axes.set_xlim(-0.15, slots[-1] * 1.15)
    exact = [row.num_slots for row in rows if row.method == BEST and row.error(statistic) == 0.0]
    if exact:
        place = axes.get_xaxis_transform()
        axes.text(min(exact), 0.03, "error 0", rotation=90, ha="center", va="bottom", transform=place)
    axes.set_xlabel("slots per layer and head, log axis (0: no cache)")
    axes.set_ylabel(_LABELS[rows[0].measure])
    if any((line.get_ydata() > 0).any() for line in axes.lines if len(line.get_ydata())):
        log_axis(axes)


def save_profile_plot(rows: Sequence[ProfileRow], folder: Path, *, measure: str = "kl") -> list[Path]:
    """Mean and worst side by side as ``profile.png`` and ``profile.svg``; returns both paths.

    Args:
        rows: of ``profile_rows``.
        folder: where to write.
        measure: a name in ``MEASURES``.
    """
    own = [row for row in rows if row.measure == measure]
    models = list(dict.fromkeys(row.model for row in own))
    titles: dict[Statistic, str] = {
        "mean": "mean over held-out suffixes",
        "worst": "worst of the held-out suffixes",
    }
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10.4, 4.4))
        panels = figure.subplots(1, 2, sharey=True)
        for axes, statistic in zip(panels, STATISTICS, strict=True):
            draw_profile(axes, own, statistic, models)
            axes.set_title(f"Best cache found, {titles[statistic]}")
        panels[1].set_ylabel("")
        panels[1].tick_params(labelleft=True)
        handles, labels = panels[0].get_legend_handles_labels()
        rows_of_legend = -(-len(labels) // 4)
        figure.tight_layout(rect=(0.0, 0.0, 1.0, 1.0 - 0.055 * rows_of_legend))
        figure.legend(handles, labels, loc="upper center", ncols=4, borderaxespad=0.3)
        paths = [folder / "profile.png", folder / "profile.svg"]
        figure.savefig(paths[0], dpi=150, metadata={"Software": None})
        figure.savefig(paths[1], metadata={"Date": None, "Creator": None})
    return paths
