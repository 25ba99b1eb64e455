"""Records to tables: figures with intervals, paired comparisons of models, and which models cannot do the task."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from kvcat.errors import InputError
from kvcat.evals import statistics as st
from kvcat.evals.records import Record, models_of
from kvcat.evals.statistics import METRICS, ClusterBootstrap, Draws, Estimate

BASELINES = ("dense", "no-context", "truncated")
CELL = ("model", "method", "keep_ratio", "step", "stratum")
SIZES = ("num_examples", "num_documents", "num_seeds")
SUMMARY = (*CELL, "metric", "value", "low", "high", *SIZES, "baseline")
COMPARISON = (
    "model", "reference", *CELL[1:], "metric", "difference", "low", "high", "ratio", "ratio_low", "ratio_high", "p",
    "p_holm", "verdict", *SIZES, "primary", "warning",
)  # fmt: skip
FEWEST = 20  # documents below which no share of right answers shows that a model can do a task
SCORES = ("accuracy", "exact_match", "string_match", "acc_per_char")
# one over the number of choices where it is not four
_QA_CHANCE = {"winogrande": 1 / 2, "piqa": 1 / 2, "social_i_qa": 1 / 3, "commonsense_qa": 1 / 5}
_NONE = Estimate(np.nan)


def summarise(records: Iterable[Record], *, num_resamples: int = 10_000) -> pd.DataFrame:
    """One row per model, method, keep ratio, step, stratum and metric, with a 95 % interval: columns ``SUMMARY``.

    The method is with its options, the step missing where a method has none, stratum "" all examples, low and high
    NaN where there is no interval, baseline a score without compression. Several seeds of a compressor count as their
    mean. Models called ``LABEL@SEED`` are training runs of one variant: the row of LABEL is their mean, and its
    interval resamples runs and documents.

    Raises:
        InputError: records of two data sets; one label for two sets of weights.
    """
    rows: list[dict[str, Any]] = []
    for cell, sample in _samples(records, num_resamples).items():
        named, baseline = dict(zip(CELL, cell, strict=True)), {"baseline": cell[1] in BASELINES}
        rows += [
            named | {"metric": metric} | vars(sample.estimate(metric)) | sample.sizes | baseline
            for metric in sample.metrics
        ]
    return pd.DataFrame(rows, columns=list(SUMMARY)).astype({"step": "Int64"})


def compare_models(
    records: Iterable[Record], reference: str, *, primary: Mapping[str, Any] | None = None, num_resamples: int = 10_000
) -> pd.DataFrame:
    """Every other model against a reference, on the examples that both have: columns ``COMPARISON``.

    The difference is model minus reference, the ratio model over reference (NaN where it means nothing).
    p is the bootstrap's; for shares it is the larger of Agresti and Min's and, where every score is right or
    wrong, McNemar's exact p. p_holm corrects over all rows of one model, metric and level (all examples or
    strata) but the primary one; those rows are exploratory. A verdict "better" or "worse" needs an interval
    without 0, and of right or wrong answers p <= 0.05 as well; else it is "level". The warning says what so
    few examples cannot tell. Shares over the examples that a model answers with its whole cache are not
    compared: these examples differ by model.

    Args:
        records: of one data set and at least two models.
        reference: label of a model, without ``@SEED``.
        primary: of the folder's configuration; the p of this cell is not corrected.
        num_resamples: of the bootstrap.

    Raises:
        InputError: no records of the reference; otherwise as ``summarise``.
    """
    samples = _samples(records, num_resamples)
    if reference not in (labels := {cell[0] for cell in samples}):
        raise InputError(f"no records of model {reference!r}; there are {', '.join(sorted(labels))}")
    rows: list[dict[str, Any]] = []
    for cell, ours in samples.items():
        theirs = samples.get((reference, *cell[1:]))
        if cell[0] == reference or theirs is None:
            continue
        common = ours.values.index.intersection(theirs.values.index)
        if len(common):
            ours, theirs = (replace(sample, values=sample.values.loc[common]) for sample in (ours, theirs))
            named = dict(zip(CELL, cell, strict=True)) | {"reference": reference}
            names = [name for name in ours.metrics if name in theirs.metrics and name != "native_exact_match"]
            if any("retention" in s.metrics and np.isnan(s.estimate("retention").value) for s in (ours, theirs)):
                names = [name for name in names if name != "retention"]
            rows += [named | _compared(ours, theirs, name) for name in names]
    frame = pd.DataFrame(rows, columns=list(COMPARISON)).astype({"step": "Int64", "p_holm": float})
    frame["primary"] = _is_primary(frame, primary)
    baseline = frame["method"].isin(BASELINES)
    tested = frame[~frame["primary"] & (baseline.all() | ~baseline)]  # baselines do not stand in the tables of others
    for (_, metric, _), group in tested.groupby(["model", "metric", tested["stratum"] == ""], sort=False):
        # what the dense model does is one test, though it stands beside every method and keep ratio
        once = "dense" in metric or metric == "context_gain"
        tests = group.drop_duplicates(["stratum", "p"]) if once else group
        tests = tests.assign(p_holm=st.holm(tests["p"].to_numpy(float)))[["stratum", "p", "p_holm"]]
        found = group[["stratum", "p"]].merge(tests, how="left") if once else tests
        frame.loc[group.index, "p_holm"] = found["p_holm"].to_numpy()
    return frame


def comparison_pairs(models: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs (model, reference) worth a comparison.

    With models called ``control`` or ``base``: every other model against the control, then against the
    base, then the control against the base. Otherwise every later model against the first.
    """
    references = [name for name in ("control", "base") if name in models]
    if not references:
        return [(model, models[0]) for model in models[1:]]
    pairs = [(model, reference) for reference in references for model in models if model not in references]
    return pairs + [("control", "base")] * (len(references) == 2)


