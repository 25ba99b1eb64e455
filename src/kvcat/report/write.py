"""Results folders and training runs to one report."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from kvcat.errors import InputError
from kvcat.files import atomic_write
from kvcat.report.formats import write_table
from kvcat.report.page import Section, render
from kvcat.report.paper import Paper
from kvcat.report.plots import difference_plot, quality_plots, step_plots
from kvcat.report.results import NO_STEP, Results, read_results
from kvcat.report.tables import result_tables
from kvcat.report.training import run_metrics, training_plot, training_table


def write_report(
    folders: Sequence[Path],
    out_dir: Path,
    *,
    title: str,
    runs: Mapping[str, Path] | None = None,
    context: Mapping[str, Any] | None = None,
    paper_model: str | None = None,
) -> Path:
    """Path of ``report.html``; beside it ``tables/*`` (``.md``, ``.csv``, ``.tex``), ``plots/*.png``, and every figure
    in full precision, ``summary.csv`` and ``comparisons.csv``.

    Args:
        folders: results folders of any evaluations, each a section of its own; may be empty where runs are given.
        out_dir: where the report goes; made if absent, files of an earlier report are replaced.
        title: of the page.
        runs: model label to training run with ``metrics.jsonl``, for the training diagnostics.
        context: more facts about what was run.
        paper_model: which of the paper's models ours are, so that its figures stand beside them; see ``Paper``.

    Raises:
        InputError: nothing to report, a folder without results, damaged results, a run without metrics, a model that
            the paper lacks.
    """
    if not folders and not runs:
        raise InputError("nothing to report: no results folder and no run given")
    if out_dir.exists() and not out_dir.is_dir():
        raise InputError(f"{out_dir} is a file, not a folder")
    Paper(paper_model)
    results = _read_all(folders)
    metrics = {label: run_metrics(folder) for label, folder in (runs or {}).items()}
    out_dir.mkdir(parents=True, exist_ok=True)
    sections = [_section(result, out_dir, paper_model, several=len(results) > 1) for result in results]
    for name, tables in {
        "summary": [result.summary for result in results],
        "comparisons": [result.comparisons for result in results],
    }.items():
        frames = [table.assign(folder=result.name) for table, result in zip(tables, results, strict=True)]
        if any(len(frame) for frame in frames):
            _write_frame(pd.concat([frame for frame in frames if len(frame)]), out_dir / f"{name}.csv")
    training = None
    if metrics:
        models = list(dict.fromkeys(model for result in results for model in result.models))
        training = training_plot(metrics, models), training_table(metrics)
        training[0].save(out_dir / "plots" / "training.png")
    target = out_dir / "report.html"
    facts = {str(name): str(value) for name, value in (context or {}).items()}
    with atomic_write(target) as partial:
        partial.write_text(render(title, sections, training, facts), encoding="utf-8")
    return target


def _read_all(folders: Sequence[Path]) -> list[Results]:
    """Results with names that tell them apart: the folder's, with its parent's where several are called alike."""
    paths = [folder.resolve() for folder in folders]
    names = [path.name for path in paths]
    names = [path.name if names.count(path.name) == 1 else "-".join(path.parts[-2:]) for path in paths]
    if len(set(names)) < len(names):
        raise InputError(f"two results folders cannot be told apart by their names: {', '.join(map(str, folders))}")
    return [replace(read_results(folder), name=name) for folder, name in zip(folders, names, strict=True)]


def _section(results: Results, out_dir: Path, paper_model: str | None, *, several: bool) -> Section:
    """An evaluation's part of the page; its tables and plots become files as well."""
    prefix = f"{results.name}-" if several else ""
    paper = Paper(paper_model, results.config["evaluation"], results.config["dataset"])
    tables = result_tables(results, paper)
    for table in tables:
        write_table(table, out_dir / "tables", prefix)
    differences = [plot for pair in results.pairs if (plot := difference_plot(results, *pair)) is not None]
    plots = [*differences[:1], *quality_plots(results), *differences[1:], *step_plots(results)]
    for plot in plots:
        plot.save(out_dir / "plots" / f"{prefix}{plot.name}.png")
    heading = results.evaluation.title + (f" ({results.name})" if several else "")
    return Section(heading, results, plots, tables)


def _write_frame(frame: pd.DataFrame, target: Path) -> None:
    """Every figure in full precision; no gradient steps are an empty cell."""
    steps = frame["step"].where(frame["step"] != NO_STEP).astype("Int64")
    columns = ["folder", *(name for name in frame.columns if name != "folder")]
    frame.assign(step=steps)[columns].to_csv(target, index=False)
