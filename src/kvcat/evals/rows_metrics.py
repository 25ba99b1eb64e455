"""Metrics as the old rows know them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kvcat.evals.statistics import ClusterBootstrap, Draws, Estimate
from kvcat.evals.statistics import share as accuracy

Columns = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Metric:
    """A figure over examples.

    Args:
        name: key in summaries and CSV files.
        label: column head.
        better: which way is better.
        definition: one line for a reader.
        columns: the per-example values whose means it is made of.
        function: of these means, element by element; None is the median of the single column.
        percent: shown in percent.
        binary: a share of what is right: its column is 1 or 0, a second column says which examples count.
    """

    name: str
    label: str
    better: Literal["lower", "higher"]
    definition: str
    columns: tuple[str, ...]
    function: Callable[..., Any] | None = lambda mean: mean
    percent: bool = False
    binary: bool = False

    def draws(self, bootstrap: ClusterBootstrap, columns: Columns) -> Draws:
        """The figure on all examples and on every resample."""
        if self.function is None:
            return bootstrap.median_draws(columns[self.columns[0]])
        return bootstrap.of_means(self.function, *(columns[name] for name in self.columns))

    def estimate(self, bootstrap: ClusterBootstrap, columns: Columns, documents: Sequence[str]) -> Estimate:
        """The figure with its interval: Wilson's of a share, the bootstrap's of anything else.

        Args:
            bootstrap: over the examples' documents.
            columns: values per example.
            documents: name of each example's document.
        """
        if not self.binary:
            return bootstrap.estimate(self.draws(bootstrap, columns))
        right = columns[self.columns[0]]
        counted = np.flatnonzero(columns[self.columns[1]] if len(self.columns) > 1 else np.ones_like(right)).tolist()
        if not counted:
            return Estimate(np.nan, np.nan, np.nan)
        return accuracy(right[counted], [documents[i] for i in counted])


_LIKELIHOODS = [
    Metric(
        "delta_ppl", "delta PPL", "lower",
        "Mean over windows of exp(NLL on the compact cache) - exp(dense NLL); the paper's figure, heavy-tailed.",
        ("delta_ppl",),
    ),
    Metric(
        "kl", "KL", "lower",
        "KL(dense || compact) of the next-token distributions, nats per suffix token. It compares a model with itself: "
        "a model that ignores its prefix has none.",
        ("kl",),
    ),
    Metric(
        "top1", "top-1", "higher",
        "Share of suffix positions where the most likely token is the same with the dense and with the compact cache.",
        ("top1",), percent=True,
    ),
    Metric(
        "nll", "NLL compact", "lower",
        "Negative log-likelihood of the real suffix, or of the right answer, on the compact cache, nats per token: "
        "what a user gets.",
        ("nll",),
    ),
    Metric(
        "delta_nll", "delta NLL", "lower",
        "NLL on the compact cache minus dense NLL, nats per token.",
        ("delta_nll",),
    ),
    Metric(
        "nll_dense", "NLL dense", "lower",
        "Negative log-likelihood with the whole cache, nats per token: the price paid in training.",
        ("nll_dense",),
    ),
    Metric(
        "context_gain", "context gain", "higher",
        "NLL without the prefix minus dense NLL, of a suffix tokens 2 onwards, nats per token: how much the prefix is "
        "used.",
        ("context_gain",),
    ),
    Metric(
        "retention", "retention", "higher",
        "1 - (NLL compact - NLL dense) / (NLL without prefix - NLL dense), a ratio of sums: the share of the context "
        "gain that survives compression; it says nothing where that gain is not clearly above 0.",
        ("lost", "gained"), lambda lost, gained: 1.0 - lost / gained, percent=True,
    ),
    Metric(
        "delta_ppl_median", "median delta PPL", "lower",
        "Median over windows of exp(NLL on the compact cache) - exp(dense NLL).",
        ("delta_ppl",), None,
    ),
    Metric(
        "delta_ppl_corpus", "corpus delta PPL", "lower",
        "exp(mean NLL on the compact cache) - exp(mean dense NLL): the perplexities of all suffixes as one corpus.",
        ("nll", "nll_dense"), lambda nll, dense: np.exp(nll) - np.exp(dense),
    ),
    Metric(
        "nll_none", "NLL no prefix", "lower",
        "Negative log-likelihood with no prefix at all, of a suffix tokens 2 onwards, nats per token.",
        ("nll_none",),
    ),
]  # fmt: skip


def _share(name: str, label: str, definition: str) -> Metric:
    return Metric(name, label, "higher", definition, (name,), percent=True, binary=True)


_RIGHT = [
    _share("exact_match", "exact match", "Share of examples whose greedy answer on the compact cache is right."),
    Metric(
        "native_exact_match", "exact match, native", "higher",
        "The same of the examples that the model answers rightly with its whole cache: the paper's native-success-"
        "conditioned figure. It rewards a model that is right on few: read it beside the plain and the dense one.",
        ("native_match", "dense_exact_match"), np.divide, percent=True, binary=True,
    ),
    _share("dense_exact_match", "exact match, dense", "Share of examples answered rightly with the whole cache."),
    Metric(
        "correct_prefix", "digits", "higher",
        "Share of the passkey's digits before the first wrong one, of the greedy answer.", ("correct_prefix",),
        percent=True,
    ),
    Metric(
        "string_match", "string match", "higher",
        "Share of the right answers that the greedy answer contains: RULER's score.", ("string_match",), percent=True,
    ),
    Metric(
        "dense_string_match", "string match, dense", "higher", "The same with the whole cache.",
        ("dense_string_match",), percent=True,
    ),
    _share("accuracy", "accuracy", "Share of questions whose right answer has the highest log-likelihood."),
    _share("dense_accuracy", "accuracy, dense", "The same with the whole cache."),
    Metric(
        "nll_choice", "NLL of the choice", "lower",
        "Minus the log of the right answer's probability among the four, nats; 1.386 is guessing.", ("nll_choice",),
    ),
    _share("acc_per_char", "accuracy", "Share of questions whose right answer has the highest log-likelihood per "
           "character."),
    _share("acc", "accuracy, raw", "The same by the total log-likelihood."),
    _share("acc_per_token", "accuracy per token", "The same by the log-likelihood per token."),
    Metric(
        "nll_per_char", "NLL per character", "lower",
        "Negative log-likelihood of the right answer, nats per character.", ("nll_per_char",),
    ),
]  # fmt: skip

METRICS: dict[str, Metric] = {metric.name: metric for metric in [*_LIKELIHOODS, *_RIGHT]}

HEADLINES: dict[str, tuple[str, ...]] = {
    "suffix": ("kl", "nll", "delta_nll", "top1", "retention", "nll_dense", "context_gain"),
    "needle": ("exact_match", "native_exact_match", "dense_exact_match", "correct_prefix", "nll", "nll_dense"),
    "ruler": ("string_match", "dense_string_match", "exact_match", "nll", "nll_dense"),
    "longbench": ("accuracy", "dense_accuracy", "nll_choice"),
    "qa": ("acc_per_char", "acc", "acc_per_token", "nll_per_char"),
}
"""The metrics of each evaluation that its tables show, the first of them the one that decides."""
