"""The figures of a suffix evaluation: what each means, which way is better, how windows become one figure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kvcat.evals.statistics import ClusterBootstrap, Draws

Columns = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Metric:
    """A figure over windows.

    Args:
        name: key in summaries and CSV files.
        label: column head.
        better: which way is better.
        definition: one line for a reader.
        columns: the per-window values whose means it is made of.
        function: of these means, element by element; None is the median of the single column.
        percent: shown in percent.
    """

    name: str
    label: str
    better: Literal["lower", "higher"]
    definition: str
    columns: tuple[str, ...]
    function: Callable[..., Any] | None = lambda mean: mean
    percent: bool = False

    def draws(self, bootstrap: ClusterBootstrap, columns: Columns) -> Draws:
        """The figure on all windows and on every resample."""
        if self.function is None:
            return bootstrap.median_draws(columns[self.columns[0]])
        return bootstrap.of_means(self.function, *(columns[name] for name in self.columns))


_ALL = [
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
        "Negative log-likelihood of the real suffix on the compact cache, nats per token: what a user gets.",
        ("nll",),
    ),
    Metric(
        "delta_nll", "delta NLL", "lower",
        "NLL on the compact cache minus dense NLL over all suffix tokens, nats per token.",
        ("delta_nll",),
    ),
    Metric(
        "nll_dense", "NLL dense", "lower",
        "Negative log-likelihood of the real suffix with the whole cache, nats per token: the price paid in training.",
        ("nll_dense",),
    ),
    Metric(
        "context_gain", "context gain", "higher",
        "NLL without the prefix minus dense NLL, suffix tokens 2 onwards, nats per token: how much the prefix is used.",
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
        "Negative log-likelihood of suffix tokens 2 onwards with no prefix at all, nats per token.",
        ("nll_none",),
    ),
]  # fmt: skip

METRICS: dict[str, Metric] = {metric.name: metric for metric in _ALL}
