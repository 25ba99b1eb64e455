"""Score held-out text after a compressed prefix."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kvcat.choices import SuffixSupervision
from kvcat.evals.evaluation import CompressingEvaluation, PaperFigures, ReportFacts
from kvcat.option_types import Bos, Count, Split, Strings
from kvcat.stats.metrics import Metric

if TYPE_CHECKING:
    from kvcat.evals.task import Task


@dataclass(frozen=True, kw_only=True)
class Suffix(CompressingEvaluation):
    """Compress the prefix of held-out windows and score the suffix on the compact cache.

    The text "installed" is the Python sources of this installation. Default keep ratios: 0.05 0.1
    0.2 0.4.

    Example: kvcat eval suffix base=./base kvcat=./runs/router/export --keep 0.05 0.1 --out results
    """

    folder_option = "data"
    facts = ReportFacts(
        title="Text after a compressed prefix",
        metrics=(
            "kl",
            "nll",
            "nll_dense",
            "context_gain",
            "kl_per_gain",
            "delta_nll",
            "delta_ppl",
            "top1",
            "retention",
        ),
        example_name="window",
        method_metrics=("kl", "top1"),
        step_metrics=("kl", "delta_ppl"),
        sizes="{prefix_len} prefix and {suffix_len} suffix tokens",
    )
    new_metrics: ClassVar = {
        "delta_ppl": Metric(
            label="delta PPL",
            description="Mean over windows of exp(NLL compact) - exp(NLL dense); the paper's "
            "figure, heavy-tailed.",
            unit="perplexity",
            ratio=True,
        ),
        "delta_ppl_median": Metric(
            label="median delta PPL",
            description="Median over windows of exp(NLL compact) - exp(NLL dense).",
            unit="perplexity",
            columns=("delta_ppl",),
            function=None,
        ),
        "delta_ppl_corpus": Metric(
            label="corpus delta PPL",
            description="exp(mean NLL compact) - exp(mean NLL dense): all suffixes as one corpus.",
            unit="perplexity",
            columns=("nll", "nll_dense"),
            function=lambda nll, dense: np.exp(nll) - np.exp(dense),
        ),
        "kl": Metric(
            label="KL",
            description="KL(dense || compact) of the next-token distributions of the suffix.",
            decimals=4,
            log_scale=True,
            ratio=True,
        ),
        "kl_per_gain": Metric(
            label="KL / gain",
            description="KL per nat of context gain, of sums: a model that uses its prefix less "
            "loses less by compression; undefined if that gain is not clearly above 0.",
            unit="",
            decimals=4,
            ratio=True,
            columns=("diverged", "gained"),
            products={
                "diverged": ("kl", "num_predicted"),
                "gained": ("context_gain", "num_predicted"),
            },
            function=lambda diverged, gained: diverged / gained,
            defined_where="gained",
        ),
        "top1": Metric(
            label="top-1",
            description="Share of suffix positions whose most likely token is the same with the "
            "dense and the compact cache.",
            unit="",
            decimals=1,
            percent=True,
            lower_is_better=False,
        ),
        "retention": Metric(
            label="retention",
            description="1 - delta NLL / context gain, of sums; undefined if that gain is not "
            "clearly above 0.",
            unit="",
            decimals=1,
            percent=True,
            lower_is_better=False,
            columns=("lost", "gained"),
            products={
                "lost": ("delta_nll", "num_tokens"),
                "gained": ("context_gain", "num_predicted"),
            },
            function=lambda lost, gained: 1.0 - lost / gained,
            defined_where="gained",
        ),
    }
    paper = PaperFigures(
        metrics={"delta_ppl": "delta_ppl", "kl": "kl", "top1": "top1"},
        corpora={"wikitext-103": "WikiText-103", "pg-19": "PG-19", "arxiv": "arXiv"},
        main_corpus="FineWeb",
    )

    data: Strings = ()
    """Files, folders, hub:NAME, wikitext-103, pg-19, arxiv, fineweb-edu; by default installed."""
    split: Split = "test"
    supervision: SuffixSupervision = "suffix"
    """Text to fit caches to: scored suffix (paper), its unscored half, or repeated prefix."""
    prefix: Count = 768
    """Tokens of the compressed prefix."""
    suffix: Count = 256
    """Tokens of the scored suffix."""
    windows: Count = 64
    """Number of windows to evaluate."""
    per_document: Count = 2
    """Largest number of windows from one document."""
    bos: Bos = "auto"

    def make_task(self, tokenizer: Any, value: Any) -> "Task":  # noqa: D102
        from kvcat.evals.suffix import make_task

        return make_task(
            tokenizer,
            value or "installed",
            self.split,
            prefix=self.prefix,
            suffix=self.suffix,
            windows=self.windows,
            per_document=self.per_document,
            seed=self.data_seed,
            supervision=self.supervision,
            bos=self.bos,
        )
