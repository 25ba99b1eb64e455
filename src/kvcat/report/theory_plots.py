"""Figures of the theory: optima and bounds of the histogram, the main theorem's errors, trained networks."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcat.report.style import COLOURS, MARKERS, plotting
from kvcat.theory.histogram_curves import BudgetRow, ScalingRow

_EXACT = 1e-11  # errors up to here are rounding


def _save(figure: Any, folder: Path, name: str) -> list[Path]:
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    figure.savefig(paths[0], dpi=150, metadata={"Software": None})
    figure.savefig(paths[1], metadata={"Date": None, "Creator": None})
    return paths


def save_histogram_plot(
    budgets: Sequence[BudgetRow], scaling: Mapping[str, Sequence[ScalingRow]], one_slot: float, folder: Path
) -> list[Path]:
    """``histogram.png`` and ``.svg``: error against r, optimum over bound against r, both against N; returns paths.

    Args:
        budgets: of ``budget_curve``.
        scaling: name of the budget to rows of ``scaling_curve``.
        one_slot: the compressible network's error behind its one slot.
        folder: where to write.
    """
    slots = [row.num_slots for row in budgets]
    with plotting() as plt:
        figure, (error, gap, growth) = plt.subplots(1, 3, figsize=(12.6, 4.0))
        curves: list[tuple[str, Callable[[BudgetRow], float]]] = [
            ("exact optimum, suffixes of all lengths", lambda row: row.optimum),
            ("exact optimum, one suffix length", lambda row: row.single_length),
            ("the paper's bound", lambda row: row.paper_bound),
        ]
        for rank, (label, value) in enumerate(curves):
            error.plot(slots, [value(row) for row in budgets], color=COLOURS[rank], marker=MARKERS[rank], label=label)
        error.set_ylim(bottom=0.0)
        error.text(0.97, 0.68, f"Proposition 2, one slot: {one_slot:.0e}", transform=error.transAxes, ha="right")
        error.set_ylabel("worst error over prefixes and suffixes")
        error.set_title(f"m = {budgets[0].num_symbols}, N = {budgets[0].longest}: no policy below the optimum")
        for rank, (label, value) in enumerate(curves[:2]):
            ratios = [value(row) / row.paper_bound if row.paper_bound else float("nan") for row in budgets]
            gap.plot(slots, ratios, color=COLOURS[rank], marker=MARKERS[rank], label=label)
        gap.set_ylabel("ratio")
        gap.set_title("Optimum over the paper's bound")
        gap.set_ylim(bottom=1.0)
        for axes in (error, gap):
            axes.set_xlabel("slots r, r(n) = min(r, n)")
        for rank, (name, rows) in enumerate(scaling.items()):
            lengths, colour = [row.longest for row in rows], COLOURS[rank]
            growth.plot(
                lengths, [row.definition_optimum for row in rows], color=colour, marker=MARKERS[rank],
                label=f"optimum, {name}",
            )  # fmt: skip
            growth.plot(
                lengths, [row.last_bound for row in rows], color=colour, linestyle="--", marker=MARKERS[rank],
                markerfacecolor="white", label=f"the paper's constant, {name}",
            )  # fmt: skip
        growth.set_xscale("log")
        growth.set_yscale("log")
        ticks = [row.longest for row in next(iter(scaling.values()))]
        growth.set_xticks(ticks, [str(tick) for tick in ticks])
        growth.minorticks_off()
        growth.set_xlabel("N (log axis)")
        growth.set_ylabel("worst error (log axis)")
        growth.set_title("Against N")
        growth.set_ylim(bottom=growth.get_ylim()[0] / 20)
        for axes in (error, growth):
            axes.legend(fontsize=8)
        figure.tight_layout()
        return _save(figure, folder, "histogram")


def save_theorem_plot(errors: Mapping[str, Mapping[str, float]], constant: float, folder: Path) -> list[Path]:
    """``theorem.png`` and ``.svg``: for every function, errors of both kinds of network; returns both paths.

    Args:
        errors: name of the function to errors by name, the same names for all; an error of 0 stands at 1e-17.
        constant: C.
        folder: where to write.
    """
    names = list(next(iter(errors.values())))
    with plotting() as plt:
        figure, axes = plt.subplots(figsize=(8.4, 4.2))
        for rank, name in enumerate(names):
            heights = [max(values[name], 1e-17) for values in errors.values()]
            places = [at + 0.12 * (rank - (len(names) - 1) / 2) for at in range(len(heights))]
            axes.plot(places, heights, linestyle="none", color=COLOURS[rank], marker=MARKERS[rank], label=name)
        axes.axhline(constant, color="#808080", linestyle="--", linewidth=1.0)
        axes.text(len(errors) - 0.52, 0.7 * constant, f"C = {constant:g}", va="top", ha="right")
        axes.set_yscale("log")
        axes.set_xticks(range(len(errors)), list(errors))
        axes.set_xlim(-0.5, len(errors) - 0.5)
        axes.set_ylabel("error (log axis, 0 at 1e-17)")
        axes.set_title("The same function: one network needs one slot, no policy serves the other")
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2)
        figure.tight_layout()
        return _save(figure, folder, "theorem")


def save_trained_plot(
    rows: Sequence[Mapping[str, Any]], constructions: Sequence[Mapping[str, Any]], folder: Path
) -> list[Path]:
    """``trained.png`` and ``.svg``: error of the best cache found against r, mean and worst prefix; returns both paths.

    Args:
        rows: of ``kvcat.recipes.histogram_summary.summarise_histogram``.
        constructions: of ``kvcat.recipes.histogram_constructions.construction_rows``.
        folder: where to write.
    """
    panels_shown = {"mean_error": "mean over prefixes", "max_error": "worst prefix"}
    with plotting() as plt:
        figure, panels = plt.subplots(1, 2, figsize=(11.0, 5.0), sharey=True)
        for axes, (column, title) in zip(panels, panels_shown.items(), strict=True):
            for rank, (model, found) in enumerate(_by_model(rows).items()):
                own = [row for row in found if row[column] > _EXACT]
                slots = [row["num_slots"] for row in own]
                axes.plot(slots, [row[column] for row in own], color=COLOURS[rank], marker=MARKERS[rank], label=model)
                low, high = ([row[f"{column}_{end}"] for row in own] for end in ("low", "high"))
                floor = [row[column] / 10 for row in own]
                axes.fill_between(slots, list(map(max, low, floor)), high, color=COLOURS[rank], alpha=0.15)
            for rank, (name, own) in enumerate(_by_model(constructions).items()):
                shown = [(row["num_slots"], row[column]) for row in own if row[column] > _EXACT]
                style = {"color": "#606060", "linestyle": ("-", "--", ":", "-.")[rank % 4], "linewidth": 1.2}
                label = name if shown else f"{name}: exact"
                axes.plot(*(zip(*shown, strict=True) if shown else ([], [])), label=label, **style)
            axes.set_yscale("log")
            axes.set_xticks(sorted({row["num_slots"] for row in rows if row[column] > _EXACT}))
            axes.set_xlabel("slots r (all n: exact)")
            axes.set_title(f"Best cache found, worst suffix, {title}")
        panels[0].set_ylabel("error (log axis), 95% intervals over seeds")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.tight_layout(rect=(0.0, 0.0, 1.0, 1.0 - 0.045 * -(-len(labels) // 2)))
        figure.legend(handles, labels, loc="upper center", ncols=2, fontsize=9)
        return _save(figure, folder, "trained")


def _by_model(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    names = dict.fromkeys(str(row["model"]) for row in rows)
    return {
        name: sorted((row for row in rows if row["model"] == name), key=lambda row: row["num_slots"]) for name in names
    }
