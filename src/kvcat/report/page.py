"""The page: what came out of each evaluation, at a glance first and folded in full."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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


@dataclass(frozen=True)
class Tile:
    """One of the figures at the top: label, number, unit behind it, and what it compares."""

    label: str
    figure: Figure
    unit: str
    detail: str


@dataclass(frozen=True)
class Section:
    """An evaluation as the template shows it.

    Args:
        title: heading.
        results: of the folder.
        plots: shown, in order.
        tables: the first is shown, the others are folded.
        folded_plots: shown on demand.
    """

    title: str
    results: Results
    plots: list[Plot] = field(repr=False)
    tables: list[Table] = field(repr=False)
    folded_plots: list[Plot] = field(repr=False)

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
        where = method_label(method, step) + (f" at {keep_label(keep)} of the slots" if self.results.methods else "")
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
        results, pair = self.results, self.pair
        own = _at(results.summary[results.summary["stratum"] == ""], results.cell)
        values = {model: rows.set_index("metric") for model, rows in own.groupby("model")}
        compared = self._compared() if pair else values[results.models[0]]
        tiles = []
        for name in (name for name in results.evaluation.tiles if name in compared.index):
            metric, row = METRICS[name], compared.loc[name]
            label, unit = _LABELS.get(name, metric.label), "%" if metric.percent else metric.unit
            if pair is None:
                tiles.append(Tile(label, summary_figure(row), "", unit))
                continue
            detail = f"{' and '.join(f'{m} {summary_figure(values[m].loc[name]).text}' for m in pair)} {unit}"
            if _is_ratio(results, name):
                tiles.append(Tile(f"{label}: ratio to {pair[1]}", ratio_figure(row), "", detail))
            else:
                points = " points" if metric.percent else ""
                tiles.append(Tile(f"{label}: minus {pair[1]}", difference_figure(row), points, detail))
        return tiles

    @property
    def grids(self) -> list[tuple[str, list[str], list[tuple[str, list[Figure | None]]]]]:
        """Title, keep ratios, and for every method its figure at each: of the first two metrics of the tiles."""
        if self.pair is None or not self.results.methods:
            return []
        rows = final_steps(pair_rows(self.results, *self.pair))
        keeps = sorted(rows["keep_ratio"].unique())
        grids = []
        for name in (name for name in self.results.evaluation.tiles[:2] if name in set(rows["metric"])):
            make, kind = (ratio_figure, "ratio") if _is_ratio(self.results, name) else (difference_figure, "minus")
            lines = []
            for method, own in rows[rows["metric"] == name].groupby("method", sort=False):
                found = {row["keep_ratio"]: make(row) for _, row in own.iterrows()}
                lines.append((method_label(str(method), int(own["step"].max())), [found.get(keep) for keep in keeps]))
            title = f"{METRICS[name].label}, {kind} {'to ' if kind == 'ratio' else ''}{self.pair[1]}"
            grids.append((title, [keep_label(keep) for keep in keeps], lines))
        return grids

    @property
    def price(self) -> list[tuple[str, Figure]]:
        """What the model pays without compression."""
        rows = self._compared() if self.pair else pd.DataFrame()
        return [(head(n), difference_figure(rows.loc[n])) for n in self.results.evaluation.price if n in rows.index]

    @property
    def facts(self) -> dict[str, list[str]]:
        """What was run: name to lines."""
        starts = [event for event in self.results.events if event.get("event") == "start"]
        ends = [event for event in self.results.events if event.get("event") == "end"]
        facts = {name: _lines(value) for name, value in self.results.config.items()}
        if starts:
            facts |= {name: _lines(value) for name, value in starts[-1].items() if name != "event"}
            facts["command"] = list(dict.fromkeys(str(event.get("command")) for event in starts))
        if ends:
            facts["seconds"] = [f"{sum(event.get('seconds', 0.0) for event in ends):.0f}"]
            facts["interrupted runs"] = [str(max(0, len(starts) - len(ends)))]
        return facts

    def _compared(self) -> pd.DataFrame:
        """Comparisons of the pair in the cell of the tiles, by metric."""
        return _at(pair_rows(self.results, *self.results.pairs[0]), self.results.cell).set_index("metric")


def render(title: str, sections: Sequence[Section], training: tuple[Plot, Table] | None, context: Mapping) -> str:
    """The whole page; no request leaves it.

    Args:
        title: of the page.
        sections: evaluations.
        training: plot and table of training runs.
        context: more facts about what was run, name to text.
    """
    environment = Environment(
        loader=PackageLoader("kvcat.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    used = {name for section in sections for name in section.results.metrics}
    metrics = {METRICS[name].label: METRICS[name] for name in METRICS if name in used}
    return environment.get_template("page.html").render(
        title=title, sections=sections, training=training, context=context, metrics=metrics
    )


def method_label(method: str, step: int) -> str:
    """A method with its gradient steps."""
    return f"{method}, {step} step{'' if step == 1 else 's'}" if step_label(step) else method


def _is_ratio(results: Results, metric: str) -> bool:
    return results.evaluation.ratio and metric == results.evaluation.deciding


def _at(rows: pd.DataFrame, cell: tuple[str, float, int]) -> pd.DataFrame:
    method, keep, step = cell
    return rows[(rows["method"] == method) & (rows["keep_ratio"] == keep) & (rows["step"] == step)]


def _lines(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [f"{name}: {part}" for name, part in value.items()]
    if isinstance(value, list | tuple):
        return [part if isinstance(part, str) else json.dumps(part) for part in value]
    return [str(value)]
