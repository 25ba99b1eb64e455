"""Records of a compressibility profile to tables: the best cache found, every method, and the slots that suffice."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from kvcat.errors import InputError
from kvcat.evals.profile import KINDS, MEASURES
from kvcat.evals.records import Record
from kvcat.evals.statistics import ClusterBootstrap, Estimate
from kvcat.evals.task import Values

BEST, ALL = "best", "all"
STATISTICS = ("mean", "worst")
COLUMNS = (
    "model", "kind", "num_slots", "method", "measure", "mean", "low", "high", "worst", "ratio", "ratio_low",
    "ratio_high", "fit_mean", "num_prefixes", "num_outputs", "chosen",
)  # fmt: skip
_Prefix = tuple[str, str]  # document and name
_Cache = tuple[int, str]  # slots and label of a method
_Figures = dict[_Prefix, dict[_Cache, Values]]
_NONE = Estimate(np.nan)


def profile_table(
    records: Iterable[Record], *, measures: Sequence[str] = tuple(MEASURES), num_resamples: int = 10_000, seed: int = 0
) -> pd.DataFrame:
    """One row per measure, model, method, number of slots and kind of suffix.

    Columns: model; kind, of the held-out suffixes, or "all": the mean over the kinds' means, the worst of all;
    num_slots, r(n); method, a label or "best": for every prefix the cache of at most so many slots, no
    cache among them, whose error on the suffixes for the choice is smallest, by their mean for the mean
    and by their worst for the worst; measure; mean over outputs, then prefixes, with low and high, which
    resample documents; worst over outputs and prefixes; ratio of the mean to the first model's on the
    same prefixes with its interval (NaN for the first model); fit_mean, the mean on the suffixes that
    caches were fitted to; num_prefixes that have held-out outputs of the kind; num_outputs; chosen, of
    "best" by the mean: methods with their slots and for how many prefixes each was chosen.

    Args:
        records: of a ``ProfileTask``, complete for every model.
        measures: names in ``MEASURES``.
        num_resamples: of the bootstrap.
        seed: of the bootstrap.

    Raises:
        InputError: no records, or models with other prefixes or caches than the first: the run did not end.
    """
    models: dict[str, _Figures] = {}
    for record in records:
        cache = int(record.values["num_slots"]), record.method_label
        models.setdefault(record.model, {}).setdefault((record.document, record.example), {})[cache] = record.values
    if not models:
        raise InputError("no records: nothing was profiled")
    first = next(iter(models))
    caches = list(dict.fromkeys(cache for own in models[first].values() for cache in own))
    for model, figures in models.items():
        if any(set(own) != set(caches) for own in figures.values()) or figures.keys() != models[first].keys():
            raise InputError(f"model {model!r} and the first one have records of different caches: the run did not end")
    values = next(iter(models[first].values()))[caches[0]]
    kinds = [kind for kind in KINDS if f"{kind}_num_outputs" in values]
    labels = list(dict.fromkeys(label for _, label in caches))
    points = [(BEST, slots) for slots in sorted({slots for slots, _ in caches})]
    points += [(label, slots) for label in labels for slots, own in sorted(caches) if own == label]
    rows: list[dict[str, Any]] = []
    for measure in measures:
        means: dict[tuple[str, str, int], dict[_Prefix, float]] = {}
        for model, figures in models.items():
            for method, slots in points:
                chosen = {
                    statistic: {p: _chosen(own, kinds, slots, method, measure, statistic) for p, own in figures.items()}
                    for statistic in STATISTICS
                }
                for kind in [*kinds, ALL]:
                    among = kinds if kind == ALL else [kind]
                    row = _row(figures, chosen, among, measure)
                    own = row.pop("means")
                    other = means.setdefault((kind, method, slots), own)
                    mean, ratio = _intervals(own, other if model != first else None, num_resamples, seed)
                    picked = Counter(chosen["mean"].values()) if method == BEST else Counter()
                    rows.append({
                        "model": model, "kind": kind, "num_slots": slots, "method": method, "measure": measure,
                        "mean": mean.value, "low": mean.low, "high": mean.high, **row, "ratio": ratio.value,
                        "ratio_low": ratio.low, "ratio_high": ratio.high, "chosen": _told(picked),
                    })  # fmt: skip
    return pd.DataFrame(rows, columns=list(COLUMNS))


def slots_needed(table: pd.DataFrame, epsilons: Sequence[float], *, measure: str = "kl") -> pd.DataFrame:
    """For every model, kind, statistic and epsilon the fewest slots tried whose best cache has an error below it.

    Columns: model, kind, statistic ("mean" or "worst"), epsilon, num_slots (missing where none suffices).

    Args:
        table: of ``profile_table``.
        epsilons: errors, larger than 0, in the measure's unit.
        measure: a name in ``MEASURES``.

    Raises:
        InputError: an epsilon that is not larger than 0.
    """
    for epsilon in epsilons:
        if not epsilon > 0:
            raise InputError(f"epsilon is {epsilon:g}; it must be larger than 0")
    best = table[(table["method"] == BEST) & (table["measure"] == measure)]
    rows = [
        (model, kind, statistic, epsilon, curve["num_slots"][curve[statistic] < epsilon].min())
        for (model, kind), curve in best.groupby(["model", "kind"], sort=False)
        for statistic in STATISTICS
        for epsilon in epsilons
    ]
    columns = ["model", "kind", "statistic", "epsilon", "num_slots"]
    return pd.DataFrame(rows, columns=columns).astype({"num_slots": "Int64"})


def profile_markdown(table: pd.DataFrame, epsilons: Sequence[float], *, measure: str = "kl") -> str:
    """Tables of the best caches, of every method, and of the slots needed, in one measure.

    Args:
        table: of ``profile_table``.
        epsilons: as in ``slots_needed``.
        measure: a name in ``MEASURES``.
    """
    own = table[table["measure"] == measure]
    best = own[own["method"] == BEST].assign(error=lambda rows: _error(rows))
    kinds = [ALL, *(kind for kind in KINDS if kind in set(own["kind"]))]
    wide = best.pivot_table(index=["model", "num_slots"], columns="kind", values="error", aggfunc="first", sort=False)
    every = best[best["kind"] == ALL].set_index(["model", "num_slots"])
    wide = wide[kinds].assign(**{"mean to the first model's": _ratio(every), "chosen by the mean": every["chosen"]})
    methods = own[(own["method"] != BEST) & (own["kind"] == ALL)].assign(error=lambda rows: _error(rows))
    methods = methods[["model", "method", "num_slots", "error", "fit_mean"]]
    needed = slots_needed(table, epsilons, measure=measure).astype({"num_slots": "string"}).fillna("-")
    needed = needed.groupby(["model", "epsilon", "kind"], sort=False)["num_slots"].agg(" / ".join).unstack()[kinds]
    outputs = ", ".join(
        f"{n} {kind}" for kind, n in best.drop_duplicates("kind").set_index("kind")["num_outputs"].items()
    )
    legend = "\n".join(f"- {kind}: {KINDS[kind]}" for kind in kinds if kind != ALL)
    wide = wide.rename_axis(["label", "slots"]).reset_index()
    needed = needed.rename_axis(["label", "epsilon"]).reset_index()
    return (
        f"Error: {MEASURES[measure]}. Mean / worst over {best['num_prefixes'].max()} prefixes and held-out outputs: "
        f"{outputs}. Each is of the cache that the suffixes for the choice favour by it. The worst is a lower bound "
        f"on the maximum over all suffixes.\n\n{legend}\n\n### Best cache found\n\n{_markdown(wide)}\n"
        f"### Every method, all kinds\n\n{_markdown(methods.rename(columns={'fit_mean': 'mean where fitted'}))}\n"
        "### Fewest slots tried with an error below epsilon, by mean / worst\n\n"
        f"{_markdown(needed)}"
    )


def _of(values: Values, kinds: Sequence[str], name: str, statistic: str) -> float:
    """A figure over kinds: the mean of their means, or the worst of all; NaN where no kind has it."""
    tail = "_worst" if statistic == "worst" else ""
    found = [values[f"{kind}_{name}{tail}"] for kind in kinds if f"{kind}_{name}{tail}" in values]
    if not found:
        return np.nan
    return float(np.mean(found)) if statistic == "mean" else max(found)


def _chosen(
    caches: Mapping[_Cache, Values], kinds: Sequence[str], slots: int, method: str, measure: str, statistic: str
) -> _Cache:
    """The cache that stands for a method: itself, or the best by the suffixes for the choice."""
    if method != BEST:
        return slots, method
    able = [cache for cache in caches if cache[0] <= slots]
    return min(able, key=lambda cache: (_of(caches[cache], kinds, f"choice_{measure}", statistic), cache[0]))


def _row(
    figures: _Figures, chosen: Mapping[str, Mapping[_Prefix, _Cache]], kinds: Sequence[str], measure: str
) -> dict[str, Any]:
    """Everything but the intervals; ``means`` is by prefix."""
    means, worsts, fits, outputs = {}, [], [], 0.0
    for prefix in sorted(figures):
        values = figures[prefix][chosen["mean"][prefix]]
        mean = _of(values, kinds, measure, "mean")
        outputs += sum(values[f"{kind}_num_outputs"] for kind in kinds)
        fits.append(_of(values, kinds, f"fit_{measure}", "mean"))
        if not np.isnan(mean):
            means[prefix] = mean
            worsts.append(_of(figures[prefix][chosen["worst"][prefix]], kinds, measure, "worst"))
    fitted = [fit for fit in fits if not np.isnan(fit)]
    return {
        "means": means, "worst": max(worsts, default=np.nan), "num_prefixes": len(means), "num_outputs": int(outputs),
        "fit_mean": float(np.mean(fitted)) if fitted else np.nan,
    }  # fmt: skip


def _intervals(
    own: Mapping[_Prefix, float], first: Mapping[_Prefix, float] | None, num_resamples: int, seed: int
) -> tuple[Estimate, Estimate]:
    """Mean over prefixes, and its ratio to the first model's."""
    if not own:
        return _NONE, _NONE
    means = np.array(list(own.values()))
    if not np.isfinite(means).all():
        return Estimate(float(means.mean()), np.nan, np.nan), _NONE
    bootstrap = ClusterBootstrap([document for document, _ in own], num_resamples=num_resamples, seed=seed)
    ratio = _NONE
    if first is not None and first.keys() == own.keys() and np.isfinite(other := np.array(list(first.values()))).all():
        ratio = bootstrap.estimate(bootstrap.of_means(np.divide, means, other))
    return bootstrap.mean(means), ratio


