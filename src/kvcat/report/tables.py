"""The tables of a report, made from the rows of ``Results``."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from kvcat.evals import METRICS
from kvcat.report.figures import Cell, Figure, Line, Table, keep_label, slug, step_label
from kvcat.report.results import Results, read_results
from kvcat.report.rows import CELL

_COSTS = {  # heading and decimals, by column of ``Results.costs``
    "seconds": ("s per example", 3),
    "peak_mib": ("peak MiB of a batch", 0),
    "kib": ("KiB per cache", 1),
    "dense_share": ("bytes / dense", 3),
    "ttft_ratio": ("first token / dense", 2),
    "speed_ratio": ("tokens/s / dense", 2),
}
_FEWEST_DOCUMENTS = 6  # the p-value of five is .0625 at the smallest


def result_tables(results: Results) -> list[Table]:
    """All tables of a folder, the most important first, with the paper's figures next to ours."""
    differences = [differences_table(results, *pair) for pair in results.pairs]
    names = list(dict.fromkeys([*results.methods, *results.summary["method"]]))
    strata = []
    if results.summary["stratum"].any():
        strata = [strata_table(results, name) for name in names]
    if results.methods:
        tables = [*differences[:1], overview_table(results)]
        if len(results.steps):
            tables.append(steps_table(results))
        tables += [*_quality_tables(results, names), *differences[1:], *strata]
        if _dense_metrics(results):
            tables.append(dense_table(results))
    else:
        tables = [*strata, *differences] or _quality_tables(results, names)
    if len(results.costs):
        tables.append(costs_table(results))
    return tables


def _quality_tables(results: Results, names: Sequence[str]) -> list[Table]:
    """A table for each method; one table of all methods if there is one model."""
    if len(results.models) > 1 or len(names) == 1:
        return [quality_table(results, name) for name in names]
    return [methods_table(results, names)]


def quality_table(results: Results, method: str) -> Table:
    """The table of all metrics for one method or baseline, with a row per model.

    Metrics of the whole cache are in ``dense_table``, if the method compresses.
    """
    rows, lines = _quality_lines(results, method)
    caption = f"{method}: {sizes(rows, results.evaluation.example_name)}."
    name = f"quality-{slug(method)}"
    return _table(results, rows, name, f"{method}: every figure", caption, lines)


def methods_table(results: Results, methods: Sequence[str]) -> Table:
    """The table of all metrics for all methods and baselines of a single model."""
    all_rows = []
    all_lines: list[Line] = []
    for method in methods:
        rows, lines = _quality_lines(results, method)
        all_rows.append(rows)
        all_lines += [{"method": method, **line} for line in lines]
    rows = pd.concat(all_rows)
    caption = f"{results.models[0]}: {sizes(rows, results.evaluation.example_name)}."
    return _table(results, rows, "quality", "Every figure", caption, all_lines)


def _quality_lines(
    results: Results, method: str, *, with_dense: bool = False
) -> tuple[pd.DataFrame, list[Line]]:
    """The rows of a method over all strata, and the lines of its table.

    Metrics of the whole cache are left out for methods that compress, unless ``with_dense``.
    """
    all_rows = results.rows
    rows = all_rows[(all_rows["method"] == method) & (all_rows["stratum"] == "")]
    left_out = []
    if method in results.methods and not with_dense:
        left_out = _dense_metrics(results)
    lines = []
    for (keep, step, model), cell in _reported(rows).groupby(
        ["keep_ratio", "step", "model"], sort=False
    ):
        line: Line = _labels(keep, int(step))
        line["model"] = model
        line["n"] = str(cell["num_examples"].max())
        figures = cell.set_index("metric")["figure"]
        for name in results.metrics:
            if name in figures and name not in left_out:
                line[METRICS[name].heading] = figures[name]
        lines.append(line)
    return rows, lines


def dense_table(results: Results) -> Table:
    """The table of the metrics of the whole cache, by model, and of their differences.

    They are the same for every method and keep ratio.
    """
    names = _dense_metrics(results)
    whole = results.compressed(results.rows)
    rows = whole[whole["metric"].isin(names)]
    lines = []
    for (model, number), cell in rows.groupby(["model_rank", "num_examples"]):
        figures = cell.drop_duplicates("metric").set_index("metric")["figure"]
        label = results.models[int(model)]
        lines.append(_dense_line(label, int(number), names, figures))
    for (model, reference), pair in results.pair_rows.items():
        compared = pair[pair["metric"].isin(names)]
        for number, cell in compared.groupby("num_examples"):
            figures = cell.drop_duplicates("metric").set_index("metric")["figure"]
            lines.append(_dense_line(f"{model} minus {reference}", int(number), names, figures))
    caption = "The whole cache, which is the same for every method and size."
    return _table(results, rows, "whole-cache", "With the whole cache", caption, lines)


def _dense_line(label: str, number: int, names: Sequence[str], figures: pd.Series) -> Line:
    """A row of ``dense_table``: figures of one model, or differences of two."""
    line: Line = {"model": label, "n": str(number)}
    line.update({METRICS[name].heading: figures[name] for name in names if name in figures})
    return line


