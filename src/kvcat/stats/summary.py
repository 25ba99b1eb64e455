"""Tables from samples: figures with intervals, and paired comparisons of models."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from kvcat.errors import unknown_name
from kvcat.stats.intervals import (
    NO_ESTIMATE,
    Array,
    Draws,
    Estimate,
    seeds_p_value,
)
from kvcat.stats.records import Record
from kvcat.stats.samples import (
    METRICS,
    SIZES,
    Cell,
    Sample,
    columns_of,
    record_table,
    samples_by_cell,
)
from kvcat.stats.shares import share_difference
from kvcat.stats.significance import (
    holm,
    sign_flip_p_value,
    small_sample_warning,
    swap_p_value,
)

BASELINES = ("dense", "no-context", "truncated")
SIGNIFICANT = 0.05
SUMMARY = (*Cell._fields, "metric", "value", "low", "high", *SIZES, "baseline")
COMPARISON = (
    "model",
    "reference",
    *Cell._fields[1:],
    "metric",
    "difference",
    "low",
    "high",
    "ratio",
    "ratio_low",
    "ratio_high",
    "p",
    "p_holm",
    "verdict",
    *SIZES,
    "primary",
    "warning",
)


def summarise(records: Iterable[Record], *, num_resamples: int = 10_000) -> pd.DataFrame:
    """A table with the columns ``SUMMARY``: one row per cell and metric, with a 95 % interval.

    A cell is a model, a method with its options, a keep ratio, a step and a stratum. The step is
    missing for methods without steps. The stratum "" is all examples. Low and high are NaN if there
    is no interval. The column baseline marks scores without compression. Scores are averaged over
    the seeds of a compressor. Models called ``LABEL@SEED`` are training runs of one variant. The
    row of LABEL is their mean, and its interval covers runs and documents.

    Raises:
        InputError: the records are from two data sets, or one label has two sets of weights.
    """
    return summary_of(samples_by_cell(record_table(records), num_resamples))


def summary_of(samples: Mapping[Cell, Sample]) -> pd.DataFrame:
    """``summarise`` for samples by cell."""
    rows: list[dict[str, Any]] = []
    for cell, sample in samples.items():
        for metric in sample.metrics:
            estimate = sample.estimate(metric)
            rows.append(
                {
                    **cell._asdict(),
                    "metric": metric,
                    "value": estimate.value,
                    "low": estimate.low,
                    "high": estimate.high,
                    **sample.sizes,
                    "baseline": cell.method in BASELINES,
                }
            )
    return pd.DataFrame(rows, columns=list(SUMMARY)).astype({"step": "Int64"})


def compare_models(
    records: Iterable[Record],
    reference: str,
    *,
    primary: Mapping[str, Any] | None = None,
    num_resamples: int = 10_000,
) -> pd.DataFrame:
    """A table with the columns ``COMPARISON``: every other model against a reference.

    Two models are compared on the examples that both have. The difference is model minus reference.
    The ratio is model over reference, and NaN if it is not meaningful. p is that of the permutation
    test over documents (``swap_p_value``; if every score is right or wrong, its exact form
    ``sign_flip_p_value``). With several training runs it is at least the p of Student's t test over
    them. p_holm corrects for all rows with the same model, metric and level (all examples or
    strata), except the row of the primary cell. The corrected rows are exploratory.

    The verdict "better" or "worse" requires that the interval of the difference excludes 0, that of
    the ratio, if there is one, 1, and p <= 0.05; otherwise it is "level". The warning is set if the
    sample is too small for the observed difference. Metrics that are defined on different examples
    for different models are not compared.

    Args:
        records: records of one data set and at least two models.
        reference: label of a model, without ``@SEED``.
        primary: primary cell from the folder's configuration; its p is not corrected.

    Raises:
        InputError: the reference has no records; otherwise as in ``summarise``.
    """
    samples = samples_by_cell(record_table(records), num_resamples)
    return comparisons_with(samples, reference, primary)


def comparisons_with(
    samples: Mapping[Cell, Sample], reference: str, primary: Mapping[str, Any] | None = None
) -> pd.DataFrame:
    """``compare_models`` for samples by cell."""
    models = sorted({cell.model for cell in samples})
    if reference not in models:
        raise unknown_name("record of model", reference, models)
    rows: list[dict[str, Any]] = []
    for cell, sample in samples.items():
        other = samples.get(cell._replace(model=reference))
        if cell.model != reference and other is not None:
            common = sample.values.index.intersection(other.values.index)
            place = {**cell._asdict(), "reference": reference}
            compared = _comparisons(sample.on(common), other.on(common)) if len(common) else []
            rows += [{**place, **comparison} for comparison in compared]
    frame = pd.DataFrame(rows, columns=list(COMPARISON)).astype({"step": "Int64", "p_holm": float})
    frame["primary"] = _is_primary(frame, primary)
    _correct_p_values(frame)
    return frame


def comparison_pairs(models: Sequence[str]) -> list[tuple[str, str]]:
    """The pairs (model, reference) that a report compares.

    If models are called ``control`` or ``base``, every other model is compared with the control,
    then with the base, and then the control with the base. Otherwise every later model is compared
    with the first one.
    """
    references = [name for name in ("control", "base") if name in models]
    if not references:
        return [(model, models[0]) for model in models[1:]]
    variants = [model for model in models if model not in references]
    pairs = [(model, reference) for reference in references for model in variants]
    if len(references) == 2:
        pairs.append(("control", "base"))
    return pairs


def _comparisons(sample: Sample, other: Sample) -> list[dict[str, Any]]:
    """The comparisons of two samples with equal examples, by every metric that both define."""
    return [
        _comparison(sample, other, name)
        for name in sample.metrics
        if name in other.metrics
        and METRICS[name].comparable
        and sample.defines(name)
        and other.defines(name)
    ]


def _comparison(sample: Sample, other: Sample, name: str) -> dict[str, Any]:
    """The columns of a row of ``compare_models`` that depend on the metric."""
    metric = METRICS[name]
    several_runs = max(len(sample.runs), len(other.runs)) > 1
    change = None
    ratio = NO_ESTIMATE
    if several_runs or metric.ratio or not metric.share:
        draws = sample.draws(name)
        other_draws = other.draws(name)
        change = draws - other_draws
        if metric.ratio:
            ratio = sample.bootstrap.estimate(draws / other_draws)
        if metric.log_scale:  # never negative, so neither is the ratio; NaN stays NaN
            ratio = replace(ratio, low=float(np.maximum(ratio.low, 0.0)))
    if metric.share and not several_runs:
        change = None  # an interval for shares needs no resamples
    difference, p_value = _difference(sample, other, name, change)
    significant = difference.excludes(0.0) and p_value <= SIGNIFICANT
    if not np.isnan(ratio.low):
        significant = significant and ratio.excludes(1.0)
    improved = (difference.value < 0.0) == metric.lower_is_better
    verdict = "better" if improved else "worse"
    warning = ""
    if metric.share:
        warning = small_sample_warning(*_scores(sample, other, name), sample.documents)
    return {
        "metric": name,
        "difference": difference.value,
        "low": difference.low,
        "high": difference.high,
        "ratio": ratio.value,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "p": p_value,
        "verdict": verdict if significant else "level",
        **sample.sizes,
        "warning": warning,
    }


def _difference(
    sample: Sample, other: Sample, name: str, change: Draws | None
) -> tuple[Estimate, float]:
    """The difference of a metric and its p-value.

    ``change`` is the difference in every resample; None for a share of single training runs, whose
    interval needs no resamples.
    """
    metric = METRICS[name]
    difference = NO_ESTIMATE
    p_value = np.nan
    if change is not None:
        difference = sample.bootstrap.estimate(change)
        p_value = max(_swap_p_value(sample, other, name), seeds_p_value(change))
    if not metric.share:
        return difference, p_value
    score, other_score = _scores(sample, other, name)
    of_shares = share_difference(score, other_score, sample.documents)
    if set(np.unique([score, other_score])) <= {0.0, 1.0}:
        share_p = sign_flip_p_value(score, other_score, sample.documents)
    else:
        share_p = _swap_p_value(sample, other, name)
    if change is not None:  # the interval of shares does not cover variation between training runs
        return difference.union(of_shares), float(np.fmax(p_value, share_p))
    return of_shares, share_p


def _swap_p_value(sample: Sample, other: Sample, name: str) -> float:
    """The permutation p-value of a metric, on the means over training runs."""
    columns = columns_of(name)
    return swap_p_value(
        METRICS[name].function,
        [sample.columns[column].mean(axis=0) for column in columns],
        [other.columns[column].mean(axis=0) for column in columns],
        sample.documents,
        num_swaps=sample.num_resamples,
    )


def _scores(sample: Sample, other: Sample, name: str) -> tuple[Array, Array]:
    """The scores of each example in both samples, averaged over training runs."""
    return sample.columns[name].mean(axis=0), other.columns[name].mean(axis=0)


def _is_primary(frame: pd.DataFrame, primary: Mapping[str, Any] | None) -> pd.Series:
    """A mask of the rows of the primary cell: all examples, last step."""
    if primary is None or frame.empty:
        return pd.Series(False, index=frame.index)
    in_cell = frame["stratum"] == ""
    in_cell &= frame["method"] == primary["method"]
    in_cell &= frame["metric"] == primary["metric"]
    in_cell &= np.isclose(frame["keep_ratio"], primary["keep_ratio"])
    last_step = frame[in_cell]["step"].max()
    if pd.isna(last_step):
        return in_cell & frame["step"].isna()
    return in_cell & frame["step"].eq(last_step).fillna(False)


def _correct_p_values(frame: pd.DataFrame) -> None:
    """Set ``p_holm`` in the exploratory rows."""
    baseline = frame["method"].isin(BASELINES)
    in_tables = ~baseline | baseline.all()  # the tables of methods do not show baselines
    tested = frame[in_tables & ~frame["primary"]]
    all_examples = tested["stratum"] == ""
    for (_, metric, _), rows in tested.groupby(["model", "metric", all_examples], sort=False):
        if METRICS[str(metric)].of_dense_model:
            # the same p-values for every method: one test of the dense model for each stratum
            tests = rows[["stratum", "p"]].drop_duplicates()
            tests = tests.assign(p_holm=holm(tests["p"].to_numpy(float)))
            corrected = rows[["stratum", "p"]].merge(tests, how="left")
            frame.loc[rows.index, "p_holm"] = corrected["p_holm"].to_numpy()
        else:
            frame.loc[rows.index, "p_holm"] = holm(rows["p"].to_numpy(float))
