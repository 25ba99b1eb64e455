"""The figures of the evaluations: what each means, which way is better, how examples become one figure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvcat.evals.statistics import ClusterBootstrap, Draws


@dataclass(frozen=True)
class Metric:
    """A figure over examples.

    Args:
        label: column head.
        description: one line for a reader.
        lower_is_better: which way is better.
        unit: of the figure; empty for a share.
        percent: shown in percent.
        share: mean of a per-example score between 0 and 1, with the intervals of ``share``.
        ratio: the ratio of two models means something, because 0 is nothing lost.
        columns: the per-example values whose means the figure is made of; by default the one of its name.
        function: of these means, element by element.
    """

    label: str
    description: str
    lower_is_better: bool
    unit: str = "nats/token"
    percent: bool = False
    share: bool = False
    ratio: bool = False
    columns: tuple[str, ...] = ()
    function: Callable[..., Any] = lambda mean: mean

    def draws(self, bootstrap: ClusterBootstrap, columns: Mapping[str, np.ndarray]) -> Draws:
        """The figure on all examples and on every resample."""
        return bootstrap.of_means(self.function, *(columns[name] for name in self.columns))


def _score(label: str, description: str, *columns: str, function: Callable[..., Any] = lambda mean: mean) -> Metric:
    return Metric(label, description, False, "", percent=True, share=True, columns=columns, function=function)


_METRICS = {
    "delta_ppl": Metric(
        "delta PPL", "Mean over windows of exp(NLL compact) - exp(NLL dense); the paper's figure, heavy-tailed.",
        True, "perplexity", ratio=True,
    ),
    "kl": Metric(
        "KL", "KL(dense || compact) of the next-token distributions, nats per suffix token. It compares a model with "
        "itself: a model that ignores its prefix has none.", True, ratio=True,
    ),
    "top1": Metric(
        "top-1", "Share of suffix positions whose most likely token is the same with the dense and the compact cache.",
        False, "", percent=True,
    ),
    "nll": Metric(
        "NLL compact", "Negative log-likelihood of the real suffix, or of the right answer, on the compact cache, nats "
        "per token: what a user gets.", True,
    ),
    "delta_nll": Metric("delta NLL", "NLL on the compact cache minus dense NLL, nats per token.", True, ratio=True),
    "nll_dense": Metric(
        "NLL dense", "Negative log-likelihood with the whole cache, nats per token: the price paid in training.", True,
    ),
    "context_gain": Metric(
        "context gain", "NLL without the prefix minus dense NLL, of suffix tokens 2 onwards, nats per token: how much "
        "the model uses its prefix.", False,
    ),
    "retention": Metric(
        "retention", "1 - (NLL compact - NLL dense) / (NLL without prefix - NLL dense), a ratio of sums: the share of "
        "the context gain that survives compression; not given where that gain is not clearly above 0.",
        False, "", percent=True, columns=("lost", "gained"), function=lambda lost, gained: 1.0 - lost / gained,
    ),
    "exact_match": _score("exact match", "Share of examples whose greedy answer on the compact cache is right."),
    "native_exact_match": _score(
        "exact match, native", "The same of the examples that the model answers rightly with its whole cache: the "
        "paper's native-success-conditioned figure. It rewards a model that is right on few: read it beside the plain "
        "and the dense one.", "native_match", "dense_exact_match", function=np.divide,
    ),
    "dense_exact_match": _score("exact match, dense", "Share of examples answered rightly with the whole cache."),
    "correct_prefix": _score("digits", "Share of the passkey's digits before the first wrong one."),
    "string_match": _score("string match", "Share of the right answers that the greedy answer contains, as in RULER."),
    "dense_string_match": _score("string match, dense", "The same with the whole cache."),
    "accuracy": _score("accuracy", "Share of questions whose right answer has the highest log-likelihood."),
    "dense_accuracy": _score("accuracy, dense", "The same with the whole cache."),
    "nll_choice": Metric(
        "NLL of the choice", "Minus the log of the right answer's probability among the four, nats; 1.386 is guessing.",
        True, "nats",
    ),
    "acc_per_char": _score(
        "accuracy", "Share of questions whose right answer has the highest log-likelihood per character."
    ),
    "acc": _score("accuracy, raw", "The same by the total log-likelihood."),
    "nll_per_char": Metric(
        "NLL per character", "Negative log-likelihood of the right answer, nats per character.", True, "nats/character"
    ),
}  # fmt: skip

METRICS: dict[str, Metric] = {
    name: metric if metric.columns else replace(metric, columns=(name,)) for name, metric in _METRICS.items()
}
"""Every figure by its name in summaries and CSV files."""

DECIDING = {
    "suffix": "kl", "needle": "exact_match", "ruler": "string_match", "longbench": "accuracy", "qa": "acc_per_char"
}  # fmt: skip
"""Every evaluation with the metric that decides it where no other is named."""
