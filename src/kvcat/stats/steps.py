"""Gradient steps that a model's compact caches need to be as good as those of another model."""

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce

import numpy as np
import pandas as pd
from jaxtyping import Float

from kvcat.stats.intervals import LEVEL, Array
from kvcat.stats.metrics import METRICS
from kvcat.stats.samples import Cell, Sample

STEPS = (
    "model",
    "reference",
    "method",
    "keep_ratio",
    "metric",
    "steps",
    "steps_low",
    "steps_high",
    "fewer",
    "fewer_low",
    "fewer_high",
    "num_examples",
    "num_documents",
)
_FEWEST_DOCUMENTS = 2


def steps_to_level(
    samples: Mapping[Cell, Sample], pairs: Iterable[tuple[str, str]], metrics: Sequence[str]
) -> pd.DataFrame:
    """A table with the columns ``STEPS``: one row per pair of models, method, keep ratio and
    metric.

    The level is the reference's figure after its last step S, on the examples of both models.
    ``steps`` is where the model's curve first reaches it, linear between the recorded steps; since
    curves flatten, this is late rather than early. It is infinite if no recorded step reaches the
    level. ``fewer`` is the step at which the reference first reaches the level (S, if its curve
    falls throughout), divided by ``steps``. Low and high are the quantiles of a paired bootstrap
    over documents; NaN for a single document. They do not cover variation between training runs.

    References: KV-CAT, section "Experiments", Q2: "requiring up to 5x fewer optimization steps to
        match the base model's performance".
    """
    curves: dict[tuple[str, str, float], dict[int, Sample]] = {}
    for cell, sample in samples.items():
        if cell.step is not None and cell.stratum == "":
            curve = curves.setdefault((cell.model, cell.method, cell.keep_ratio), {})
            curve[cell.step] = sample
    rows = []
    for model, reference in pairs:
        for (owner, method, keep_ratio), curve in curves.items():
            other = curves.get((reference, method, keep_ratio), {})
            steps = sorted(curve.keys() & other.keys())
            if owner != model or len(steps) < 2:
                continue
            place = {"model": model, "reference": reference}
            place |= {"method": method, "keep_ratio": keep_ratio}
            ours = [curve[step] for step in steps]
            theirs = [other[step] for step in steps]
            rows += [{**place, **row} for row in _rows(steps, ours, theirs, metrics)]
    return pd.DataFrame(rows, columns=list(STEPS))


def _rows(
    steps: Sequence[int], ours: list[Sample], theirs: list[Sample], metrics: Sequence[str]
) -> list[dict[str, object]]:
    """The rows of two curves with the same steps, one for each metric that both define."""
    common = reduce(pd.Index.intersection, (sample.values.index for sample in ours + theirs))
    if not len(common):
        return []
    ours = [sample.on(common) for sample in ours]
    theirs = [sample.on(common) for sample in theirs]
    rows: list[dict[str, object]] = []
    for name in metrics:
        if not all(name in sample.metrics for sample in ours + theirs):
            continue
        sign = 1.0 if METRICS[name].lower_is_better else -1.0
        curve = sign * np.stack([sample.draws(name).values for sample in ours])
        reference = sign * np.stack([sample.draws(name).values for sample in theirs])
        level = reference[-1]
        if np.isnan(curve[:, 0]).any() or np.isnan(level[0]):
            continue
        reached = first_step_at(steps, curve, level)
        with np.errstate(divide="ignore", invalid="ignore"):
            fewer = first_step_at(steps, reference, level) / reached
        row: dict[str, object] = {"metric": name, **ours[0].sizes}
        for column, draws in (("steps", reached), ("fewer", fewer)):
            row[column] = draws[0]
            row[f"{column}_low"], row[f"{column}_high"] = _quantiles(draws, ours[0])
        rows.append(row)
    return rows


def first_step_at(
    steps: Sequence[int], curves: Float[Array, "steps draws"], level: Float[Array, " draws"]
) -> Float[Array, " draws"]:
    """The first step at which each curve is at its level or below, linear between the steps;
    infinite if it never is.
    """
    numbers = np.asarray(steps, dtype=float)
    is_there = curves <= level
    after = is_there.argmax(0)  # 0 as well where no step is there, which the last line mends
    before = np.maximum(after - 1, 0)
    draws = np.arange(len(level))
    height_before = curves[before, draws] - level
    drop = curves[before, draws] - curves[after, draws]
    with np.errstate(divide="ignore", invalid="ignore"):
        fraction = np.where(after > before, height_before / drop, 0.0)
    place = numbers[before] + fraction * (numbers[after] - numbers[before])
    return np.where(is_there.any(0), place, np.inf)


def _quantiles(draws: Float[Array, " draws"], sample: Sample) -> tuple[float, float]:
    """The ends of the 95 % interval; draws may be infinite, so none are interpolated."""
    if sample.bootstrap.num_documents < _FEWEST_DOCUMENTS:
        return np.nan, np.nan
    tail = (1.0 - LEVEL) / 2.0
    low = np.quantile(draws[1:], tail, method="lower")
    high = np.quantile(draws[1:], 1.0 - tail, method="higher")
    return float(low), float(high)
