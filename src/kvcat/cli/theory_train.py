"""``kvcat theory train``: which solution of the histogram does training find?"""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcat.cli.theory import results_folder, write_results

_EXACT = 1e-11  # errors up to here are rounding, whose ratio says nothing


def train_histogram_command(
    seeds: Annotated[int, typer.Option(min=1, help="Seeds 0, 1, ...: each trains every network once.")] = 5,
    quick: Annotated[
        bool, typer.Option("--quick", help="Seconds instead of minutes: shows that everything runs, and nothing else.")
    ] = False,
    search_steps: Annotated[
        int | None, typer.Option(min=1, help="Gradient steps of a search for a cache.", show_default="200")
    ] = None,
    restarts: Annotated[int | None, typer.Option(min=1, help="Searches for each prefix.", show_default="2")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for networks, tables and the plot.", show_default="out/theory/train or train-quick"),
    ] = None,
) -> None:
    """Train small transformers on the histogram, the usual way and with the masked objective, and compress them.

    From the same weights, on the same data, with uniform attention as in the paper's constructions and with trained
    attention. The masked pass hides slots of a prefix from what comes behind it. Then the best cache is searched for
    every number of slots, the worst suffix counting, beside the two constructions. Stopped and started again it
    continues; more --seeds add to what is there.

    Example: kvcat theory train --seeds 5
    """
    from dataclasses import asdict, replace

    from kvcat.recipes.histogram_constructions import construction_rows
    from kvcat.recipes.histogram_runs import HistogramExperiment, quick_experiment, run_histogram_experiment
    from kvcat.recipes.histogram_summary import summarise_histogram
    from kvcat.report.theory_plots import save_trained_plot

    out = results_folder(out or Path("out/theory/train-quick" if quick else "out/theory/train"))
    experiment = replace(quick_experiment() if quick else HistogramExperiment(), seeds=tuple(range(seeds)))
    asked = {"num_steps": search_steps, "num_restarts": restarts}
    search = replace(experiment.search, **{name: value for name, value in asked.items() if value is not None})
    experiment = replace(experiment, search=search)
    rows = run_histogram_experiment(experiment, out)
    constructions = construction_rows(experiment)
    summary = summarise_histogram(experiment, rows)
    print(_told(summary, constructions))
    tables = {"networks.csv": rows, "summary.csv": summary, "constructions.csv": constructions}
    written = write_results(out, tables, {"experiment": asdict(experiment)})
    for path in [*written, *save_trained_plot(summary, constructions, out)]:
        print(path)


def _told(summary: list[dict[str, Any]], constructions: list[dict[str, Any]]) -> str:
    width = max(len(row["model"]) for row in [*summary, *constructions])
    lines = [
        "Error of the best cache found, worst suffix; 95% intervals over seeds",
        "",
        f"{'network':{width}s}  slots  mean over prefixes       worst prefix  against the usual training",
    ]
    for row in [*summary, *constructions]:
        low, high = row.get("mean_error_low", float("nan")), row.get("mean_error_high", float("nan"))
        ends = f" [{max(low, 0.0):.4f}, {high:.4f}]" if high == high else ""
        mean = f"{row['mean_error']:.4f}{ends}"
        line = f"{row['model']:{width}s}  {row['num_slots']:5d}  {mean:24s} {row['max_error']:12.4f}"
        if row.get("ratio", 0.0) > 0.0 and row["mean_error"] > _EXACT:
            low, high = row["ratio_low"], row["ratio_high"]
            line += f"  {row['ratio']:.3f}" + (f" [{low:.3f}, {high:.3f}]" if high == high else "")
        lines.append(line)
    return "\n".join(lines)
