"""The plot of a compressibility profile: error of the best cache found against its slots."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from kvcat.evals.profile import KINDS
from kvcat.evals.profile_summary import BEST
from kvcat.report.plots import Plot, line_style, log_axis

_LABELS = {
    "kl": "KL(dense || compact) (nats, log axis)",
    "tv": "total variation (log axis)",
    "log_prob": "largest difference of log-probabilities (nats, log axis)",
    "output": "norm of the output's difference (log axis)",
}
_DASHES = {"model": "-", "true": "--", "other": "-.", "random": ":"}


def draw_profile(axes: Any, table: pd.DataFrame, statistic: str, models: Sequence[str]) -> None:
    """One line per model (colour) and kind of suffix (dashes, marker), log-log; no cache stands left of one slot.

    Errors of zero, such as those with all slots, have no place on the axis: a text marks where they begin.

    Args:
        axes: matplotlib axes.
        table: ``profile_table``, of one measure.
        statistic: "mean" or "worst".
        models: all labels, in order; they fix colours.
    """
    best = table[table["method"] == BEST]
    kinds = [kind for kind in KINDS if kind in set(best["kind"])]
    for model, kind in ((model, kind) for model in models for kind in kinds):
        curve = best[(best["model"] == model) & (best["kind"] == kind) & (best[statistic] > 0.0)]
        curve = curve.sort_values("num_slots")
        axes.plot(
            curve["num_slots"].to_numpy(), curve[statistic].to_numpy(), markersize=4.0,
            color=line_style(model, models)["color"], marker=line_style(kind, kinds)["marker"],
            linestyle=_DASHES[kind], label=f"{model}, {kind}" if len(models) > 1 else kind,
        )  # fmt: skip
    slots = sorted(set(table["num_slots"]))
    axes.set_xscale("symlog", base=2, linthresh=1.0, linscale=0.7)
    axes.set_xticks(slots, [str(count) for count in slots], fontsize=10 if len(slots) < 10 else 8)
    axes.minorticks_off()
    axes.set_xlim(-0.15, slots[-1] * 1.15)
    exact = best["num_slots"][best[statistic] == 0.0]
    if len(exact):
        place = axes.get_xaxis_transform()
        axes.text(min(exact), 0.03, "error 0", rotation=90, ha="center", va="bottom", transform=place)
    axes.set_xlabel("slots per layer and head, log axis (0: no cache)")
    axes.set_ylabel(_LABELS[table["measure"].iloc[0]])
    if any(len(line.get_ydata()) for line in axes.lines):
        log_axis(axes)


def save_profile_plot(table: pd.DataFrame, folder: Path, *, measure: str = "kl") -> list[Path]:
    """Mean and worst side by side on one scale as ``profile.png``; returns its path.

    Args:
        table: of ``profile_table``.
        folder: where to write.
        measure: a name in ``MEASURES``.
    """
    own = table[table["measure"] == measure]
    models = list(dict.fromkeys(own["model"]))
    panels = [
        ("Best cache found, mean over held-out suffixes", lambda axes: draw_profile(axes, own, "mean", models)),
        ("Best cache found, worst of the held-out suffixes", lambda axes: draw_profile(axes, own, "worst", models)),
    ]
    Plot("profile", "Compressibility profile", panels, same_scale=True).save(folder / "profile.png")
    return [folder / "profile.png"]
