"""The page: what came out of each evaluation, at a glance first and folded in full."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    method_label,
    pair_rows,
    ratio_figure,
    summary_figure,
)


@dataclass(frozen=True)
class Tile:
    """One of the figures at the top.

    Args:
        label: what it is.
        figure: the number.
        unit: behind the number.
        detail: the two figures that it compares; empty for a single model.
    """

    label: str
    figure: Figure
    unit: str
    detail: str


@dataclass(frozen=True)
class Grid:
    """One metric by method (rows) and keep ratio (columns)."""

    title: str
    keeps: list[str]
    rows: list[tuple[str, list[Figure | None]]]


@dataclass(frozen=True)
class Section:
    """An evaluation as the template shows it.

    Args:
        title: heading.
        subtitle: the data.
        results: of the folder.
        tiles: at the top.
        cell: which cell the tiles show.
        plots: shown, those of differences first.
        grids: of the main pair.
        price: what the main pair pays without compression.
        tables: all of them; the first is shown, the rest is folded.
        folded_plots: shown on demand.
        facts: what was run.
    """

    title: str
    subtitle: str
    results: Results
    tiles: list[Tile]
    cell: str
    plots: list[Plot]
    grids: list[Grid]
    price: list[tuple[str, Figure]]
    tables: list[Table]
    folded_plots: list[Plot]
    facts: dict[str, list[str]]


def make_section(
    results: Results, title: str, tables: list[Table], plots: Sequence[Plot | None], folded: list[Plot]
) -> Section:
    """An evaluation's part of the page.

    Args:
        results: of the folder.
        title: heading.
        tables: in order; the first is shown, the rest is folded.
        plots: to show, in order; None is left out.
        folded: plots to show on demand.
    """
    pair = results.pairs[0] if results.pairs else None
    method, keep, step, named = results.cell
    where = method_label(method, step) + (f" at {keep_label(keep)} of the slots" if results.methods else "")
    shown = {
        "named": f"{where}, the primary cell, named before the run",
        "none": f"{where}. No primary cell was named before the run: every cell is exploratory",
    }
    return Section(
        title, _subtitle(results), results, _tiles(results, pair, (method, keep, step)),
        shown["named" if named else "none"] if pair else where, [plot for plot in plots if plot is not None],
        _grids(results, pair), _price(results, pair, (method, keep, step)), tables, folded,
        _facts(results),
    )  # fmt: skip


def render(
    title: str, sections: Sequence[Section], training: tuple[Plot, Table] | None, context: dict[str, str]
) -> str:
    """The whole page; no request leaves it.

    Args:
        title: of the page.
        sections: evaluations.
        training: plot and table of training runs.
        context: more facts about what was run.
    """
    loader = PackageLoader("kvcat.report", ".")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    used = {name for section in sections for name in section.results.metrics}
    return environment.get_template("page.html").render(
        title=title, sections=sections, training=training, context=context,
        metrics={METRICS[name].label: METRICS[name] for name in METRICS if name in used},
    )  # fmt: skip


def _tiles(results: Results, pair: tuple[str, str] | None, cell: tuple[str, float, int]) -> list[Tile]:
    """Ratio or differences of the main pair, the model's own figures where there is no pair."""
    labels = {"nll": "NLL on the compact cache", "nll_dense": "Dense loss"}
    own = _cell(results.summary[results.summary["stratum"] == ""], cell)
    values = {model: rows.set_index("metric") for model, rows in own.groupby("model")}
    compared = _cell(pair_rows(results, *pair), cell).set_index("metric") if pair else values[results.models[0]]
    tiles = []
    for name in (name for name in results.evaluation.tiles if name in compared.index):
        metric, row = METRICS[name], compared.loc[name]
        label = labels.get(name, metric.label)
        if pair is None:
            tiles.append(Tile(label, summary_figure(row), " %" if metric.percent else "", metric.unit))
            continue
        unit = "%" if metric.percent else metric.unit
        detail = " and ".join(f"{model} {summary_figure(values[model].loc[name]).text}" for model in pair)
        if _is_ratio(results, name):
            tiles.append(Tile(f"{label}: ratio to {pair[1]}", ratio_figure(row), "", f"{detail} {unit}"))
        else:
            points = " points" if metric.percent else ""
            tiles.append(Tile(f"{label}: minus {pair[1]}", difference_figure(row), points, f"{detail} {unit}"))
    return tiles


def _is_ratio(results: Results, metric: str) -> bool:
    return results.evaluation.ratio and metric == results.evaluation.deciding


def _grids(results: Results, pair: tuple[str, str] | None) -> list[Grid]:
    if pair is None or not results.methods:
        return []
    rows = final_steps(pair_rows(results, *pair))
    rows = rows[rows["method"].isin(results.methods)]
    keeps = sorted(rows["keep_ratio"].unique())
    grids = []
    for name in (name for name in results.evaluation.tiles[:2] if name in set(rows["metric"])):
        make = ratio_figure if _is_ratio(results, name) else difference_figure
        lines = []
        for method, own in rows[rows["metric"] == name].groupby("method", sort=False):
            by_keep = {row["keep_ratio"]: row for _, row in own.iterrows()}
            label = method_label(str(method), own["step"].max())
            lines.append((label, [make(by_keep[keep]) if keep in by_keep else None for keep in keeps]))
        kind = "ratio" if _is_ratio(results, name) else "difference"
        title = f"{METRICS[name].label}, {kind} to {pair[1]}"
        grids.append(Grid(title, [keep_label(keep) for keep in keeps], lines))
    return grids


def _price(results: Results, pair: tuple[str, str] | None, cell: tuple[str, float, int]) -> list[tuple[str, Figure]]:
    if pair is None:
        return []
    rows = _cell(pair_rows(results, *pair), cell).set_index("metric")
    return [(head(name), difference_figure(rows.loc[name])) for name in results.evaluation.price if name in rows.index]


def _cell(rows: pd.DataFrame, cell: tuple[str, float, int]) -> pd.DataFrame:
    method, keep, step = cell
    return rows[(rows["method"] == method) & (rows["keep_ratio"] == keep) & (rows["step"] == step)]


def _subtitle(results: Results) -> str:
    config = results.config
    text = f"{config['num_examples']} {results.evaluation.example}s of {config['dataset']}"
    if "prefix_len" in config:
        text += f", {config['prefix_len']} prefix and {config['suffix_len']} suffix tokens"
    return text + (f", {config['length']} tokens each" if "length" in config else "") + "."


def _facts(results: Results) -> dict[str, list[str]]:
    starts = [event for event in results.events if event.get("event") == "start"]
    ends = [event for event in results.events if event.get("event") == "end"]
    facts = {name: _lines(value) for name, value in results.config.items() if name != "methods"}
    facts["methods"] = [json.dumps(method) for method in results.config["methods"]]
    if starts:
        facts["command"] = list(dict.fromkeys(str(event.get("command")) for event in starts))
        facts |= {name: _lines(value) for name, value in starts[-1].items() if name not in ("event", "command")}
    if ends:
        stopped = max(0, len(starts) - len(ends))
        seconds = f"{sum(event.get('seconds', 0.0) for event in ends):.0f} s"
        facts["evaluation time"] = [seconds + (f", without {stopped} interrupted runs" if stopped else "")]
    return facts


def _lines(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [f"{name}: {part}" for name, part in value.items()]
    return [str(part) for part in value] if isinstance(value, list | tuple) else [str(value)]
