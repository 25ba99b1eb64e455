"""Compressibility profile: the KL of the best cache found for a prefix against the number of its slots.

(N, epsilon, r)-compressibility asks for a cache of r(n) slots of every prefix a that serves every suffix b alike:
|| M([a, b]) - M_{C,a}(b) || < epsilon. Here several methods fit a cache to the first half of the text behind a prefix,
and the KL of the next-token distributions on the second half judges it. The smallest KL is an upper bound on that of
the best cache on this suffix; it says nothing of other suffixes.

References: KV-CAT, section "KV Cache Compression: Problem Formulation", definition of (N, epsilon, r)-compressibility.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product

import numpy as np
import pandas as pd

from kvcat.errors import InputError
from kvcat.evals.records import Record
from kvcat.evals.statistics import ClusterBootstrap, Estimate
from kvcat.evals.task import Method

METHODS = (
    Method("attention-matching"),
    Method("gradient", {"init": "attention-matching", "num_steps": 40, "lr": 0.03, "schedule": "cosine"}),
    Method("snapkv"),
    Method("h2o"),
)
"""Methods among which the best cache is looked for where no others are named."""

SUPERVISION = "first-half"
"""The ``SuffixTask``'s supervision, so that no cache is judged by what it was fitted to."""

BEST = "best"
_WINDOW = ["model", "document", "window"]


def slot_ratios(slots: Sequence[int], prefix_len: int) -> list[float]:
    """Keep ratios of numbers of slots, 1, 2, 4, ... below the prefix's length where none are given.

    Raises:
        InputError: one twice, or one outside [1, prefix_len].
    """
    slots = slots or [2**power for power in range((prefix_len - 1).bit_length())]
    if len(set(slots)) < len(slots):
        raise InputError(f"slots are {list(slots)}; give each once")
    for count in slots:
        if not 1 <= count <= prefix_len:
            raise InputError(f"{count} slots are outside 1 to {prefix_len}, the tokens of a prefix")
    return [count / prefix_len for count in sorted(slots)]


def profile_table(records: Iterable[Record], prefix_len: int, *, num_resamples: int = 10_000) -> pd.DataFrame:
    """One row per model, method and number of slots; errors are KL(dense || compact) in nats per token.

    Columns: model; method, a label, or "best": for every window the cache of at most so many slots with the
    smallest error; num_slots; mean over windows, with low and high, which resample documents; worst window;
    ratio of the mean to the first model's on the same windows, with its interval (NaN for the first model);
    num_windows; num_documents; chosen, of "best": how many windows each method's cache was taken for. Of a
    method with steps the best step counts. ``records`` are of a ``SuffixTask``, complete for every model.

    Raises:
        InputError: no records, or models with records of different caches: the run did not end.
    """
    known = [(r.model, r.document, r.example, r.keep_ratio * prefix_len, r.method_label, r.values) for r in records]
    found = pd.DataFrame(known, columns=[*_WINDOW, "num_slots", "method", "error"])
    if found.empty or found.groupby(_WINDOW[1:]).size().nunique() > 1 or found["model"].value_counts().nunique() > 1:
        raise InputError("there are no records, or windows and models have different ones: the run did not end")
    found["error"], found["num_slots"] = found["error"].str["kl"], found["num_slots"].round().astype(int)
    models, methods, counts = (list(found[name].unique()) for name in ("model", "method", "num_slots"))
    # the smallest error stands first, and drop_duplicates keeps the first
    caches = found.sort_values("error", kind="stable").drop_duplicates([*_WINDOW, "num_slots", "method"])
    best = [caches[caches["num_slots"] <= count].drop_duplicates(_WINDOW) for count in counts]
    best = [own.assign(chosen=own["method"], method=BEST, num_slots=n) for n, own in zip(counts, best, strict=True)]
    cells = dict(list(pd.concat([*best, caches.assign(chosen="")]).groupby(["model", "method", "num_slots"])))
    rows = []
    for model, method, count in product(models, [BEST, *methods], sorted(counts)):
        own, first = (cells[label, method, count].sort_values(_WINDOW) for label in (model, models[0]))
        bootstrap = ClusterBootstrap(list(own["document"]), num_resamples=num_resamples)
        errors, others = own["error"].to_numpy(), first["error"].to_numpy()
        mean, ratio = bootstrap.mean(errors), Estimate(np.nan)
        if model != models[0]:
            ratio = bootstrap.estimate(bootstrap.of_means(np.divide, errors, others))
        chosen = ", ".join(f"{times} x {label}" for label, times in Counter(own["chosen"]).most_common() if label)
        rows.append({
            "model": model, "method": method, "num_slots": count, "mean": mean.value, "low": mean.low,
            "high": mean.high, "worst": errors.max(), "ratio": ratio.value, "ratio_low": ratio.low,
            "ratio_high": ratio.high, "num_windows": len(own), "num_documents": bootstrap.num_documents,
            "chosen": chosen,
        })  # fmt: skip
    return pd.DataFrame(rows)


def profile_text(table: pd.DataFrame) -> str:
    """A ``profile_table`` as aligned text."""
    shown = table.drop(columns=["num_windows", "num_documents"])
    return (
        f"KL(dense || compact), nats per token, of {table['num_windows'].max()} windows of "
        f"{table['num_documents'].max()} documents. Caches were fitted to the first half of the suffix and are judged "
        f"on the second, by which the best one is chosen, too; ratio: to the first model's mean.\n\n"
        f"{shown.to_string(index=False, na_rep='', float_format='{:.3g}'.format)}\n"
    )
