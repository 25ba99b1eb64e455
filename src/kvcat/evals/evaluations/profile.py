"""Measure the smallest error of a cache for each number of slots.

(N, epsilon, r)-compressibility requires, for every prefix a, a cache of r(n) slots that works for
every suffix b: || M([a, b]) - M_{C,a}(b) || < epsilon. Here several methods fit a cache to the
first half of the text after a prefix, and the KL of the next-token distributions on the second half
is its error. The smallest KL is an upper bound on the KL of the best possible cache on this suffix.
It does not cover other suffixes.

References: KV-CAT, section "KV Cache Compression: Problem Formulation", definition of
(N, epsilon, r)-compressibility.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import tyro

from kvcat.errors import InputError, check_in
from kvcat.evals.evaluation import Evaluation, LinePlot, ResultTable
from kvcat.evals.evaluations.suffix import Suffix
from kvcat.evals.task import Method, Task
from kvcat.option_types import Bos, Count, Counts, Seed, Split, Strings, flat
from kvcat.stats.intervals import NO_ESTIMATE, ClusterBootstrap
from kvcat.stats.records import Record


@dataclass(frozen=True, kw_only=True)
class Profile(Evaluation):
    """Measure a model's compressibility on a text: the smallest error for each number of slots.

    Every method fits a cache to the first half of the text after a prefix. The error is the KL on
    the second half, and for every window the smallest KL of all methods counts.

    Example: kvcat eval profile kvcat-base --data book.txt --slots 1 4 16 64
    """

    facts = Suffix.facts  # its records are those of the suffix evaluation
    new_metrics = Suffix.new_metrics

    out: Path = Path("out/profile")
    """Folder for records and the table. A stopped evaluation continues there."""
    data: str
    """A text, .jsonl or .parquet file, a folder of them, hub:NAME, or installed."""
    slots: Counts = ()
    """Slots per layer and head, from 1 to --prefix; 1 2 4 8 ... by default."""
    method: Strings = ()
    """Methods to choose from; default: attention-matching, gradient (40 steps), snapkv, h2o."""
    prefix: Count = 128
    """Number of tokens in a prefix."""
    suffix: Count = 128
    """Number of tokens after a prefix, at least 4."""
    windows: Count = 16
    """Number of prefixes, from as many different documents as possible."""
    split: Split = "all"
    bos: Bos = "auto"
    seed: Seed = 0
    batch_size: tyro.conf.Suppress[int] = 16

    def make_task(self, tokenizer: Any, value: Any) -> Task:  # noqa: ARG002, D102
        return Suffix.task(
            tokenizer,
            self.data,
            split=self.split,
            prefix=self.prefix,
            suffix=self.suffix,
            windows=self.windows,
            per_document=self.windows,
            data_seed=self.data_seed,
            supervision=SUPERVISION,
            bos=self.bos,
        )

    def method_specs(self) -> list[str]:  # noqa: D102
        return flat(self.method)

    def settings(self) -> dict[str, Any]:  # noqa: D102
        return {
            "methods": Method.parse(self.method_specs()) or list(METHODS),
            "keep_ratios": slot_ratios(flat(self.slots), self.prefix),
            "seeds": [self.seed],
            "batch_size": self.batch_size,
        }

    def result_table(self, records: Sequence[Record]) -> ResultTable:
        """The smallest errors by number of slots."""
        table = profile_table(records, self.prefix)
        plot = LinePlot(
            title="Compressibility profile",
            rows=table[table["method"] == BEST],
            x="num_slots",
            panels={
                "mean": "Best cache found, mean over windows",
                "worst": "Best cache found, worst window",
            },
            x_label="slots per layer and head",
            y_label="KL",
            unit="nats/token",
        )
        return ResultTable(name="profile", frame=table, text=profile_text(table), plot=plot)


METHODS = (
    Method("attention-matching"),
    Method(
        "gradient",
        {"init": "attention-matching", "num_steps": 40, "lr": 0.03, "schedule": "cosine"},
    ),
    Method("snapkv"),
    Method("h2o"),
)
"""Default methods, from which the best cache is chosen."""

SUPERVISION = "first-half"
"""Supervision of the ``SuffixTask``: caches are not scored on the text they were fitted to."""

BEST = "best"
_WINDOW = ["model", "document", "window"]


def slot_ratios(slots: Sequence[int], prefix_len: int) -> list[float]:
    """The keep ratios that give these numbers of slots; by default 1, 2, 4, ... slots.

    Raises:
        InputError: a number occurs twice, or is outside [1, prefix_len].
    """
    if not slots:
        num_powers = (prefix_len - 1).bit_length()
        slots = [2**power for power in range(num_powers)]
    if len(set(slots)) < len(slots):
        raise InputError(f"slots are {list(slots)}; give each once")
    for num_slots in slots:
        check_in(f"[1, {prefix_len}]", slots=num_slots)
    return [num_slots / prefix_len for num_slots in sorted(slots)]


def profile_table(
    records: Iterable[Record], prefix_len: int, *, num_resamples: int = 10_000
) -> pd.DataFrame:
    """A table of errors, KL(dense || compact) in nats/token, by model, method and number of slots.

    The columns are model; method, which is a label or "best"; num_slots; mean over windows, with
    the ends low and high of an interval that resamples documents; worst window; ratio of the mean
    to the first model's on the same windows, with its interval (NaN for the first model);
    num_windows; num_documents; chosen.

    For every window, "best" uses the cache with the smallest error among those with at most
    num_slots slots, and "chosen" counts the windows on which each method's cache was the best. For
    a method with steps, the best step counts. ``records`` must come from a ``SuffixTask`` and be
    complete for every model.

    Raises:
        InputError: there are no records, or models have records for different caches, because the
            run did not finish; or a randomised method has records for several seeds.
    """
    errors = _window_errors(records, prefix_len)
    # sorted by error, so that drop_duplicates keeps the smallest
    ascending = errors.sort_values("error", kind="stable")
    caches = ascending.drop_duplicates([*_WINDOW, "num_slots", "method"])
    frames = [caches.assign(chosen="")]
    for num_slots in errors["num_slots"].unique():
        best = caches[caches["num_slots"] <= num_slots].drop_duplicates(_WINDOW)
        frames.append(best.assign(chosen=best["method"], method=BEST, num_slots=num_slots))
    cells = dict(list(pd.concat(frames).groupby(["model", "method", "num_slots"])))
    models = list(errors["model"].unique())
    methods = [BEST, *errors["method"].unique()]
    rows = []
    for model, method, num_slots in product(models, methods, sorted(errors["num_slots"].unique())):
        windows = cells[model, method, num_slots]
        reference = None if model == models[0] else cells[models[0], method, num_slots]
        place = {"model": model, "method": method, "num_slots": num_slots}
        rows.append({**place, **_profile_figures(windows, reference, num_resamples)})
    return pd.DataFrame(rows)


def _window_errors(records: Iterable[Record], prefix_len: int) -> pd.DataFrame:
    """The error of every cache on its window; ``InputError`` if one is missing or seeds differ."""
    records = list(records)
    _check_seeds(records)
    rows = [
        {
            "model": record.model,
            "document": record.document,
            "window": record.example,
            "num_slots": round(record.keep_ratio * prefix_len),
            "method": record.method_label,
            "error": record.values["kl"],
        }
        for record in records
    ]
    errors = pd.DataFrame(rows, columns=[*_WINDOW, "num_slots", "method", "error"])
    caches_per_window = errors.groupby(_WINDOW[1:]).size()
    caches_per_model = errors["model"].value_counts()
    if errors.empty or caches_per_window.nunique() > 1 or caches_per_model.nunique() > 1:
        raise InputError(
            "there are no records, or windows and models have different ones: the run is incomplete"
        )
    return errors


def _check_seeds(records: Iterable[Record]) -> None:
    """``InputError`` for several seeds, of which a profile would show the best."""
    seeds: dict[str, set[int]] = {}
    for record in records:
        if record.seed is not None:
            seeds.setdefault(record.method_label, set()).add(record.seed)
    for method, method_seeds in seeds.items():
        if len(method_seeds) > 1:
            raise InputError(
                f"{method} has records for seeds {sorted(method_seeds)}; pass those of one seed"
            )


def _profile_figures(
    windows: pd.DataFrame, reference: pd.DataFrame | None, num_resamples: int
) -> dict[str, Any]:
    """The columns of one row, from a model's windows and those of the first model."""
    windows = windows.sort_values(_WINDOW)
    bootstrap = ClusterBootstrap(list(windows["document"]), num_resamples=num_resamples)
    errors = windows["error"].to_numpy()
    mean = bootstrap.mean(errors)
    ratio = NO_ESTIMATE
    if reference is not None:
        reference_errors = reference.sort_values(_WINDOW)["error"].to_numpy()
        ratio = bootstrap.estimate(bootstrap.of_means(np.divide, errors, reference_errors))
    counts = Counter(windows["chosen"]).most_common()
    return {
        "mean": mean.value,
        "low": mean.low,
        "high": mean.high,
        "worst": errors.max(),
        "ratio": ratio.value,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "num_windows": len(windows),
        "num_documents": bootstrap.num_documents,
        "chosen": ", ".join(f"{count} x {method}" for method, count in counts if method),
    }


def profile_text(table: pd.DataFrame) -> str:
    """A ``profile_table`` as aligned text; ratios are shown if there are several models."""
    hidden = ["num_windows", "num_documents"]
    about_ratios = " Ratios are to the first model's mean."
    if table["ratio"].isna().all():
        hidden += ["ratio", "ratio_low", "ratio_high"]
        about_ratios = ""
    columns = table.drop(columns=hidden)
    rows = columns.to_string(index=False, na_rep="", float_format="{:.3g}".format)
    rows = "\n".join(row.rstrip() for row in rows.splitlines())
    num_windows = table["num_windows"].max()
    num_documents = table["num_documents"].max()
    return (
        f"KL(dense || compact), nats per token, of {num_windows} windows of {num_documents} "
        f"documents. Caches were fitted to the first half of the suffix. The KL is on the second "
        f"half, which also selects the best cache.{about_ratios}\n\n"
        f"{rows}\n"
    )