def plumbing(records: Iterable[Record]) -> dict[str, str]:
    """Models that do not show that they can do the task, with the reason: their figures are plumbing, no results.

    A model can do it where, with the whole cache and no compression, the 95 % interval of its score lies
    above chance on at least ``FEWEST`` documents; in text prediction, where the interval of its context
    gain lies above 0: a model that does not use its prefix has nothing to lose.
    """
    models = _rows(records).groupby("label", sort=False)
    reasons = {str(label): _inability(own.dropna(axis=1, how="all")) for label, own in models}
    return {label: reason for label, reason in reasons.items() if reason}


def _inability(rows: pd.DataFrame) -> str:
    """Why the rows of a model do not show that it can do the task; empty where they do."""
    name = next((name for name in SCORES if name in rows), None)
    if name is None:
        own = rows.drop_duplicates(_EXAMPLE, keep="last")
        gain = ClusterBootstrap(own["document"].to_numpy(dtype=str)).mean(own["context_gain"].to_numpy())
        interval = "" if np.isnan(gain.low) else f" [{gain.low:.3g}, {gain.high:.3g}]"
        return "" if gain.low > 0.0 else f"context gain {gain.value:.3g}{interval} nats/token is not clearly above 0"
    dense = f"dense_{name}" if f"dense_{name}" in rows else name
    own = (rows if dense != name else rows[rows["method"] == "dense"]).drop_duplicates(_EXAMPLE, keep="last")
    count = own["document"].nunique()
    if count < FEWEST:
        return f"{count} documents with a dense score, fewer than {FEWEST}"
    guessed = name in ("accuracy", "acc_per_char")  # answers written freely are not
    chance = rows["group"].map(lambda task: _QA_CHANCE.get(task, 0.25)).mean() if guessed else 0.0
    found = st.share(own[dense].to_numpy(), own["document"].to_numpy(dtype=str))
    interval = f"{found.value:.1%} [{found.low:.1%}, {found.high:.1%}] on {count} documents"
    return "" if found.low > chance else f"dense {METRICS[name].label} {interval} is not above chance, {chance:.0%}"


_EXAMPLE = ["document", "example"]
_PLACE = ["label", "model", "run", "method", "keep_ratio", "step", "group", *_EXAMPLE]
_PRODUCTS = {
    "lost": ("delta_nll", "num_tokens"), "gained": ("context_gain", "num_predicted"),
    "native_match": ("exact_match", "dense_exact_match"),
}  # fmt: skip


def _rows(records: Iterable[Record]) -> pd.DataFrame:
    """A row per record: ``_PLACE`` (``group`` is its stratum, step -1 where there is none), and a column per value.

    Raises:
        InputError: records of two data sets; one label for two sets of weights.
    """
    known = list(records)
    models_of(known)
    if len(datasets := sorted({record.dataset for record in known})) > 1:
        raise InputError(f"records of two data sets: {datasets[0]!r} and {datasets[1]!r}")
    places = [
        (r.model, *r.model.partition("@")[::2], r.method_label, r.keep_ratio, -1 if r.step is None else r.step,
         r.stratum, r.document, r.example) for r in known
    ]  # fmt: skip
    rows = pd.DataFrame(places, columns=_PLACE).join(pd.DataFrame([record.values for record in known]))
    for name, (first, second) in _PRODUCTS.items():
        if {first, second} <= set(rows):
            rows[name] = rows[first] * rows[second]
    return rows


