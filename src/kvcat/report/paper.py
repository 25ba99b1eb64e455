"""The paper's tables as data, and its figures for the cells of ours."""

from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

import pandas as pd

from kvcat.errors import InputError

_VARIANTS = {  # of our labels
    "base": "base",
    "kvcat": "kv-cat",
    "kv-cat": "kv-cat",
    "router": "kv-cat",
    "rand": "rand",
    "random": "rand",
    "attn": "attn",
    "attention": "attn",
}
_CORPORA = {"wikitext-103": "WikiText-103", "pg-19": "PG-19", "arxiv": "arXiv"}
_METRICS = {  # by evaluation: our metric and the paper's
    "suffix": {"delta_ppl": "delta_ppl", "kl": "kl", "top1": "top1"},
    "needle": {"native_exact_match": "exact_match"},
    "longbench": {"accuracy": "accuracy"},
    "qa": {"acc_per_char": "accuracy"},
}
_AVERAGE = "six"
"""The one of our averages over tasks that the paper prints."""


@lru_cache(maxsize=1)
def paper_tables() -> pd.DataFrame:
    """A row per printed figure, in the paper's order.

    Empty or NaN are the method, steps and keep ratio without compression, steps where the paper
    contradicts itself, the model where it names none, and the keep ratio of averages. A stratum is
    a task, sub-domain or corpus, or ``average`` or ``total``.
    """
    with files("kvcat.report").joinpath("paper_tables.csv").open(encoding="utf-8") as stream:
        rows = pd.read_csv(stream, dtype={"printed": str})
    return rows.fillna({"method": "", "model": "", "stratum": ""})


@lru_cache(maxsize=1)
def _printed_figures() -> dict[tuple[str, str, str, str], list[Any]]:
    """The rows of ``paper_tables`` by model, variant, metric and stratum."""
    figures: dict[tuple[str, str, str, str], list[Any]] = {}
    for row in paper_tables().itertuples():
        key = (row.model, row.variant, row.metric, row.stratum)
        figures.setdefault(key, []).append(row)
    return figures


@dataclass(frozen=True)
class Paper:
    """The paper's figures for an evaluation on a data set; none if no model of it is named."""

    model: (
        str | None
    )  # Qwen2.5-0.5B or Qwen2.5-1.5B: what the models base, kvcat, rand and attn are
    evaluation: str = ""
    dataset: str = ""

    def __post_init__(self) -> None:
        known = [name for name in paper_tables()["model"].unique() if name]
        if self.model is not None and self.model not in known:
            raise InputError(f"the paper has no model {self.model!r}; it has {' and '.join(known)}")

    def printed(
        self,
        label: str,
        method: str,
        keep_ratio: float,
        step: int,
        metric: str,
        stratum: str = "",
    ) -> str:
        """The paper's figure for a row of our summary, ``paper 54.6``; empty if there is none."""
        name = label.partition(" ")[0].lower().replace("_", "-")
        variant = _VARIANTS.get(name)
        printed_metric = _METRICS.get(self.evaluation, {}).get(metric)
        if self.model is None or variant is None or printed_metric is None:
            return ""
        model = "" if self.evaluation == "longbench" else self.model
        key = (model, variant, printed_metric, self._printed_stratum(stratum))
        for row in _printed_figures().get(key, []):
            if self._is_same_cell(row, method, keep_ratio, step):
                return f"paper {row.printed.rstrip('%')}"
        return ""

    def printed_average(self, label: str, average: str, metric: str) -> str:
        """The same for one of our averages over strata without compression."""
        if average != _AVERAGE:
            return ""
        return self.printed(label, "", 1.0, 0, metric, "average")

    def _printed_stratum(self, stratum: str) -> str:
        """What the paper calls a stratum of ours."""
        if self.evaluation == "suffix":
            return _CORPORA.get(self.dataset.partition(":")[0], "")
        if self.evaluation == "longbench" and not stratum:
            return "total"
        return stratum

    def _is_same_cell(self, row: Any, method: str, keep_ratio: float, step: int) -> bool:
        """Whether a printed figure is of this method, keep ratio and step."""
        if self.evaluation == "qa":
            return bool(pd.isna(row.keep_ratio))
        is_same_method = row.method == method.partition(" ")[0] and row.keep_ratio == keep_ratio
        return is_same_method and bool(pd.isna(row.steps) or row.steps == step)

    @property
    def note(self) -> str:
        """A note if the paper used other data."""
        corpus = self.dataset.partition(":")[0]
        if self.model is None or self.evaluation != "suffix":
            return ""
        if corpus in _CORPORA or corpus.startswith("fineweb"):
            return ""
        return f"The paper's figures are of {self.model} on FineWeb, ours of {self.dataset}."
