"""Results folders and training runs to one report: the page, with every table and plot as a file beside it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined

from kvcat.errors import InputError
from kvcat.evals import METRICS
from kvcat.files import atomic_write, make_folder
from kvcat.report import tables as t
from kvcat.report.plots import Plot, result_plots, run_metrics, training_plot
from kvcat.report.results import NO_STEP, Results, read_results

_LABELS = {"nll": "NLL on the compact cache", "nll_dense": "Dense loss"}


def write_report(
    folders: Sequence[Path],
    out_dir: Path,
    *,
    title: str = "KV cache compression",
    runs: Mapping[str, Path] | None = None,
    context: Mapping[str, Any] | None = None,
    paper_model: str | None = None,
) -> Path:
    """Path of ``report.html``; beside it tables (``.md``, ``.tex``), plots, and every figure in full precision (CSV).

    Args:
        folders: results folders of any evaluations, each a section; may be empty where runs are given.
        out_dir: where the report goes; files of an earlier report are replaced.
        title: of the page.
        runs: model label to training run, for the training diagnostics.
        context: more facts about what was run.
        paper_model: which of the paper's models ours are; its figures then stand beside them.

    Raises:
        InputError: nothing to report, damaged results, a run without metrics, a model that the paper lacks.
    """
    if not folders and not runs:
        raise InputError("nothing to report: no results folder and no run given")
    paths = list(dict.fromkeys(folder.resolve() for folder in folders))
    names = [path.name for path in paths]
    names = [t.slug(str(path)) if names.count(path.name) > 1 else path.name for path in paths]
    results = [read_results(path, name, paper_model) for path, name in zip(paths, names, strict=True)]
    metrics = {label: run_metrics(folder) for label, folder in (runs or {}).items()}
    make_folder(out_dir)
    for pattern in ("summary.csv", "comparisons.csv", "costs.csv", "tables/*.md", "tables/*.tex", "plots/*.png"):
        for earlier in out_dir.glob(pattern) if (out_dir / "report.html").exists() else ():
            earlier.unlink()
    sections = [_section(result, out_dir, several=len(results) > 1) for result in results]
    for name in ("summary", "comparisons", "costs"):
        frames = [(result.name, frame) for result in results if len(frame := getattr(result, name))]
        if frames:
            rows = pd.concat([frame.assign(folder=folder) for folder, frame in frames])
            rows["step"] = rows["step"].where(rows["step"] != NO_STEP).astype("Int64")
            rows.set_index("folder").to_csv(out_dir / f"{name}.csv")
    training = None
    if metrics:
        models = list(dict.fromkeys(model for result in results for model in result.models))
        training = training_plot(metrics, models)
        training.save(out_dir / "plots" / "training.png")
    with atomic_write(target := out_dir / "report.html") as partial:
        facts = {str(name): str(value) for name, value in (context or {}).items()}
        partial.write_text(_render(title, sections, training, facts), encoding="utf-8")
    return target


@dataclass(frozen=True)
class Section:
    """An evaluation as the template shows it; of plots and tables the first is shown, the others are folded."""

    title: str
    results: Results
    plots: list[Plot] = field(repr=False)
    tables: list[t.Table] = field(repr=False)

    @property
    def subtitle(self) -> str:
        """The data."""
        config = self.results.config
        text = f"{config['num_examples']} {self.results.evaluation.example}s of {config['dataset']}"
        if {"prefix_len", "suffix_len"} <= config.keys():
            text += f", {config['prefix_len']} prefix and {config['suffix_len']} suffix tokens"
        return text + (f", {config['length']} tokens each" if "length" in config else "") + "."

    @property
    def cell(self) -> str:
        """The cell that the tiles show, and who chose it."""
        method, keep, step = self.results.cell
        steps = f" after {step} gradient steps" * (step != NO_STEP)
        where = method + steps + f" at {t.keep_label(keep)} of the slots" * bool(self.results.methods)
        if not self.results.pairs:
            return where
        if self.results.comparisons["primary"].any():
            named = self.results.config["primary"].get("named")
            return f"{where}: the primary cell, {'named before the run' if named else 'first method at its first keep'}"
        return f"{where}. No primary cell was named before the run, so every cell is exploratory"

    @property
    def tiles(self) -> list[dict[str, Any]]:
        """Figures at the top, with what each compares: of the first pair, or a single model's own."""
        own = _at(self.results.summary[self.results.summary["stratum"] == ""], self.results.cell)
        values = {model: rows.set_index("metric") for model, rows in own.groupby("model")}
        pair = self.results.pairs[0] if self.results.pairs else None
        compared, tiles = values.get(self.results.models[0], pd.DataFrame()), []
        if pair:
            compared = _at(t.pair_rows(self.results, *pair), self.results.cell).set_index("metric")
        for name in (name for name in self.results.evaluation.metrics[:3] if name in compared.index):
            metric, row = METRICS[name], compared.loc[name]
            label, detail, unit = _LABELS.get(name, metric.label), "%" if metric.percent else metric.unit, ""
            if pair is None:
                figure = t.summary_figure(row)
            else:
                detail = f"{' and '.join(f'{m} {t.summary_figure(values[m].loc[name]).text}' for m in pair)} {detail}"
                ratio = metric.ratio and name == self.results.evaluation.deciding
                figure = t.ratio_figure(row) if ratio else t.difference_figure(row)
                label, unit = f"{label}, {'ratio to' if ratio else 'minus'} {pair[1]}", " points" * metric.percent
            tiles.append({"label": label, "figure": figure, "unit": unit, "detail": detail})
        return tiles

    @property
    def facts(self) -> dict[str, str]:
        """What was run: the configuration, and every line of provenance."""
        runs = [f"{event.get('event', 'run')} {rank}" for rank, event in enumerate(self.results.events)]
        facts = {**self.results.config, **dict(zip(runs, self.results.events, strict=True))}
        return {name: fact if isinstance(fact, str) else json.dumps(fact) for name, fact in facts.items()}


def _section(results: Results, out_dir: Path, *, several: bool) -> Section:
    """An evaluation's part of the page; its tables and plots become files as well."""
    prefix = f"{results.name}-" if several else ""
    tables = t.result_tables(results)
    for table in tables:
        t.write_table(table, out_dir / "tables", prefix)
    for plot in (plots := result_plots(results)):
        plot.save(out_dir / "plots" / f"{prefix}{plot.name}.png")
    return Section(results.evaluation.title + (f" ({results.name})" if several else ""), results, plots, tables)


def _render(title: str, sections: Sequence[Section], training: Plot | None, context: Mapping) -> str:
    """The whole page; no request leaves it."""
    loader = PackageLoader("kvcat.report", ".")
    page = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    used = {name for section in sections for name in section.results.metrics}
    metrics = {metric.label: metric for name, metric in METRICS.items() if name in used}
    shown = {"title": title, "sections": sections, "training": training, "context": context, "metrics": metrics}
    return page.get_template("page.html").render(shown)


def _at(rows: pd.DataFrame, cell: tuple[str, float, int]) -> pd.DataFrame:
    method, keep, step = cell
    return rows[(rows["method"] == method) & (rows["keep_ratio"] == keep) & (rows["step"] == step)]
