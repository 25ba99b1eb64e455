"""The experiment's figures over seeds, and those of the two constructions on the same prefixes."""

import dataclasses
import math
from collections.abc import Sequence

from scipy import stats

from kvcat.recipes.histogram import HistogramConfig
from kvcat.recipes.histogram_runs import HistogramExperiment, Row

LEVEL = 0.95


def mean_interval(values: Sequence[float], *, level: float = LEVEL) -> tuple[float, float, float]:
    """Mean and the ends of Student's t interval; NaN ends for a single value.

    Args:
        values: independent, at least one.
        level: of the interval, in (0, 1).
    """
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, math.nan, math.nan
    half = float(stats.t.ppf(0.5 + level / 2, len(values) - 1) * stats.sem(values))
    return mean, mean - half, mean + half


def summarise_histogram(experiment: HistogramExperiment, rows: Sequence[Row]) -> list[Row]:
    """One row for every variant and number of slots, means and 95 % t intervals over seeds.

    Columns: model, num_slots, num_seeds; max_error, mean_error and task_max, each with ``_low`` and ``_high``; ratio,
    ratio_low, ratio_high: the geometric mean over seeds of mean_error by that of the network trained the usual way from
    the same weights on the same data, NaN where there is none. (mean_error varies less from seed to seed than
    max_error.)

    Args:
        experiment: that the rows are of.
        rows: by ``run_histogram_experiment``.
    """
    table: list[Row] = []
    by_key = {(row["model"], row["num_slots"], row["seed"]): row for row in rows}
    for name, config in experiment.variants.items():
        reference = _reference(experiment, config)
        for num_slots in experiment.budgets:
            mine = [by_key[key] for seed in experiment.seeds if (key := (name, num_slots, seed)) in by_key]
            if not mine:
                continue
            out: Row = {"model": name, "num_slots": num_slots, "num_seeds": len(mine)}
            for column in ("max_error", "mean_error", "task_max"):
                ends = mean_interval([row[column] for row in mine])
                out |= dict(zip((column, f"{column}_low", f"{column}_high"), ends, strict=True))
            logs = [
                math.log(row["mean_error"] / other["mean_error"])
                for row in mine
                if (other := by_key.get((reference, num_slots, row["seed"]))) is not None
                and min(row["mean_error"], other["mean_error"]) > 0
            ]
            ratio = [math.exp(v) for v in mean_interval(logs)] if logs and reference != name else [math.nan] * 3
            table.append(out | dict(zip(("ratio", "ratio_low", "ratio_high"), ratio, strict=True)))
    return table


def _reference(experiment: HistogramExperiment, config: HistogramConfig) -> str | None:
    """The variant trained the usual way that differs from a configuration in nothing but the masked objective."""
    plain = HistogramConfig()
    objective = ("masking", "target_keep", "mask_weight", "budget_weight", "group_starts")

    def stripped(c: HistogramConfig) -> HistogramConfig:
        return dataclasses.replace(c, method="usual", **{name: getattr(plain, name) for name in objective})

    for name, other in experiment.variants.items():
        if other.method == "usual" and stripped(other) == stripped(config):
            return name
    return None
