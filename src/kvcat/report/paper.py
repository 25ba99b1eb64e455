"""The paper's tables as data, and its figures beside ours."""

from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

import pandas as pd

from kvcat.errors import InputError

_VARIANTS = {
    "base": "base", "kvcat": "kv-cat", "kv-cat": "kv-cat", "router": "kv-cat", "rand": "rand", "random": "rand",
    "attn": "attn", "attention": "attn",
}  # fmt: skip
_CORPORA = {"wikitext-103": "WikiText-103", "pg-19": "PG-19", "arxiv": "arXiv"}
_METRICS = {
    "suffix": {"delta_ppl": "delta_ppl", "kl": "kl", "top1": "top1"},
    "needle": {"native_exact_match": "exact_match"},
    "longbench": {"accuracy": "accuracy"},
    "qa": {"acc_per_char": "accuracy"},
}


@lru_cache(maxsize=1)
def paper_tables() -> pd.DataFrame:
    """A row per printed figure, in the paper's order.

    Empty or NaN are the method, steps and keep ratio without compression, steps where the paper contradicts itself,
    the model where it says none, and the keep ratio of averages. A group is a task, sub-domain or corpus.
    """
    with files("kvcat.report").joinpath("paper_tables.csv").open(encoding="utf-8") as stream:
        rows = pd.read_csv(stream, dtype={"printed": str})
    return rows.fillna({"method": "", "model": "", "group": ""})


@dataclass(frozen=True)
class Paper:
    """What the paper prints for an evaluation on a data set; nothing where no model of it is named."""

    model: str | None  # Qwen2.5-0.5B or Qwen2.5-1.5B: what those labelled base, kvcat, rand and attn are
    evaluation: str = ""
    dataset: str = ""

    def __post_init__(self) -> None:
        known = [name for name in paper_tables()["model"].unique() if name]
        if self.model is not None and self.model not in known:
            raise InputError(f"the paper has no model {self.model!r}; it has {' and '.join(known)}")

    def printed(self, label: str, method: str, keep_ratio: float, step: int, metric: str, stratum: str = "") -> str:
        """The paper's figure for a row of our summary, ``paper 54.6``; empty where there is none."""
        variant = _VARIANTS.get(label.partition(" ")[0].lower().replace("_", "-"))
        name = _METRICS.get(self.evaluation, {}).get(metric)
        if self.model is None or variant is None or name is None:
            return ""
        group = stratum or ("total" if self.evaluation == "longbench" else "")
        if self.evaluation == "suffix":
            group = _CORPORA.get(self.dataset.partition(":")[0], "")
        rows = paper_tables()
        rows = rows[(rows["variant"] == variant) & (rows["metric"] == name) & (rows["group"] == group)]
        rows = rows[rows["model"] == ("" if self.evaluation == "longbench" else self.model)]
        if self.evaluation == "qa":
            rows = rows[rows["keep_ratio"].isna()]
        else:
            rows = rows[(rows["method"] == method.partition(" ")[0]) & (rows["keep_ratio"] == keep_ratio)]
            rows = rows[rows["steps"].isna() | (rows["steps"] == step)]
        return "" if rows.empty else f"paper {rows['printed'].iloc[0].rstrip('%')}"

    @property
    def note(self) -> str:
        """Where the paper's data are others than ours; empty where they are not, or nothing is printed."""
        corpus = self.dataset.partition(":")[0]
        if self.model is None or self.evaluation != "suffix" or corpus in _CORPORA or corpus.startswith("fineweb"):
            return ""
        return f"The paper's figures are of {self.model} on FineWeb, ours of {self.dataset}."
