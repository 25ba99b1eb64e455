"""The plot of training runs: losses, and the fraction of tokens that routers keep, by step."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from kvcat.errors import InputError, one_line
from kvcat.files import read_jsonl
from kvcat.report.plots import COLOURS, Plot, line_style

LOSSES = {"dense_loss": "dense loss", "masked_loss": "masked loss", "kl": "KL(dense || masked)"}


def run_metrics(folder: Path) -> pd.DataFrame:
    """The metrics of a training run: a row per record, and a column ``kept LAYER`` per router.

    Raises:
        InputError: the folder has no ``metrics.jsonl`` with records, or a damaged one.
    """
    file = folder / "metrics.jsonl"
    records = read_jsonl(file)
    if not records:
        raise InputError(f"{folder} is not a training run: it has no metrics.jsonl with records")
    try:
        return _metrics_table(records)
    except (AttributeError, TypeError, ValueError) as error:
        raise InputError(f"{file} is damaged: {one_line(error)}") from None


def _metrics_table(records: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    rows = []
    for record in records:
        row = {name: value for name, value in record.items() if name != "kept"}
        for layer, share in (record.get("kept") or {}).items():
            row[f"kept {layer}"] = share
        rows.append(row)
    table = pd.DataFrame(rows)
    columns = dict.fromkeys([*table.columns, "kind", "step", *LOSSES, "tokens"])
    table = table.reindex(columns=list(columns))
    numbers = table[["step", *LOSSES, "tokens", *_routers(table)]].apply(pd.to_numeric)
    return table.assign(**numbers).astype({"step": int})


def training_plot(runs: Mapping[str, pd.DataFrame], models: Sequence[str]) -> Plot:
    """The plot of all runs' losses by step, and of the fraction of tokens that each router keeps.

    ``models`` are all labels of the page; their order determines the colours.
    """
    labels = list(dict.fromkeys([*models, *runs]))
    panels = []
    for name, title in LOSSES.items():
        if any(rows[name].notna().any() for rows in runs.values()):
            panels.append((title, partial(_draw_losses, runs, name, labels)))
    for label, rows in runs.items():
        if _routers(rows):
            panels.append((f"{label}: fraction kept", partial(_draw_kept, rows)))
    title = "Training runs: lines are averages over training batches, marks are validation"
    return Plot("training", title, panels)


def _draw_losses(
    runs: Mapping[str, pd.DataFrame], name: str, labels: Sequence[str], axes: Any
) -> None:
    """Draw one loss by step: training as a faint smoothed line, validation as markers."""
    for label, rows in runs.items():
        style = line_style(label, labels)
        measured = rows[rows[name].notna()]
        train = measured[measured["kind"] == "train"]
        validation = measured[measured["kind"] == "validation"]
        if measured.empty:
            continue
        smoothed = _smoothed(train[name])
        axes.plot(
            train["step"],
            smoothed,
            color=style["color"],
            alpha=0.45,
            linewidth=1.0,
            label=f"{label}, training",
        )
        if len(validation):
            axes.plot(validation["step"], validation[name], label=f"{label}, validation", **style)
    axes.set_xlabel("training step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel("nats per token")


def _draw_kept(rows: pd.DataFrame, axes: Any) -> None:
    """Draw the fraction of tokens that each router keeps, by training step."""
    train = rows[rows["kind"] == "train"]
    for rank, name in enumerate(_routers(rows)):
        colour = COLOURS[rank % len(COLOURS)]
        label = name.replace("kept", "layer")
        axes.plot(train["step"], _smoothed(train[name]), color=colour, linewidth=1.2, label=label)
    axes.set_ylim(0.0, 1.05)
    axes.set_xlabel("training step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel("kept fraction of tokens")


def _routers(rows: pd.DataFrame) -> list[str]:
    return [name for name in rows if name.startswith("kept ")]


def _smoothed(values: pd.Series) -> pd.Series:
    """The running mean over about a tenth of the run, over less at the ends."""
    window = 2 * (len(values) // 20) + 1
    return values.rolling(window, center=True, min_periods=1).mean()
