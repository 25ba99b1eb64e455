"""The report on results folders and training runs: a page, with tables and plots as files."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import Formatter
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined

from kvcat.errors import InputError
from kvcat.evals import METRICS
from kvcat.files import atomic_write, check_no_links, make_folder
from kvcat.report.figures import NO_STEP, Figure, Table, file_names, keep_label, write_table
from kvcat.report.plots import DrawnPlot, Plot, result_plots
from kvcat.report.results import Results, read_results
from kvcat.report.tables import result_tables
from kvcat.report.training_plots import run_metrics, training_plot

_FILES = (
    "summary.csv",
    "comparisons.csv",
    "costs.csv",
    "tables/*.md",
    "tables/*.tex",
    "tables/*.csv",
    "plots/*.png",
)
_NUM_TILES = 3
_FOLD_AFTER = 12  # rows of a table that are shown at first, as in page.css
_BREAKS = re.compile(r"(?<=[:=,/_+@])(?=.)|(?<=[a-z])(?=[A-Z][a-z])")
_RELATIONS = {"better": "better than", "worse": "worse than", "level": "level with"}


def write_report(
    folders: Sequence[Path | Results],
    out_dir: Path,
    *,
    title: str = "KV cache compression",
    runs: Mapping[str, Path] | None = None,
    answers: Mapping[str, str] | None = None,
    context: Mapping[str, Any] | None = None,
    paper_model: str | None = None,
    num_resamples: int = 10_000,
) -> Path:
    """The path of ``report.html``; tables (``.md``, ``.tex``, ``.csv``) and plots are next to it.

    The CSV files contain every figure in full precision.

    Args:
        folders: results folders of any evaluations, or results of ``read_results``; each is one
            section. They may be empty if there are runs.
        out_dir: folder of the report; files of an earlier report are replaced.
        runs: training run by model label, for the training diagnostics.
        answers: answers by question, shown at the top of the page.
        context: further facts to show about the runs.
        paper_model: the paper's model that ours correspond to; its figures are then in the tables.

    Raises:
        InputError: there is nothing to report, results are damaged, a run has no metrics, or the
            paper has no such model.
    """
    if not folders and not runs:
        raise InputError("nothing to report: no results folder and no run given")
    results = []
    for folder in folders:
        if isinstance(folder, Path):
            folder = read_results(folder, paper_model, num_resamples=num_resamples)
        results.append(folder)
    results = _named(results)
    metrics = {label: run_metrics(folder) for label, folder in (runs or {}).items()}
    make_folder(out_dir)
    check_no_links(out_dir)
    _remove_earlier(out_dir)
    prefixes = [f"{name}-" for name in file_names(result.name for result in results)]
    if len(results) == 1:
        prefixes = [""]
    methods = list(dict.fromkeys(method for result in results for method in result.methods))
    models = list(dict.fromkeys(model for result in results for model in result.models))
    sections = []
    for result, prefix in zip(results, prefixes, strict=True):
        sections.append(_section(result, out_dir, prefix, result_plots(result, methods, models)))
    _write_csv(results, out_dir)
    training = None
    if metrics:
        training = training_plot(metrics, models).draw()
        training.save(out_dir / "plots" / "training.png")
    target = out_dir / "report.html"
    facts = {str(name): str(value) for name, value in (context or {}).items()}
    with atomic_write(target) as partial:
        content = _render(title, sections, training, facts, dict(answers or {}))
        partial.write_text(content, encoding="utf-8")
    return target


@dataclass(frozen=True)
class Section:
    """A section for one evaluation; all but the first plot and table are folded."""

    title: str
    results: Results
    plots: list[DrawnPlot] = field(repr=False)
    tables: list[Table] = field(repr=False)

    @property
    def subtitle(self) -> str:
        """A line about the data."""
        config = self.results.config
        facts = self.results.evaluation
        text = f"{config['num_examples']} {facts.example_name}s of {config['dataset']}"
        settings = [name for _, name, _, _ in Formatter().parse(facts.sizes) if name]
        if settings and all(name in config for name in settings):
            text += ", " + facts.sizes.format_map(config)
        return f"{text}."

    @property
    def cell(self) -> str:
        """A sentence about the cell that the tiles show, and about how it was chosen."""
        method, keep_ratio, step = self.results.cell
        place = method
        if step != NO_STEP:
            place += f" after {step} gradient steps"
        if self.results.methods:
            place += f" at {keep_label(keep_ratio)} of the slots"
        if not self.results.pairs:
            return place
        if not self.results.comparisons["primary"].any():
            return (
                f"{place}. No primary cell was named before the run, so every cell is exploratory"
            )
        is_named = self.results.config["primary"].get("named")
        chosen = "named before the run" if is_named else "by default the first method and size"
        return f"{place}: the primary cell, {chosen}"

    @property
    def verdict(self) -> str:
        """One sentence on the outcome by the deciding metric, in the cell of the tiles."""
        if self.results.pairs:
            return self._comparison_sentence(*self.results.pairs[0])
        return self._methods_sentence()

    def _comparison_sentence(self, model: str, reference: str) -> str:
        """How a model compares with a reference: by the deciding metric, then by other ones."""
        evaluation = self.results.evaluation
        compared = _at(self.results.pair_rows[model, reference], self.results.cell)
        compared = compared.set_index("metric")
        first = ""
        others: dict[str, list[str]] = {}
        for name in evaluation.metrics[:_NUM_TILES]:
            metric = METRICS[name]
            is_deciding = name == evaluation.deciding
            column = "ratio_figure" if is_deciding and metric.ratio else "figure"
            if name not in compared.index or compared.loc[name, column].verdict not in _RELATIONS:
                continue
            figure = compared.loc[name, column]
            label = metric.long_label or metric.label
            if is_deciding:
                relation = f"{_RELATIONS[figure.verdict]} {reference} by {label}"
                kind = "ratio" if metric.ratio else "difference"
                size = f"{kind} {figure.text} {figure.interval}".strip()
                first = f"{model} is {relation} ({size})"
            else:
                # within a sentence a word loses its capital, an abbreviation does not
                is_word = label[1:2].islower()
                name = label[0].lower() + label[1:] if is_word else label
                others.setdefault(figure.verdict, []).append(name)
        if not first:
            return f"{model} and {reference}: not comparable."
        clauses = [f"{verdict} by {' and '.join(labels)}" for verdict, labels in others.items()]
        return f"{first}; it is {', '.join(clauses)}." if clauses else f"{first}."

    def _methods_sentence(self) -> str:
        """Which of several methods is best, and which is next; for one method, its figure."""
        name = self.results.evaluation.deciding
        metric = METRICS[name]
        _, keep_ratio, _ = self.results.cell
        rows = self.results.compressed(self.results.rows)
        rows = rows[rows["final"] & (rows["metric"] == name)]
        rows = rows[(rows["keep_ratio"] == keep_ratio) & rows["value"].notna()]
        rows = rows[rows["model"] == self.results.models[0]]
        rows = rows.sort_values("value", ascending=metric.lower_is_better)
        if rows.empty:
            return ""
        unit = " %" if metric.percent else ""
        figures = [
            f"{row['figure'].text}{unit} {row['figure'].interval}".strip()
            for _, row in rows.iterrows()
        ]
        methods = list(rows["method"])
        at_size = f"At {keep_label(keep_ratio)} of the slots" if self.results.methods else "Here"
        extreme = "lowest" if metric.lower_is_better else "highest"
        if len(figures) == 1:
            of_method = f" of {methods[0]}" if methods[0] else ""
            return f"{at_size}, the {metric.label}{of_method} is {figures[0]}."
        first, second = (f"{methods[i]} {figures[i]}".strip() for i in (0, 1))
        return f"{at_size}, the {extreme} {metric.label} is that of {first}; next {second}."

    @property
    def tiles(self) -> list["Tile"]:
        """The tiles at the top: comparisons of the first pair, or the figures of a single model."""
        if not self.results.pairs:
            return list(self._value_tiles())
        return list(self._comparison_tiles(*self.results.pairs[0]))

    def _value_tiles(self) -> Iterator["Tile"]:
        figures = self._figures(self.results.models[0])
        for name in self.results.evaluation.metrics[:_NUM_TILES]:
            if name in figures:
                metric = METRICS[name]
                unit = "%" if metric.percent else metric.unit
                yield Tile(metric.long_label or metric.label, figures[name], "", unit)

    def _comparison_tiles(self, model: str, reference: str) -> Iterator["Tile"]:
        evaluation = self.results.evaluation
        compared = _at(self.results.pair_rows[model, reference], self.results.cell)
        compared = compared.set_index("metric")
        ours = self._figures(model)
        theirs = self._figures(reference)
        for name in evaluation.metrics[:_NUM_TILES]:
            if name not in compared.index:
                continue
            metric = METRICS[name]
            is_ratio = metric.ratio and name == evaluation.deciding
            column = "ratio_figure" if is_ratio else "figure"
            comparison = "ratio to" if is_ratio else "minus"
            label = f"{metric.long_label or metric.label}, {comparison} {reference}"
            unit = "%" if metric.percent else metric.unit
            detail = f"{model} {ours[name].text} and {reference} {theirs[name].text} {unit}"
            points = " points" if metric.percent else ""
            yield Tile(label, compared.loc[name, column], points, detail)

    def _figures(self, model: str) -> pd.Series:
        """The figures of a model in the cell of the tiles, by metric."""
        rows = _at(self.results.rows, self.results.cell)
        rows = rows[(rows["model"] == model) & (rows["stratum"] == "")]
        return rows.set_index("metric")["figure"]

    @property
    def facts(self) -> dict[str, str]:
        """The configuration and all lines of provenance, by name."""
        facts = dict(self.results.config)
        for rank, event in enumerate(self.results.events):
            facts[f"{event.get('event', 'run')} {rank}"] = event
        return {
            name: fact if isinstance(fact, str) else json.dumps(fact)
            for name, fact in facts.items()
        }


@dataclass(frozen=True)
class Tile:
    """A figure at the top of a section."""

    label: str
    figure: Figure
    unit: str
    detail: str  # compared figures, or the unit


def _named(results: Sequence[Results]) -> list[Results]:
    """The results, each folder once and with a unique name."""
    by_folder = {result.folder.resolve(): result for result in results}
    names = [folder.name for folder in by_folder]
    named = []
    for folder, result in by_folder.items():
        name = str(folder) if names.count(folder.name) > 1 else folder.name
        named.append(replace(result, name=name))
    return named


def _remove_earlier(out_dir: Path) -> None:
    """Remove the files of an earlier report from the folder."""
    if (out_dir / "report.html").exists():
        for pattern in _FILES:
            for earlier in out_dir.glob(pattern):
                earlier.unlink()


def _write_csv(results: Sequence[Results], out_dir: Path) -> None:
    """Write the rows of all folders as CSV files in full precision."""
    for name in ("summary", "comparisons", "costs"):
        frames = []
        for result in results:
            frame = getattr(result, name)
            if len(frame):
                frames.append(frame.assign(folder=result.name))
        if frames:
            rows = pd.concat(frames)
            rows["step"] = rows["step"].where(rows["step"] != NO_STEP).astype("Int64")
            rows.set_index("folder").to_csv(out_dir / f"{name}.csv")


def _section(results: Results, out_dir: Path, prefix: str, plots: Sequence[Plot]) -> Section:
    """The section for an evaluation; its tables and plots are also written as files.

    The names of the files begin with the prefix, which is empty for the only evaluation.
    """
    title = results.evaluation.title
    if prefix:
        title += f" ({results.name})"
    tables = []
    all_tables = result_tables(results)
    for table, name in zip(all_tables, file_names(table.name for table in all_tables), strict=True):
        tables.append(replace(table, name=name))
        write_table(tables[-1], out_dir / "tables", prefix)
    drawn = [plot.draw() for plot in plots]
    for plot, name in zip(drawn, file_names(plot.name for plot in drawn), strict=True):
        plot.save(out_dir / "plots" / f"{prefix}{name}.png")
    return Section(title, results, drawn, tables)


def _render(
    title: str,
    sections: Sequence[Section],
    training: DrawnPlot | None,
    context: Mapping[str, str],
    answers: Mapping[str, str],
) -> str:
    """The HTML of the page, which loads nothing from other places."""
    environment = Environment(
        loader=PackageLoader("kvcat.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["line_parts"] = line_parts
    used = {name for section in sections for name in section.results.metrics}
    metrics = {metric.label: metric for name, metric in METRICS.items() if name in used}
    return environment.get_template("page.html").render(
        title=title,
        sections=sections,
        training=training,
        context=context,
        answers=answers,
        metrics=metrics,
        fold_after=_FOLD_AFTER,
    )


def line_parts(text: str) -> list[str]:
    """The text in parts between which a line may break: at punctuation, between joined words."""
    return _BREAKS.split(text)


def _at(rows: pd.DataFrame, cell: tuple[str, float, int]) -> pd.DataFrame:
    """The rows that belong to a cell."""
    method, keep_ratio, step = cell
    is_method = rows["method"] == method
    return rows[is_method & (rows["keep_ratio"] == keep_ratio) & (rows["step"] == step)]
