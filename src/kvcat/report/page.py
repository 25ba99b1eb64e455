"""The page: what came out of each evaluation, at a glance first and folded in full."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined

from kvcat.evals import METRICS
from kvcat.report.plots import Plot
from kvcat.report.results import Results, final_steps
from kvcat.report.tables import (
    Figure,
    Table,
    difference_figure,
    head,
    keep_label,
    pair_rows,
    ratio_figure,
    step_label,
    summary_figure,
)

_LABELS = {"nll": "NLL on the compact cache", "nll_dense": "Dense loss"}


class Tile(NamedTuple):
    """One of the figures at the top: label, number, unit behind it, and what it compares."""

    label: str
    figure: Figure
    unit: str
    detail: str


class Grid(NamedTuple):
    """One metric: keep ratios, and for every method its figure at each."""

    title: str
    keeps: list[str]
    rows: list[tuple[str, list[Figure | None]]]


@dataclass(frozen=True)
class Section:
    """An evaluation as the template shows it.

    Args:
        title: heading.
        results: of the folder.
        plots: the first is shown, the others are folded.
        tables: the first is shown, the others are folded.
    """

    title: str
    results: Results
    plots: list[Plot] = field(repr=False)
    tables: list[Table] = field(repr=False)

    @property
    def pair(self) -> tuple[str, str] | None:
        """The models that the section compares first."""
        return self.results.pairs[0] if self.results.pairs else None

    @property
    def subtitle(self) -> str:
        """The data."""
        config = self.results.config
        text = f"{config['num_examples']} {self.results.evaluation.example}s of {config['dataset']}"
        if "prefix_len" in config:
            text += f", {config['prefix_len']} prefix and {config['suffix_len']} suffix tokens"
        return text + (f", {config['length']} tokens each" if "length" in config else "") + "."

    @property
    def cell(self) -> str:
        """The cell that the tiles show, and whether it was named before the run."""
        method, keep, step = self.results.cell
        where = _method(method, step) + (f" at {keep_label(keep)} of the slots" if self.results.methods else "")
        if self.pair is None:
            return where
        if self.results.comparisons["primary"].any():
            return f"{where}: the primary cell, named before the run"
        return f"{where}. No primary cell was named before the run, so every cell is exploratory"

    @property
    def seeds(self) -> int:
        """Training runs behind the model that has most."""
        return int(self.results.summary["num_seeds"].max())

    @property
    def tiles(self) -> list[Tile]:
        """Ratio or differences of the pair; a single model's own figures."""
        own = _at(self.results.summary[self.results.summary["stratum"] == ""], self.results.cell)
        values = {model: rows.set_index("metric") for model, rows in own.groupby("model")}
        compared, tiles = self._compared() if self.pair else values[self.results.models[0]], []
        for name in (name for name in self.results.evaluation.tiles if name in compared.index):
            metric, row = METRICS[name], compared.loc[name]
            label, unit = _LABELS.get(name, metric.label), "%" if metric.percent else metric.unit
            if self.pair is None:
                tiles.append(Tile(label, summary_figure(row), "", unit))
                continue
            detail = f"{' and '.join(f'{m} {summary_figure(values[m].loc[name]).text}' for m in self.pair)} {unit}"
            figure, relation = self._compare(name, row)
            points = " points" if metric.percent else ""
            tiles.append(Tile(f"{label}, {relation} {self.pair[1]}", figure, points, detail))
        return tiles

    @property
    def grids(self) -> list[Grid]:
        """The first two metrics of the tiles by method and keep ratio."""
        if self.pair is None or not self.results.methods:
            return []
        rows, grids = final_steps(pair_rows(self.results, *self.pair)), []
        keeps = sorted(rows["keep_ratio"].unique())
        for name in (name for name in self.results.evaluation.tiles[:2] if name in set(rows["metric"])):
            lines, relation = [], ""
            for method, own in rows[rows["metric"] == name].groupby("method", sort=False):
                found = {}
                for _, row in own.iterrows():
                    found[row["keep_ratio"]], relation = self._compare(name, row)
                lines.append((_method(str(method), int(own["step"].max())), [found.get(keep) for keep in keeps]))
            title = f"{METRICS[name].label}, {relation} {self.pair[1]}"
            grids.append(Grid(title, [keep_label(keep) for keep in keeps], lines))
        return grids

    @property
    def price(self) -> list[tuple[str, Figure]]:
        """What the model pays without compression."""
        rows = self._compared() if self.pair else pd.DataFrame()
        return [(head(n), difference_figure(rows.loc[n])) for n in self.results.evaluation.price if n in rows.index]

    @property
    def facts(self) -> dict[str, str]:
        """What was run: the configuration, and every line of provenance."""
        runs = [f"{event.get('event', 'run')} {rank}" for rank, event in enumerate(self.results.events)]
        facts = {**self.results.config, **dict(zip(runs, self.results.events, strict=True))}
        return {name: fact if isinstance(fact, str) else json.dumps(fact) for name, fact in facts.items()}

    def _compared(self) -> pd.DataFrame:
        """Comparisons of the pair in the cell of the tiles, by metric."""
        return _at(pair_rows(self.results, *self.results.pairs[0]), self.results.cell).set_index("metric")

    def _compare(self, metric: str, row: pd.Series) -> tuple[Figure, str]:
        """The ratio where that is how the metric is compared, else the difference; and how it relates."""
        evaluation = self.results.evaluation
        if evaluation.ratio and metric == evaluation.deciding:
            return ratio_figure(row), "ratio to"
        return difference_figure(row), "minus"


def render(title: str, sections: Sequence[Section], training: tuple[Plot, Table] | None, context: Mapping) -> str:
    """The whole page; no request leaves it.

    Args:
        title: of the page.
        sections: evaluations.
        training: plot and table of training runs.
        context: more facts about what was run, name to text.
    """
    loader = PackageLoader("kvcat.report", ".")
    options = {"autoescape": True, "undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    used = {name for section in sections for name in section.results.metrics}
    metrics = {METRICS[name].label: METRICS[name] for name in METRICS if name in used}
    return (
        Environment(loader=loader, **options)  # type: ignore[arg-type]
        .get_template("page.html")
        .render(title=title, sections=sections, training=training, context=context, metrics=metrics)
    )


def _method(method: str, step: int) -> str:
    """A method with its gradient steps."""
    return f"{method}, {step} step{'' if step == 1 else 's'}" if step_label(step) else method


def _at(rows: pd.DataFrame, cell: tuple[str, float, int]) -> pd.DataFrame:
    method, keep, step = cell
    return rows[(rows["method"] == method) & (rows["keep_ratio"] == keep) & (rows["step"] == step)]
