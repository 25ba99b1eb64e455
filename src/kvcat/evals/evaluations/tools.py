"""Call functions whose schemas are in a compressed context."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvcat.evals.evaluation import CompressingEvaluation, ReportFacts
from kvcat.option_types import Bos, Count
from kvcat.stats.metrics import share_of_examples

if TYPE_CHECKING:
    from kvcat.evals.task import Task


@dataclass(frozen=True, kw_only=True)
class Tools(CompressingEvaluation):
    """Compress the schemas of functions and a request, then ask for the call as JSON.

    The schemas and requests are generated: nothing is downloaded. Default keep ratios: 0.1 0.25
    0.5.

    Example: kvcat eval tools ./model --method attention-matching snapkv --keep 0.25 --out tools
    """

    default_keeps = (0.1, 0.25, 0.5)
    facts = ReportFacts(
        title="Tool calls",
        metrics=(
            "schema_valid",
            "nll",
            "dense_schema_valid",
            "nll_dense",
            "right_function",
            "dense_right_function",
            "exact_match",
            "dense_exact_match",
        ),
        stratum_name="function",
        sizes="{num_functions} functions each",
    )
    new_metrics: ClassVar = {
        "schema_valid": share_of_examples(
            label="schema-valid",
            description="Share of greedy answers that begin with a JSON object that fits the "
            "schema of one of the functions.",
            dense_metric="dense_schema_valid",
            shows_ability=True,
        ),
        "dense_schema_valid": share_of_examples(
            label="schema-valid, dense",
            description="The same with the whole cache.",
            of_dense_model=True,
        ),
        "right_function": share_of_examples(
            label="right function",
            description="Share of greedy answers that fit the schema of the right function.",
            dense_metric="dense_right_function",
        ),
        "dense_right_function": share_of_examples(
            label="right function, dense",
            description="The same with the whole cache.",
            of_dense_model=True,
        ),
    }

    num_functions: Count = 6
    """Number of functions in a context, 2 to 8."""
    cases: Count = 100
    """Number of contexts."""
    bos: Bos = "auto"

    def make_task(self, tokenizer: Any, value: Any) -> "Task":  # noqa: ARG002, D102
        from kvcat.evals.tool_calls import make_task

        return make_task(
            tokenizer,
            num_functions=self.num_functions,
            cases=self.cases,
            seed=self.data_seed,
            bos=self.bos,
        )
