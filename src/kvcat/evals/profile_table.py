"""Records of a compressibility profile to tables: the best cache found, and every method."""

from collections import Counter
from collections.abc import Iterable

import numpy as np
import pandas as pd

from kvcat.errors import InputError
from kvcat.evals.profile import KINDS
from kvcat.evals.records import Record
from kvcat.evals.statistics import ClusterBootstrap, Estimate

BEST, ALL = "best", "all"
COLUMNS = [
    "model", "method", "num_slots", "kind", "mean", "low", "high", "worst", "ratio", "ratio_low", "ratio_high",
    "fit_mean", "num_prefixes", "num_outputs", "chosen",
]  # fmt: skip
_PREFIX, _CACHE = ["model", "document", "prefix"], ["num_slots", "method"]
_KINDS = [*KINDS, ALL]


def profile_table(records: Iterable[Record], *, num_resamples: int = 10_000) -> pd.DataFrame:
    """One row per model, method, number of slots and kind of suffix; errors are KL in nats.

    Columns: model; method, a label or "best": for every prefix the cache of at most so many slots, no cache
    among them, whose error on the suffixes for the choice is smallest, by their mean for the mean and by
    their worst for the worst; num_slots, r(n); kind, of the held-out suffixes, or "all": the mean over the
    kinds' means, the worst of all; mean over outputs, then prefixes, with low and high, which resample
    documents; worst over outputs and prefixes; ratio of the mean to the first model's on the same prefixes
    with its interval (NaN for the first model); fit_mean, the mean on the suffixes that caches were fitted
    to; num_prefixes that have held-out outputs of the kind; num_outputs; chosen, of "best" by the mean:
    methods with their slots and for how many prefixes each was chosen.

    Args:
        records: of a ``ProfileTask``, complete for every model.
        num_resamples: of the bootstrap.

    Raises:
        InputError: no records, or models with other prefixes or caches than the first: the run did not end.
    """
    errors = _errors(records)
    points = []
    for slots in sorted(set(errors["num_slots"])):
        able = errors[(errors["num_slots"] <= slots) & (errors["kind"] == ALL)].sort_values("num_slots", kind="stable")
        first, second = (
            able.sort_values(by, kind="stable").drop_duplicates(_PREFIX)[[*_PREFIX, *_CACHE]].merge(errors)
            for by in ("choice", "choice_worst")
        )
        first["chosen"] = first["method"] + " at " + first["num_slots"].astype(str)
        worst = second[[*_PREFIX, "kind", "worst"]]
        points.append(first.drop(columns="worst").merge(worst).assign(method=BEST, num_slots=slots))
    models = list(dict.fromkeys(errors["model"]))
    points = pd.concat([*points, errors]).sort_values("model", key=lambda own: own.map(models.index), kind="stable")
    rows, means = [], {}
    for key, cell in points.groupby(["method", "num_slots", "kind", "model"], sort=False):
        own = cell.dropna(subset="mean").set_index(["document", "prefix"])["mean"].sort_index()
        mean, ratio = _intervals(own, means.setdefault(key[:3], own), num_resamples)
        rows.append((
            key[3], *key[:3], mean.value, mean.low, mean.high, cell.dropna(subset="mean")["worst"].max(),
            ratio.value, ratio.low, ratio.high, cell["fit"].mean(), len(own), int(cell["num_outputs"].sum()),
            _counted(cell["chosen"].dropna()),
        ))  # fmt: skip
    return pd.DataFrame(rows, columns=COLUMNS)