def _told(counts: Counter[_Cache]) -> str:
    """Methods with their slots, the most frequent first."""
    order = sorted(counts.items(), key=lambda item: (-item[1], item[0][1], item[0][0]))
    return ", ".join(f"{f'{n} x ' * (len(counts) > 1)}{label} at {slots}" for (slots, label), n in order)


def _error(rows: pd.DataFrame) -> list[str]:
    pairs = zip(rows["mean"], rows["worst"], strict=True)
    return ["" if np.isnan(mean) else f"{mean:.3g} / {worst:.3g}" for mean, worst in pairs]


def _ratio(rows: pd.DataFrame) -> pd.Series:
    intervals = zip(rows["ratio"], rows["ratio_low"], rows["ratio_high"], strict=True)
    texts = [
        "" if np.isnan(r) else f"{r:.2f}" + ("" if np.isnan(a) else f" ({a:.2f} to {b:.2f})") for r, a, b in intervals
    ]
    return pd.Series(texts, index=rows.index)


def _markdown(table: pd.DataFrame) -> str:
    lines = [[str(c) for c in table.columns], ["---"] * len(table.columns)]
    lines += [
        [
            "" if cell is None or cell != cell else f"{cell:.3g}" if isinstance(cell, float) else str(cell)
            for cell in row
        ]
        for row in table.itertuples(index=False)
    ]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)