def _dense_metrics(results: Results) -> list[str]:
    """The metrics that are the same for every method and keep ratio."""
    return [name for name in results.metrics if METRICS[name].of_dense_model]


def differences_table(results: Results, model: str, reference: str) -> Table:
    """The table of differences between two models on the same examples."""
    deciding = results.evaluation.deciding
    rows = results.pair_rows[model, reference]
    lines = []
    for (method, keep, step), cell in rows.groupby(CELL, sort=False):
        labels = {
            "method": str(method),
            **_labels(keep, int(step)),
            "n": str(cell["num_examples"].max()),
        }
        lines.append({**labels, **_difference_cells(results, cell.set_index("metric"))})
    caption = (
        f"{model} minus {reference} on the same "
        f"{sizes(rows, results.evaluation.example_name)}. p (Holm) is for "
        f"{METRICS[deciding].label}, corrected for the number of exploratory cells."
    )
    name = f"differences-{slug(model)}-{slug(reference)}"
    # the distinct warnings as sentences, without the observed differences
    warnings = rows.loc[rows["metric"] == deciding, "warning"]
    beginnings = dict.fromkeys(text.partition(",")[0] for text in warnings if text)
    notes = [f"{text[0].upper()}{text[1:]}." for text in beginnings]
    return _table(results, rows, name, f"{model} minus {reference}", caption, lines, notes)


def _difference_cells(results: Results, rows: pd.DataFrame) -> Line:
    """The figures of one cell by metric, the deciding metric first."""
    deciding = results.evaluation.deciding
    has_ratio = METRICS[deciding].ratio
    dense = _dense_metrics(results) if results.methods else []
    names = [name for name in results.metrics if name in rows.index and name not in dense]
    line: Line = {}
    if has_ratio:
        line[f"{METRICS[deciding].heading} ratio"] = rows.loc[deciding, "ratio_figure"]
        names.remove(deciding)  # its difference is less informative than its ratio, and comes last
        names.append(deciding)
    line["p (Holm)"] = Figure(rows.loc[deciding, "p_holm"])
    for name in names:
        line[METRICS[name].difference_heading] = rows.loc[name, "figure"]
    return line


def strata_table(results: Results, method: str) -> Table:
    """The table of the deciding metric by stratum, with a column per model."""
    evaluation = results.evaluation
    metric = METRICS[evaluation.deciding]
    all_rows = results.rows
    rows = all_rows[(all_rows["method"] == method) & (all_rows["metric"] == evaluation.deciding)]
    all_averages = results.averages
    averages = all_averages[all_averages["method"] == method]
    lines = []
    for (keep, step), cell in _reported(rows).groupby(["keep_ratio", "step"], sort=False):
        of_cell = (averages["keep_ratio"] == keep) & (averages["step"] == step)
        for stratum, stratum_rows in [*_by_stratum(cell), *_by_stratum(averages[of_cell])]:
            line: Line = _labels(keep, int(step))
            line[evaluation.stratum_name] = stratum or "all"
            line["n"] = str(stratum_rows["num_examples"].max())
            for model, figure in zip(stratum_rows["model"], stratum_rows["figure"], strict=True):
                line[f"model {model}" if model in line else model] = figure
            lines.append(line)
    title = f"{method} by {evaluation.stratum_name}"
    caption = f"{method}: {metric.heading} by {evaluation.stratum_name}."
    name = f"{evaluation.stratum_name}-{slug(method)}"
    return _table(results, rows, name, title, caption, lines)


def overview_table(results: Results) -> Table:
    """The table of the deciding metric by method and model (rows) and keep ratio (columns)."""
    metric = METRICS[results.evaluation.deciding]
    whole = results.compressed(results.rows)
    rows = whole[whole["final"] & (whole["metric"] == results.evaluation.deciding)]
    lines = []
    for method in results.methods:
        for model in results.models:
            cells = rows[(rows["method"] == method) & (rows["model"] == model)]
            if len(cells):
                keeps = map(keep_label, cells["keep_ratio"])
                figures = dict(zip(keeps, cells["figure"], strict=True))
                lines.append({"method": method, "model": model, **figures})
    unit = f" ({metric.unit})" if metric.unit else ""  # the heading of a share names it
    caption = f"{metric.heading}{unit} by method and share of the slots kept."
    return _table(results, rows, "overview", f"{metric.label} by slots kept", caption, lines)


def steps_table(results: Results) -> Table:
    """The table of the gradient steps that each model needs to reach the level of another."""
    lines = []
    for _, row in results.steps.iterrows():
        line: Line = {"method": row["method"], "keep": keep_label(row["keep_ratio"])}
        line |= {"model": row["model"], "level of": row["reference"]}
        line["metric"] = METRICS[row["metric"]].heading
        for column, heading in (("steps", "steps to it"), ("fewer", "times fewer")):
            ends = row[f"{column}_low"], row[f"{column}_high"]
            line[heading] = Figure(row[column], *ends, decimals=1)
        lines.append(line)
    caption = "Gradient steps to the other model's level after its last step."
    notes = (
        "Linear between the recorded steps; inf: at no recorded step. The intervals are over "
        "documents, not over training runs.",
    )
    rows = results.compressed(results.rows)
    title = "Gradient steps to the level of another model"
    return _table(results, rows, "steps", title, caption, lines, notes)


