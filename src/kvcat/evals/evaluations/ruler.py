"""Solve RULER's synthetic tasks on compressed contexts."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import tyro

from kvcat.evals.evaluation import BatchSize, CompressingEvaluation, ReportFacts
from kvcat.option_types import Bos, Count, Counts, Strings, flat
from kvcat.stats.metrics import share_of_examples

if TYPE_CHECKING:
    from kvcat.evals.task import Task


@dataclass(frozen=True, kw_only=True)
class Ruler(CompressingEvaluation):
    """Compress texts with hidden facts, then ask about these facts.

    These are the RULER tasks that need no data set. The score is the share of right answers that
    the greedy answer contains. Default keep ratios: 0.05 0.1 0.2 0.4.

    Example: kvcat eval ruler ./model --length 4096 16384 --keep 0.1 0.2 --out ruler
    """

    folder_option = "length"
    facts = ReportFacts(
        title="RULER",
        metrics=("string_match", "nll", "dense_string_match", "nll_dense", "exact_match"),
        stratum_name="task",
        sizes="{length} tokens each",
    )
    new_metrics: ClassVar = {
        "string_match": share_of_examples(
            label="string match",
            description="Share of the right answers that the greedy answer contains, as in RULER.",
            dense_metric="dense_string_match",
            shows_ability=True,
        ),
        "dense_string_match": share_of_examples(
            label="string match, dense",
            description="The same with the whole cache.",
            of_dense_model=True,
        ),
    }

    tasks: Annotated[Strings, tyro.conf.arg(name="task")] = ()
    """niah_single, niah_multikey_1, niah_multikey_2, niah_multivalue,
    niah_multiquery, vt, cwe, fwe; all by default."""
    length: Counts = ()
    """Number of tokens in the text; default: 4096. Each value has a separate results folder."""
    per_task: Count = 20
    """Number of examples for each task."""
    bos: Bos = "auto"
    batch_size: BatchSize = 1

    def make_task(self, tokenizer: Any, value: Any) -> "Task":  # noqa: D102
        from kvcat.evals.ruler import make_task

        return make_task(
            tokenizer,
            length=value or 4096,
            tasks=flat(self.tasks) or None,
            per_task=self.per_task,
            seed=self.data_seed,
            bos=self.bos,
        )