def profile_markdown(table: pd.DataFrame) -> str:
    """Tables of the best caches and of every method, with what the columns mean.

    Args:
        table: of ``profile_table``.
    """
    kinds = [kind for kind in _KINDS if kind in set(table["kind"])]
    pairs = zip(table["mean"], table["worst"], strict=True)
    text = table.assign(error=["" if np.isnan(mean) else f"{mean:.3g} / {worst:.3g}" for mean, worst in pairs])
    best, cell = text[text["method"] == BEST], ["model", "num_slots"]
    every = best[best["kind"] == ALL].set_index(cell)
    wide = best.pivot_table("error", cell, "kind", aggfunc="first", sort=False)[kinds]
    wide["mean to the first model's"] = [
        "" if np.isnan(ratio) else f"{ratio:.2f} ({low:.2f} to {high:.2f})"
        for ratio, low, high in every[["ratio", "ratio_low", "ratio_high"]].itertuples(index=False)
    ]
    wide["chosen by the mean"] = every["chosen"]
    methods = text[(text["method"] != BEST) & (text["kind"] == ALL)]
    methods = methods[["model", "method", "num_slots", "error", "fit_mean"]]
    outputs = ", ".join(
        f"{count} {kind}" for kind, count in best.drop_duplicates("kind")[["kind", "num_outputs"]].values
    )
    legend = "\n".join(f"- {kind}: {KINDS[kind]}" for kind in kinds if kind != ALL)
    return (
        f"Error: KL(dense || compact), nats. Mean / worst over {best['num_prefixes'].max()} prefixes and held-out "
        f"outputs: {outputs}. Each is of the cache that the suffixes for the choice favour by it. The worst is a lower "
        f"bound on the maximum over all suffixes.\n\n{legend}\n\n### Best cache found\n\n"
        f"{_markdown(wide.rename_axis(['label', 'slots']).reset_index())}\n### Every method, all kinds\n\n"
        f"{_markdown(methods.rename(columns={'fit_mean': 'mean where fitted'}))}"
    )


def _errors(records: Iterable[Record]) -> pd.DataFrame:
    """A row per model, prefix, cache and kind: errors on held-out, fitted and choosing suffixes; "all" last."""
    rows = []
    for record in records:
        place = record.model, record.document, record.example, int(record.values["num_slots"]), record.method_label
        for kind in KINDS:
            figures = [f"{kind}_{name}" for name in ("kl", "kl_worst", "fit_kl", "choice_kl", "choice_kl_worst")]
            if f"{kind}_num_outputs" in record.values:
                found = (record.values.get(figure, np.nan) for figure in figures)
                rows.append((*place, kind, record.values[f"{kind}_num_outputs"], *found))
    columns = [*_PREFIX, *_CACHE, "kind", "num_outputs", "mean", "worst", "fit", "choice", "choice_worst"]
    errors = pd.DataFrame(rows, columns=columns)
    if errors.empty:
        raise InputError("no records: nothing was profiled")
    how = {"mean": "mean", "worst": "max", "fit": "mean", "choice": "mean", "choice_worst": "max", "num_outputs": "sum"}
    every = errors.groupby([*_PREFIX, *_CACHE], sort=False, as_index=False).agg(how).assign(kind=ALL)
    first = every[every["model"] == every["model"].iloc[0]]
    wanted = {(*prefix, *cache) for prefix in _tuples(first[_PREFIX[1:]]) for cache in _tuples(first[_CACHE])}
    for model, own in every.groupby("model"):
        if set(_tuples(own[[*_PREFIX[1:], *_CACHE]])) != wanted:
            raise InputError(f"model {model!r} and the first one have records of different caches: the run did not end")
    return pd.concat([errors, every])


def _tuples(frame: pd.DataFrame) -> list[tuple]:
    return list(frame.itertuples(index=False, name=None))


def _intervals(own: pd.Series, first: pd.Series, num_resamples: int) -> tuple[Estimate, Estimate]:
    """Mean over prefixes, and its ratio to the first model's."""
    none = Estimate(np.nan)
    if not len(own) or not np.isfinite(own).all():
        return Estimate(float(own.mean())), none
    bootstrap = ClusterBootstrap(list(own.index.get_level_values("document")), num_resamples=num_resamples)
    values, other = own.to_numpy(), first.to_numpy()
    if first is own or not own.index.equals(first.index) or not np.isfinite(other).all():
        return bootstrap.mean(values), none
    return bootstrap.mean(values), bootstrap.estimate(bootstrap.of_means(np.divide, values, other))


def _counted(chosen: pd.Series) -> str:
    """Methods with their slots, the most frequent first."""
    counts = sorted(Counter(chosen).items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{f'{count} x ' * (len(counts) > 1)}{label}" for label, count in counts)


def _markdown(table: pd.DataFrame) -> str:
    cells = table.map(lambda cell: f"{cell:.3g}" if isinstance(cell, float) else str(cell)).replace("nan", "")
    lines = [table.columns, ["---"] * len(table.columns), *_tuples(cells)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)
