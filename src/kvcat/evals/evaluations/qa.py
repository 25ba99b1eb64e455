"""Answer multiple-choice questions without compression."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import tyro

from kvcat.evals.evaluation import Evaluation, PaperFigures, ReportFacts
from kvcat.option_types import Count, Strings, Unset, flat
from kvcat.stats.metrics import Metric, share_of_examples

if TYPE_CHECKING:
    from kvcat.evals.task import Task

_SIX_TASKS = ("hellaswag", "winogrande", "piqa", "openbookqa", "arc_easy", "arc_challenge")


@dataclass(frozen=True, kw_only=True)
class QA(Evaluation):
    """Answer multiple-choice questions zero-shot and without compression.

    The results show how training changed the model itself. The model's answer is the one with the
    highest log-likelihood per character.

    Example: kvcat eval qa base=./base kvcat=./export --out qa
    """

    facts = ReportFacts(
        title="Multiple choice without compression",
        metrics=("acc_per_char", "nll_per_char", "acc"),
        example_name="question",
        stratum_name="task",
        averages={
            "six": _SIX_TASKS,  # the paper's table
            "seven": (*_SIX_TASKS, "social_i_qa"),
            "eight": (*_SIX_TASKS, "social_i_qa", "commonsense_qa"),
        },
    )
    new_metrics: ClassVar = {
        "acc_per_char": share_of_examples(
            label="accuracy",
            description="Share of right answers with the highest log-likelihood per character.",
            shows_ability=True,
            chance=1 / 4,
            chance_by_stratum={
                "winogrande": 1 / 2,
                "piqa": 1 / 2,
                "social_i_qa": 1 / 3,
                "commonsense_qa": 1 / 5,
            },
        ),
        "acc": share_of_examples(
            label="accuracy, raw", description="The same by the total log-likelihood."
        ),
        "nll_per_char": Metric(
            label="NLL per character",
            description="Negative log-likelihood of the right answer.",
            unit="nats/character",
        ),
    }
    paper = PaperFigures(metrics={"acc_per_char": "accuracy"}, compresses=False, average="six")

    data: Unset[Path] = None
    """Folder with a JSON Lines file TASK*.jsonl for each task; default: the Hub."""
    tasks: Annotated[Strings, tyro.conf.arg(name="task")] = ()
    """hellaswag, winogrande, piqa, social_i_qa, openbookqa, arc_easy, arc_challenge,
    commonsense_qa; all by default."""
    limit: Count = 1000
    """Number of questions from each task; all models get the same questions."""

    def make_task(self, tokenizer: Any, value: Any) -> "Task":  # noqa: ARG002, D102
        from kvcat.evals.qa import make_task

        tasks = flat(self.tasks) or None
        return make_task(self.data, tasks=tasks, num_examples=self.limit, seed=self.data_seed)
