"""Losses and kept fractions of training runs."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvcat.errors import InputError
from kvcat.files import read_jsonl
from kvcat.report.plots import COLOURS, Plot, colour
from kvcat.report.tables import Table

Records = Sequence[Mapping[str, Any]]
LOSSES = {"dense_loss": "dense loss", "masked_loss": "masked loss", "kl": "KL(dense || masked)"}


def run_metrics(folder: Path) -> list[dict[str, Any]]:
    """Metrics of a training run.

    Raises:
        InputError: no ``metrics.jsonl`` with records in the folder.
    """
    records = read_jsonl(folder / "metrics.jsonl")
    if not records:
        raise InputError(f"{folder} is no training run: it has no metrics.jsonl with records")
    return records


def training_plot(runs: Mapping[str, Records], models: Sequence[str]) -> Plot:
    """Losses of all runs by step, and the fraction of tokens that each router keeps, run by run.

    Args:
        runs: label to metrics.
        models: all labels of the page, in order; they fix colours.
    """
    labels = list(dict.fromkeys([*models, *runs]))
    everything = [record for records in runs.values() for record in records]
    measured = [name for name in LOSSES if any(record.get(name) is not None for record in everything)]
    panels = [(LOSSES[name], _losses(runs, name, labels)) for name in measured]
    routed = {label: records for label, records in runs.items() if any(r.get("kept") for r in records)}
    panels += [(f"{label}: fraction kept", _kept(records)) for label, records in routed.items()]
    return Plot("training", "Training runs: lines are training batches, marks are validation", panels)


def training_table(runs: Mapping[str, Records]) -> Table:
    """Each run's losses and kept fractions at its last validation."""
    lines = []
    for label, records in runs.items():
        train = [record for record in records if record["kind"] == "train"]
        last = next((r for r in reversed(records) if r["kind"] == "validation"), records[-1])
        tokens = train[-1].get("tokens") if train else None
        line = {"run": label, "steps": str(last["step"]), "tokens": "-" if tokens is None else f"{tokens:,}"}
        line |= {title: "-" if last.get(name) is None else f"{last[name]:.4f}" for name, title in LOSSES.items()}
        lines.append(line | {"kept": ", ".join(f"{v:.2f}" for v in (last.get("kept") or {}).values()) or "-"})
    return Table(
        "training", "Training runs", "Losses and kept fraction per router at the last validation.", pd.DataFrame(lines)
    )


def _losses(runs: Mapping[str, Records], field: str, labels: Sequence[str]) -> Callable[[Any], None]:
    """One loss by step: training as a faint smoothed line, validation as marks."""

    def draw(axes: Any) -> None:
        for label, records in runs.items():
            style = colour(label, labels)
            steps, values = _series(records, "train", field)
            axes.plot(steps, _smoothed(values), color=style["color"], alpha=0.45, linewidth=1.0)
            steps, values = _series(records, "validation", field)
            if len(steps):
                axes.plot(steps, values, label=label, **style)
        axes.set_xlabel("training step")
        axes.set_ylabel("nats per token")

    return draw


def _kept(records: Records) -> Callable[[Any], None]:
    """Fraction of tokens that each router keeps by training step."""

    def draw(axes: Any) -> None:
        own = [record for record in records if record["kind"] == "train" and record.get("kept")]
        steps = [record["step"] for record in own]
        for rank, layer in enumerate(own[0]["kept"] if own else ()):
            values = np.array([record["kept"][layer] for record in own], dtype=float)
            axes.plot(
                steps, _smoothed(values), color=COLOURS[rank % len(COLOURS)], linewidth=1.2, label=f"layer {layer}"
            )
        axes.set_ylim(0.0, 1.05)
        axes.set_xlabel("training step")
        axes.set_ylabel("kept fraction of tokens")

    return draw


def _series(records: Records, kind: str, field: str) -> tuple[np.ndarray, np.ndarray]:
    own = [record for record in records if record["kind"] == kind and record.get(field) is not None]
    return np.array([r["step"] for r in own], dtype=float), np.array([r[field] for r in own], dtype=float)


def _smoothed(values: np.ndarray) -> np.ndarray:
    """Running mean over about a fiftieth of the run, shorter at the ends."""
    half = len(values) // 100
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.minimum(np.arange(len(values)) + half + 1, len(values))
    starts = np.maximum(np.arange(len(values)) - half, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)
