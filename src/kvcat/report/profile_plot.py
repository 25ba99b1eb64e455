"""The plot of a compressibility profile: error of the best cache found against its slots."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcat.evals.profile_suffixes import KINDS
from kvcat.evals.profile_summary import BEST, ProfileRow, Statistic
from kvcat.report.plots import Plot, line_style, log_axis

_LABELS = {
    "kl": "KL(dense || compact) (nats, log axis)",
    "tv": "total variation (log axis)",
    "log_prob": "largest difference of log-probabilities (nats, log axis)",
    "output": "norm of the output's difference (log axis)",
}
_DASHES = {"model": "-", "true": "--", "other": "-.", "random": ":"}


def draw_profile(axes: Any, rows: Sequence[ProfileRow], statistic: Statistic, models: Sequence[str]) -> None:
    """One line per model (colour) and kind of suffix (dashes, marker), log-log; no cache stands left of one slot.

    Errors of zero, such as those with all slots, have no place on the axis: a text marks where they begin.

    Args:
        axes: matplotlib axes.
        rows: of one measure.
        statistic: "mean" or "worst".
        models: all labels, in order; they fix colours.
    """
    best = [row for row in rows if row.method == BEST]
    kinds = [kind for kind in KINDS if any(row.kind == kind for row in best)]
    for model, kind in ((model, kind) for model in models for kind in kinds):
        curve = [row for row in best if (row.model, row.kind) == (model, kind) and row.error(statistic) > 0.0]
        curve.sort(key=lambda row: row.num_slots)
        axes.plot(
            [row.num_slots for row in curve], [row.error(statistic) for row in curve], markersize=4.0,
            color=line_style(model, models)["color"], marker=line_style(kind, kinds)["marker"],
            linestyle=_DASHES[kind], label=f"{model}, {kind}" if len(models) > 1 else kind,
        )  # fmt: skip
    slots = sorted({row.num_slots for row in rows})
    axes.set_xscale("symlog", base=2, linthresh=1.0, linscale=0.7)
    axes.set_xticks(slots, [str(count) for count in slots], fontsize=10 if len(slots) < 10 else 8)
    axes.minorticks_off()
    axes.set_xlim(-0.15, slots[-1] * 1.15)
    if exact := [row.num_slots for row in best if row.error(statistic) == 0.0]:
        place = axes.get_xaxis_transform()
        axes.text(min(exact), 0.03, "error 0", rotation=90, ha="center", va="bottom", transform=place)
    axes.set_xlabel("slots per layer and head, log axis (0: no cache)")
    axes.set_ylabel(_LABELS[rows[0].measure])
    if any(len(line.get_ydata()) for line in axes.lines):
        log_axis(axes)


def save_profile_plot(rows: Sequence[ProfileRow], folder: Path, *, measure: str = "kl") -> list[Path]:
    """Mean and worst side by side on one scale as ``profile.png``; returns its path.

    Args:
        rows: of ``profile_rows``.
        folder: where to write.
        measure: a name in ``MEASURES``.
    """
    own = [row for row in rows if row.measure == measure]
    models = list(dict.fromkeys(row.model for row in own))
    panels = [
        ("Best cache found, mean over held-out suffixes", lambda axes: draw_profile(axes, own, "mean", models)),
        ("Best cache found, worst of the held-out suffixes", lambda axes: draw_profile(axes, own, "worst", models)),
    ]
    Plot("profile", "Compressibility profile", panels, same_scale=True).save(folder / "profile.png")
    return [folder / "profile.png"]
