"""The paper's tables as data, and its figures for the cells of our tables."""

from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

import pandas as pd

from kvcat.errors import InputError
from kvcat.evals import PaperFigures

_VARIANTS = {  # the paper's name of a variant, by our label
    "base": "base",
    "kvcat": "kv-cat",
    "kv-cat": "kv-cat",
    "router": "kv-cat",
    "rand": "rand",
    "random": "rand",
    "attn": "attn",
    "attention": "attn",
}


@lru_cache(maxsize=1)
def paper_tables() -> pd.DataFrame:
    """A table of the figures printed in the paper, one per row, in the paper's order.

    Method, steps and keep ratio are empty or NaN without compression. So are steps where the paper
    contradicts itself, the model where the paper names none, and the keep ratio of averages. A
    stratum is a task, a sub-domain, a corpus, ``average`` or ``total``.
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
    """The paper's figures for an evaluation on a data set; none if no paper model is named.

    Args:
        model: Qwen2.5-0.5B or Qwen2.5-1.5B: model from which base, kvcat, rand and attn were made.
        figures: figures that belong to the evaluation; None: there are none.
        dataset: name of our data set.
    """

    model: str | None
    figures: PaperFigures | None = None
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
        if self.model is None or variant is None or self.figures is None:
            return ""
        printed_metric = self.figures.metrics.get(metric)
        if printed_metric is None:
            return ""
        model = self.model if self.figures.names_model else ""
        if self.figures.corpora:  # the paper's name of our data set, which is a stratum there
            printed_stratum = self.figures.corpora.get(self._corpus, "")
        else:
            printed_stratum = stratum or self.figures.all_strata
        key = (model, variant, printed_metric, printed_stratum)
        for row in _printed_figures().get(key, []):
            if not self.figures.compresses:
                is_same_cell = bool(pd.isna(row.keep_ratio))
            else:
                is_same_step = bool(pd.isna(row.steps) or row.steps == step)
                is_same_method = row.method == method.partition(" ")[0]
                is_same_cell = is_same_step and is_same_method and row.keep_ratio == keep_ratio
            if is_same_cell:
                return f"paper {row.printed.rstrip('%')}"
        return ""

    def printed_average(self, label: str, average: str, metric: str) -> str:
        """The paper's figure for one of our averages over strata without compression."""
        if self.figures is None or average != self.figures.average:
            return ""
        return self.printed(label, "", 1.0, 0, metric, "average")

    @property
    def _corpus(self) -> str:
        """The name of the data set without its split."""
        return self.dataset.partition(":")[0]

    @property
    def note(self) -> str:
        """A note if the paper used other data; otherwise empty."""
        if self.model is None or self.figures is None or not self.figures.corpora:
            return ""
        main_corpus = self.figures.main_corpus
        if self._corpus in self.figures.corpora or self._corpus.startswith(main_corpus.lower()):
            return ""
        return (
            f"The paper's figures are for {self.model} on {main_corpus}, ours for {self.dataset}."
        )
