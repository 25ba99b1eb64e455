"""Losses and kept fractions of training runs."""

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
    """Metrics of a training run, a row per record, with a column ``kept LAYER`` per router.

    Raises:
        InputError: no ``metrics.jsonl`` with records in the folder, or a damaged one.
    """
    records = read_jsonl(folder / "metrics.jsonl")
    if not records:
        raise InputError(f"{folder} is no training run: it has no metrics.jsonl with records")
    try:
        kept = [{f"kept {layer}": share for layer, share in (r.pop("kept", None) or {}).items()} for r in records]
        rows = pd.DataFrame([record | shares for record, shares in zip(records, kept, strict=True)])
        rows = rows.reindex(columns=list(dict.fromkeys([*rows.columns, "kind", "step", *LOSSES, "tokens"])))
        numbers = rows[["step", *LOSSES, "tokens", *_routers(rows)]].apply(pd.to_numeric)
        return rows.assign(**numbers).astype({"step": int})
    except (AttributeError, TypeError, ValueError) as error:
        raise InputError(f"{folder / 'metrics.jsonl'} is damaged: {one_line(error)}") from None


def training_plot(runs: Mapping[str, pd.DataFrame], models: Sequence[str]) -> Plot:
    """Losses of all runs by step, and the fraction of tokens that each router keeps, run by run.

    ``models``, all labels of the page in order, fix the colours.
    """
    labels = list(dict.fromkeys([*models, *runs]))
    measured = [name for name in LOSSES if any(rows[name].notna().any() for rows in runs.values())]
    panels = [(LOSSES[name], partial(_losses, runs, name, labels)) for name in measured]
    panels += [(f"{label}: fraction kept", partial(_kept, rows)) for label, rows in runs.items() if _routers(rows)]
    return Plot("training", "Training runs: lines are training batches, marks are validation", panels)


def _losses(runs: Mapping[str, pd.DataFrame], name: str, labels: Sequence[str], axes: Any) -> None:
    """One loss by step: training as a faint smoothed line, validation as marks."""
    for label, rows in runs.items():
        own, style = rows[rows[name].notna()], line_style(label, labels)
        train, validation = (own[own["kind"] == kind] for kind in ("train", "validation"))
        axes.plot(train["step"], _smooth(train[name]), color=style["color"], alpha=0.45, linewidth=1.0)
        if len(validation):
            axes.plot(validation["step"], validation[name], label=label, **style)
    axes.set_xlabel("training step")
    axes.set_ylabel("nats per token")


def _kept(rows: pd.DataFrame, axes: Any) -> None:
    """Fraction of tokens that each router keeps by training step."""
    train = rows[rows["kind"] == "train"]
    for rank, name in enumerate(_routers(rows)):
        shade, label = COLOURS[rank % len(COLOURS)], name.replace("kept", "layer")
        axes.plot(train["step"], _smooth(train[name]), color=shade, linewidth=1.2, label=label)
    axes.set_ylim(0.0, 1.05)
    axes.set_xlabel("training step")
    axes.set_ylabel("kept fraction of tokens")


def _routers(rows: pd.DataFrame) -> list[str]:
    return [name for name in rows if name.startswith("kept ")]


def _smooth(values: pd.Series) -> pd.Series:
    """Running mean over about a fiftieth of the run, shorter at the ends."""
    return values.rolling(2 * (len(values) // 100) + 1, center=True, min_periods=1).mean()
