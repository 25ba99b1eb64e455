"""Plots of training runs: losses and kept fractions by step."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvcat.errors import InputError
from kvcat.files import read_jsonl
from kvcat.report.style import COLOURS, colours, markers

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


def draw_loss(axes: Any, runs: Mapping[str, Records], field: str, models: Sequence[str]) -> None:
    """One loss by step: training as a faint line smoothed over its neighbours, validation as marks, all runs.

    Args:
        axes: matplotlib axes.
        runs: label to metrics.
        field: ``dense_loss``, ``masked_loss`` or ``kl``.
        models: all labels of the page, in order; they fix colours.
    """
    for label, records in runs.items():
        colour = colours(models)[label]
        steps, values = _series(records, "train", field)
        if len(steps):
            axes.plot(steps, _smoothed(values), color=colour, alpha=0.45, linewidth=1.0)
        steps, values = _series(records, "validation", field)
        if len(steps):
            axes.plot(steps, values, color=colour, marker=markers(models)[label], label=label)
    axes.set_xlabel("training step")
    axes.set_ylabel("nats per token")


def draw_kept(axes: Any, records: Records, target: float | None = None) -> None:
    """Fraction of tokens that each router keeps, by training step, and the mean over routers.

    Args:
        axes: matplotlib axes.
        records: metrics of one run.
        target: the fraction aimed at, drawn dashed.
    """
    own = [record for record in records if record["kind"] == "train" and record.get("kept")]
    steps = np.array([record["step"] for record in own], dtype=float)
    layers = list(own[0]["kept"]) if own else []
    for rank, layer in enumerate(layers):
        values = np.array([record["kept"][layer] for record in own], dtype=float)
        axes.plot(steps, _smoothed(values), color=COLOURS[rank % len(COLOURS)], linewidth=1.2, label=f"layer {layer}")
    if target is not None:
        axes.axhline(target, color="#808080", linestyle="--", linewidth=1.0, label="target")
    axes.set_ylim(0.0, 1.05)
    axes.set_xlabel("training step")
    axes.set_ylabel("kept fraction of tokens")
    axes.legend(ncols=2, fontsize=8)


def has_kept(records: Records) -> bool:
    """Whether the run had routers."""
    return any(record.get("kept") for record in records)


def has_field(records: Records, field: str) -> bool:
    """Whether the run measured a loss."""
    return any(record.get(field) is not None for record in records)


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
