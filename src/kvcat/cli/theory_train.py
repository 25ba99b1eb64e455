"""``kvcat theory train``: which solution of the histogram does training find?"""

from pathlib import Path
from typing import Annotated, Any

import typer

_EXACT = 1e-11  # errors up to here are rounding, whose ratio says nothing


def train_histogram_command(
    seeds: Annotated[int, typer.Option(min=1, help="Seeds 0, 1, ...: each trains every network once.")] = 5,
    quick: Annotated[
        bool, typer.Option("--quick", help="Seconds instead of minutes: shows that everything runs, and nothing else.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for networks, tables and the plot.")] = Path("out/theory/train"),
) -> None:
    """Train small transformers on the histogram, the usual way and with the masked objective, and compress them.

    From the same weights, on the same data, with uniform attention as in the paper's constructions and with trained
    attention. Then the best cache is searched for every number of slots, the worst suffix counting, beside the two
    constructions. Stopped and started again it continues; more --seeds add to what is there.

    Example: kvcat theory train --seeds 5
    """
    from dataclasses import replace

    from kvcat.recipes.histogram_constructions import construction_rows
    from kvcat.recipes.histogram_runs import HistogramExperiment, quick_experiment, run_histogram_experiment
    from kvcat.recipes.histogram_summary import summarise_histogram
    from kvcat.report.rowfiles import rows_csv
    from kvcat.report.theory_plots import save_trained_plot

    experiment = replace(quick_experiment() if quick else HistogramExperiment(), seeds=tuple(range(seeds)))
    rows = run_histogram_experiment(experiment, out)
    constructions = construction_rows(experiment)
    summary = summarise_histogram(experiment, rows)
    print(_told(summary, constructions))
    tables = {"networks.csv": rows, "summary.csv": summary, "constructions.csv": constructions}
    for name, table in tables.items():
        (out / name).write_text(rows_csv(table), encoding="utf-8")
    for path in [*(out / name for name in tables), *save_trained_plot(summary, constructions, out)]:
        print(path)


def _told(summary: list[dict[str, Any]], constructions: list[dict[str, Any]]) -> str:
    width = max(len(row["model"]) for row in [*summary, *constructions])
    lines = [
        "Error of the best cache found, worst suffix; 95% intervals over seeds",
        "",
        f"{'network':{width}s}  slots  mean over prefixes       worst prefix  against the usual training",
    ]
    for row in [*summary, *constructions]:
        ends = f" [{row['mean_error_low']:.4f}, {row['mean_error_high']:.4f}]" if "mean_error_low" in row else ""
        mean = f"{row['mean_error']:.4f}{ends}"
        line = f"{row['model']:{width}s}  {row['num_slots']:5d}  {mean:24s} {row['max_error']:12.4f}"
        if row.get("ratio", 0.0) > 0.0 and row["mean_error"] > _EXACT:
            line += f"  {row['ratio']:.3f} [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]"
        lines.append(line)
    return "\n".join(lines)