def overview_text(results: Results) -> str:
    """The table of ``overview_table`` as aligned text."""
    table = overview_table(results)
    texts = table.frame.map(lambda cell: cell.text if isinstance(cell, Figure) else cell)
    return f"{table.title}\n{texts.to_string(index=False)}\n"


def costs_table(results: Results) -> Table:
    """The table of quality and cost at the last step of every method."""
    whole = results.compressed(results.rows)
    rows = whole[whole["final"] & (whole["metric"] == results.evaluation.deciding)]
    rows = rows.merge(results.costs, on=["model", *CELL])
    lines = []
    for _, row in rows.sort_values(["method", "keep_ratio"], kind="stable").iterrows():
        line: Line = {"method": row["method"], "keep": keep_label(row["keep_ratio"])}
        line["model"] = row["model"]
        line[METRICS[row["metric"]].heading] = replace(row["figure"], paper="")
        for column, (heading, decimals) in _COSTS.items():
            line[heading] = Figure(row[column], decimals=decimals)
        lines.append(line)
    caption = "Quality and cost per example, as measured here."
    return _table(results, rows, "costs", "Quality and cost", caption, lines)


def headline_text(results: Results | Path) -> str:
    """The warnings, then the figures over all examples, of a results folder as aligned text."""
    if isinstance(results, Path):
        results = read_results(results)
    names = results.methods or dict.fromkeys(results.whole["method"])
    lines: list[Line] = []
    for name in names:
        _, of_method = _quality_lines(results, name, with_dense=True)
        lines += [{"method": name, **line} for line in of_method]
    frame = _useful_columns(pd.DataFrame(lines).fillna(""))
    frame = frame.set_index(["method", "model", "keep"]).reset_index()
    texts = frame.map(lambda cell: cell.text if isinstance(cell, Figure) else cell)
    counts = sizes(results.whole, results.evaluation.example_name)
    return "\n".join([*results.warnings, counts, texts.to_string(index=False), ""])


def sizes(rows: pd.DataFrame, example_name: str) -> str:
    """The amount of data behind the rows, e.g. ``128 windows of 64 documents``."""
    counts = set(zip(rows["num_examples"], rows["num_documents"], strict=True))
    texts = [
        f"{_count(num_examples, example_name)} of {_count(num_documents, 'document')}"
        for num_examples, num_documents in sorted(counts)
    ]
    return ", or ".join(texts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}s" if number > 1 else f"{number} {noun}"


def _labels(keep_ratio: float, step: int) -> Line:
    return {"keep": keep_label(keep_ratio), "steps": step_label(step)}


def _reported(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows["reported"]]


def _by_stratum(rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """The rows by stratum, in their order; those for all examples come last."""
    strata = sorted(dict.fromkeys(rows["stratum"]), key=lambda stratum: stratum == "")
    for stratum in strata:
        yield stratum, rows[rows["stratum"] == stratum]


def _table(
    results: Results,
    rows: pd.DataFrame,
    name: str,
    title: str,
    caption: str,
    lines: Sequence[Line],
    notes: Sequence[str] = (),
) -> Table:
    """The table without empty columns, and without equal numbers of examples or a single model.

    ``rows`` are the source of its figures, and are used for the note on small samples.
    """
    frame = pd.DataFrame(lines).fillna("")
    frame = _useful_columns(frame)
    if "model" in frame and len(results.models) == 1:
        frame = frame.drop(columns="model")
    all_notes = ["95 % intervals.", *results.warnings, *_small_sample_notes(rows), *notes]
    figures = [cell for cell in frame.to_numpy().flat if isinstance(cell, Figure)]
    if results.paper_note and any(figure.paper for figure in figures):
        all_notes.append(results.paper_note)
    caption = f"{results.evaluation.title}, {results.config['dataset']}. {caption}"
    if results.pairs and not name.startswith("differences"):
        caption += f" Marked: better or worse than {results.pairs[0][1]}."
    return Table(name, title, caption, frame, tuple(all_notes))


def _useful_columns(frame: pd.DataFrame) -> pd.DataFrame:
    """The columns that are not empty, and numbers of examples only if they differ."""
    frame = frame.loc[:, [not frame[column].map(_is_empty).all() for column in frame]]
    if "n" in frame and frame["n"].nunique() == 1:
        frame = frame.drop(columns="n")
    return frame


def _is_empty(cell: Cell) -> bool:
    """Whether a cell shows nothing."""
    return math.isnan(cell.value) if isinstance(cell, Figure) else not cell


def _small_sample_notes(rows: pd.DataFrame) -> list[str]:
    """A note if there are too few documents for a verdict."""
    number = rows[rows["stratum"] == ""]["num_documents"].min()
    notes = []
    if 1 < number < _FEWEST_DOCUMENTS:
        notes.append(
            f"Only {number} documents: too few for a verdict (better or worse), which needs "
            f"{_FEWEST_DOCUMENTS}."
        )
    return notes
