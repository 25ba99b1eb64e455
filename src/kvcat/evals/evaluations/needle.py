"""Find a passkey in a compressed haystack."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kvcat.evals.evaluation import CompressingEvaluation, PaperFigures, ReportFacts
from kvcat.option_types import Bos, Count
from kvcat.stats.metrics import share_of_examples

if TYPE_CHECKING:
    from kvcat.evals.task import Task


@dataclass(frozen=True, kw_only=True)
class Needle(CompressingEvaluation):
    """Compress a haystack with a six-digit passkey, then ask for it: greedy answer, exact match.

    The paper's method: --method gradient,init=random. Default keep ratios: 0.05 to 0.4 in steps of
    0.05, and 0.5.

    Example: kvcat eval needle base=./base kvcat=./export --keep 0.1 0.2 --out needle
    """

    default_keeps = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5)
    facts = ReportFacts(
        title="Needle in a haystack",
        metrics=(
            "exact_match",
            "nll",
            "dense_exact_match",
            "nll_dense",
            "native_exact_match",
            "correct_prefix",
        ),
        stratum_name="depth",
        sizes="{length} tokens each",
    )
    new_metrics: ClassVar = {
        "native_exact_match": share_of_examples(
            label="exact match, native",
            description="Exact match over the examples that the model answers rightly on its whole "
            "cache, as in the paper. It favours a model that is right on a small number of them.",
            comparable=False,
            columns=("native_match", "dense_exact_match"),
            products={"native_match": ("exact_match", "dense_exact_match")},
            function=np.divide,
        ),
        "correct_prefix": share_of_examples(
            label="digits",
            description="Share of the passkey's digits before the first wrong one.",
        ),
    }
    paper = PaperFigures(metrics={"native_exact_match": "exact_match"})

    length: Count = 1024
    """Exact number of tokens in the haystack."""
    per_depth: Count = 20
    """Examples at each of five depths: the paper has 20; use 100 for results you publish."""
    bos: Bos = "auto"

    def make_task(self, tokenizer: Any, value: Any) -> "Task":  # noqa: ARG002, D102
        from kvcat.evals.needle import make_task

        return make_task(
            tokenizer,
            length=self.length,
            per_depth=self.per_depth,
            seed=self.data_seed,
            bos=self.bos,
        )