@dataclass(frozen=True)
class _Sample:
    """One model's values in a cell, examples by value and training seed; a compressor's seeds are averaged."""

    values: pd.DataFrame  # index (document, example), columns (value, run)
    strata: pd.Series  # of each example
    num_resamples: int

    @cached_property
    def documents(self) -> np.ndarray:
        return self.values.index.get_level_values("document").to_numpy(dtype=str)

    @cached_property
    def runs(self) -> list[str]:
        return list(self.values.columns.unique("run"))

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(SIZES, (len(self.values), self.bootstrap.num_documents, len(self.runs)), strict=True))

    @cached_property
    def bootstrap(self) -> ClusterBootstrap:
        strata = list(self.strata[self.values.index])
        return ClusterBootstrap(self.documents, strata=strata, seeds=self.runs, num_resamples=self.num_resamples)

    @cached_property
    def columns(self) -> dict[str, np.ndarray]:
        """Every value that all records have: seeds by examples."""
        return {name: self.values.xs(name, axis=1, level=0).to_numpy().T for name in self.values.columns.unique(0)}

    @property
    def metrics(self) -> list[str]:
        return [name for name, metric in METRICS.items() if {*(metric.columns or [name])} <= self.columns.keys()]

    def draws(self, name: str) -> Draws:
        """The figure on all examples and on every resample."""
        metric = METRICS[name]
        values = [self.columns[own] for own in metric.columns or [name]]
        if metric.function is None:
            return self.bootstrap.median(*values)
        return self.bootstrap.of_means(metric.function, *values)

    def estimate(self, name: str) -> Estimate:
        metric = METRICS[name]
        drawn = self.bootstrap.estimate(self.draws(name))
        if name == "retention" and not (gain := self.bootstrap.mean(self.columns["gained"])).low > 0.0 < gain.value:
            return _NONE
        if not metric.share:
            return drawn
        score, *others = (self.columns[column].mean(0) for column in metric.columns or [name])
        counted = others[0] > 0 if others else np.full(len(score), True)
        if not counted.any():
            return _NONE
        own = st.share(score[counted] / (others[0][counted] if others else 1.0), self.documents[counted])
        return drawn.union(own) if len(self.runs) > 1 else own  # Wilson's interval does not know of training seeds


def _samples(records: Iterable[Record], num_resamples: int) -> dict[tuple[Any, ...], _Sample]:
    """A sample per ``CELL``, in the order of tables: strata after all examples, models and methods as they come."""
    rows, samples = _rows(records), {}
    strata = list(rows["group"].unique())
    for place in ("model", "method"):
        rows[place] = pd.Categorical(rows[place], rows[place].unique())
    groups = rows.drop_duplicates(_EXAMPLE).set_index(_EXAMPLE)["group"]
    for stratum in ["", *(name for name in strata if name and len(strata) > 1)]:
        part = rows[rows["group"] == stratum] if stratum else rows
        for (model, method, keep_ratio, step), own in part.groupby(list(CELL[:4]), observed=True):
            own = own.dropna(axis=1)
            names = [name for name in own if name not in _PLACE]
            # examples that some training run lacks are left out
            values = own.groupby([*_EXAMPLE, "run"])[names].mean().unstack("run").dropna()
            cell = (model, method, keep_ratio, None if step < 0 else step, stratum)
            samples[cell] = _Sample(values, groups, num_resamples)
    return samples


def _compared(ours: _Sample, theirs: _Sample, name: str) -> dict[str, Any]:
    """A metric's part of a row of ``compare_models``."""
    metric, bootstrap, warning = METRICS[name], ours.bootstrap, ""
    mine, other = ours.draws(name), theirs.draws(name)
    difference, p = bootstrap.estimate(mine - other), bootstrap.p_value(mine - other)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = bootstrap.estimate(mine / other) if metric.ratio else _NONE
    if metric.share:
        first, second = ours.columns[name].mean(0), theirs.columns[name].mean(0)
        wide, p_share = st.share_difference(first, second, ours.documents)
        several = max(len(ours.runs), len(theirs.runs)) > 1
        difference, p = (difference.union(wide), float(np.fmax(p, p_share))) if several else (wide, p_share)
        if set(np.unique([first, second])) <= {0.0, 1.0}:
            p = max(p, st.mcnemar(first, second))
        warning = st.cannot_tell(first, second, ours.documents)
    decided = difference.excludes(0.0) and not (metric.share and p > 0.05)
    better = (difference.value < 0.0) == metric.lower_is_better
    return {
        "metric": name, "difference": difference.value, "low": difference.low, "high": difference.high,
        "ratio": ratio.value, "ratio_low": ratio.low, "ratio_high": ratio.high, "p": p,
        "verdict": ("better" if better else "worse") if decided else "level", **ours.sizes, "warning": warning,
    }  # fmt: skip


def _is_primary(frame: pd.DataFrame, primary: Mapping[str, Any] | None) -> pd.Series:
    """The rows of the primary cell: all examples, the last step."""
    if primary is None or frame.empty:
        return pd.Series(False, index=frame.index)
    found = (frame["stratum"] == "") & frame["method"].eq(primary["method"])
    found &= frame["metric"].eq(primary["metric"]) & np.isclose(frame["keep_ratio"], primary["keep_ratio"])
    last = frame[found]["step"].max()
    return found & (frame["step"].isna() if pd.isna(last) else frame["step"].eq(last).fillna(False))
