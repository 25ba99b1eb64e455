"""What compression and answers took, per example."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcat.evals.records import method_label


@dataclass(frozen=True)
class CostRow:
    """What a model's method costs at a keep ratio and step, by the batches measured; NaN where nothing was.

    Args:
        model: label of the model.
        method: name of the method with its options.
        keep_ratio: fraction kept.
        step: gradient steps, or None.
        num_examples: examples compressed.
        seconds: to compress one example, up to the step.
        peak_mib: highest of the batches' peak memory above what stood there before, MiB.
        num_bytes: of one example's compact cache.
        dense_share: these bytes over those of the dense cache.
        ttft_ratio: time to the first token of an answer over that from the dense cache.
        speed_ratio: tokens per second of an answer over those from the dense cache.
    """

    model: str
    method: str
    keep_ratio: float
    step: int | None
    num_examples: int
    seconds: float
    peak_mib: float
    num_bytes: float
    dense_share: float
    ttft_ratio: float
    speed_ratio: float


def cost_rows(costs: Iterable[Mapping[str, Any]], shown: Mapping[str, str]) -> list[CostRow]:
    """Rows in the order of models and methods in ``costs``, then by keep ratio and step.

    Args:
        costs: ``read_costs`` of a folder.
        shown: label of a model to the label it is shown by; others are left out.
    """
    cells: dict[tuple[str, str, float, int | None], list[Mapping[str, Any]]] = {}
    for cost in costs:
        if cost["model"] in shown:
            label = method_label(cost["method"], cost["options"])
            cells.setdefault((shown[cost["model"]], label, cost["keep_ratio"], cost["step"]), []).append(cost)
    ranks = [{name: rank for rank, name in enumerate(dict.fromkeys(cell[i] for cell in cells))} for i in (0, 1)]
    order = sorted(cells, key=lambda c: (ranks[0][c[0]], ranks[1][c[1]], c[2], -1 if c[3] is None else c[3]))
    return [_row(cell, cells[cell]) for cell in order]


def _row(cell: tuple[str, str, float, int | None], batches: list[Mapping[str, Any]]) -> CostRow:
    count = sum(batch["examples"] for batch in batches)
    num_bytes, dense = (sum(batch[name] for batch in batches) for name in ("bytes", "dense_bytes"))
    peaks = [batch["peak_mib"] for batch in batches if batch["peak_mib"] is not None]
    return CostRow(
        *cell, count, sum(batch["seconds"] for batch in batches) / count, max(peaks, default=float("nan")),
        num_bytes / count, num_bytes / dense, _ratio(batches, "ttft"), _ratio(batches, "tokens_per_s"),
    )  # fmt: skip


def _ratio(batches: list[Mapping[str, Any]], name: str) -> float:
    measured = [batch for batch in batches if name in batch and f"{name}_dense" in batch]
    if not measured:
        return float("nan")
    return float(np.mean([b[name] for b in measured]) / np.mean([b[f"{name}_dense"] for b in measured]))
