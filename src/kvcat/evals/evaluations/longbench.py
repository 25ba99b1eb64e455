"""Answer LongBench v2 from compressed contexts."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import tyro

from kvcat.evals.evaluation import CompressingEvaluation, PaperFigures, ReportFacts
from kvcat.option_types import Bos, Count, Strings, Unset, flat
from kvcat.stats.metrics import Metric, share_of_examples

if TYPE_CHECKING:
    from kvcat.evals.task import Task


@dataclass(frozen=True, kw_only=True)
class LongBench(CompressingEvaluation):
    """Compress long contexts by reconstruction, then answer the question on the compact cache.

    The four answers are scored by log-likelihood. Baselines are the dense cache, no context, and
    plain text with as many tokens as the budget. The paper's method: --method
    gradient,activation_checkpointing=true. Default keep ratios: 0.1 0.2 0.5.

    Example: kvcat eval longbench base=./base kvcat=./export --method gradient --out longbench
    """

    default_keeps = (0.1, 0.2, 0.5)
    facts = ReportFacts(
        title="LongBench v2",
        metrics=("accuracy", "nll_choice", "dense_accuracy"),
        example_name="question",
        stratum_name="sub-domain",
        reported_steps=(20, 100),
    )
    new_metrics: ClassVar = {
        "accuracy": share_of_examples(
            label="accuracy",
            description="Share of questions whose right answer has the highest log-likelihood.",
            dense_metric="dense_accuracy",
            shows_ability=True,
            chance=1 / 4,
        ),
        "dense_accuracy": share_of_examples(
            label="accuracy, dense",
            description="The same with the whole cache.",
            of_dense_model=True,
        ),
        "nll_choice": Metric(
            label="NLL of the choice",
            description="Minus the log of the right answer's probability among the four; 1.386 is "
            "guessing.",
            unit="nats",
        ),
    }
    paper = PaperFigures(metrics={"accuracy": "accuracy"}, names_model=False, all_strata="total")

    data: str = "hub:zai-org/LongBench-v2"
    """hub:OWNER/NAME, or a .jsonl, .json or .parquet file with LongBench v2's columns."""
    sub_domain: Strings = ()
    """Sub-domains, or `all`; by default the paper's seven, 221 rows."""
    max_tokens: Count = 32_768
    """Longest sequence, in tokens; contexts are cut in the middle so that two copies fit."""
    limit: Unset[Count] = None
    """Number of examples; the first ones are a fair sample. All by default."""
    bos: Bos = "auto"
    batch_size: tyro.conf.Suppress[int] = 1
    # nothing is drawn: the order follows from the rows' names
    data_seed: tyro.conf.Suppress[int] = 0

    def make_task(self, tokenizer: Any, value: Any) -> "Task":  # noqa: ARG002, D102
        from kvcat.evals.longbench import PAPER_SUB_DOMAINS, make_task

        sub_domains = tuple(flat(self.sub_domain)) or PAPER_SUB_DOMAINS
        return make_task(
            self.data,
            sub_domains=None if sub_domains == ("all",) else sub_domains,
            limit=self.limit,
            max_tokens=self.max_tokens,
            keep_ratios=self.keep_ratios(),
            bos=self.bos,
        )
