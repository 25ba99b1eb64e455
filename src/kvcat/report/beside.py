"""The paper's figures beside ours, where the same cell exists."""

from dataclasses import dataclass

from kvcat.errors import InputError
from kvcat.report.paper import PaperCell, paper_cell, paper_cells

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


@dataclass(frozen=True)
class Paper:
    """What the paper prints for one evaluation of one of its models; nothing where no model is named.

    Args:
        model: ``Qwen2.5-0.5B`` or ``Qwen2.5-1.5B``: what the models labelled base, kvcat (kv-cat, router), rand and
            attn are; None prints nothing.
        evaluation: name of the evaluation.
        dataset: name of the data set.

    Raises:
        InputError: a model that the paper does not have.
    """

    model: str | None
    evaluation: str
    dataset: str

    def __post_init__(self) -> None:
        known = sorted({cell.model for cell in paper_cells() if cell.model is not None})
        if self.model is not None and self.model not in known:
            raise InputError(f"the paper has no model {self.model!r}; it has {' and '.join(known)}")

    def printed(
        self, label: str, method: str, keep_ratio: float, step: int | None, metric: str, stratum: str = ""
    ) -> str:
        """The figure without its percent sign, empty where there is none.

        Args:
            label: of our model.
            method: name of our method with its options.
            keep_ratio: fraction kept.
            step: gradient steps, or None.
            metric: name in ``METRICS``.
            stratum: task or sub-domain; ``total`` or ``average`` over all.
        """
        cell = self._cell(label, method, keep_ratio, step, metric, stratum)
        return "" if cell is None else cell.printed.rstrip("%")

    def improvement(
        self, label: str, reference: str, method: str, keep_ratio: float, step: int | None, metric: str
    ) -> str:
        """How many times smaller the model's figure is than the reference's, empty where either is missing."""
        ours, base = (self._cell(name, method, keep_ratio, step, metric, "") for name in (label, reference))
        return "" if ours is None or base is None else f"{base.value / ours.value:.2f}"

    @property
    def note(self) -> str:
        """Where the paper's data are others than ours; empty where they are not, or nothing is printed."""
        corpus = self.dataset.partition(":")[0]
        if self.model is None or self.evaluation != "suffix" or corpus in _CORPORA or corpus.startswith("fineweb"):
            return ""
        return f"The paper's figures are of {self.model} on FineWeb, ours of {self.dataset}."

    def _cell(
        self, label: str, method: str, keep_ratio: float, step: int | None, metric: str, stratum: str
    ) -> PaperCell | None:
        variant = _VARIANTS.get(label.partition(" ")[0].lower().replace("_", "-"))
        name, compressor = _METRICS.get(self.evaluation, {}).get(metric), method.partition(" ")[0]
        if self.model is None or variant is None or name is None:
            return None
        group = _CORPORA.get(self.dataset.partition(":")[0], "") if self.evaluation == "suffix" else stratum
        cell = paper_cell(
            model=None if self.evaluation == "longbench" else self.model, variant=variant, group=group, metric=name,
            method=None if self.evaluation == "qa" else compressor,
            keep_ratio=None if self.evaluation == "qa" else keep_ratio,
        )  # fmt: skip
        return None if cell is None or cell.steps not in (None, step) else cell
