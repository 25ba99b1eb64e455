"""``kvcat eval qa``: multiple choice without compression."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvcat.cli.evaluate import BatchOption, EvalRequest, ModelsArgument, OutOption, ShardOption
from kvcat.cli.options import DeviceOption, DtypeOption

if TYPE_CHECKING:
    from kvcat.evals import Task


def qa_command(
    models: ModelsArgument,
    out: OutOption,
    data: Annotated[
        Path | None, typer.Option(help="Folder of JSON lines, a file TASK*.jsonl each.", show_default="the Hub")
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="hellaswag, winogrande, piqa, social_i_qa, openbookqa, arc_easy, arc_challenge, commonsense_qa; "
            "several may be given.",
            show_default="all",
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Questions of each task, the same for everybody.")] = 1000,
    winogrande: Annotated[
        Literal["partial", "whole"],
        typer.Option(
            help="partial scores what follows the blank (lm-evaluation-harness), whole the option with it (LightEval, "
            "which the paper used)."
        ),
    ] = "partial",
    question_seed: Annotated[int, typer.Option(min=0, help="Seed of the choice of questions.")] = 0,
    batch_size: BatchOption = 32,
    shard: ShardOption = None,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
) -> None:
    """Zero-shot multiple choice with the whole model, nothing compressed: what training did to the model itself.

    The answer with the highest log-likelihood per character counts. Averages over the paper's six tasks, over seven
    with Social IQa, over eight with CommonsenseQA.

    Example: kvcat eval qa base=./base kvcat=./export --out qa
    """
    request = EvalRequest(
        models, out, [], [], batch_size, [0], shard, False, device, dtype, "Multiple choice without compression"
    )

    def tasks(tokenizer: Any) -> "dict[str, Task]":  # noqa: ARG001 questions are text
        from kvcat.evals.qa import qa_task
        from kvcat.evals.qa_rows import QA_SOURCES, qa_files

        files = dict.fromkeys(task or QA_SOURCES) if data is None else qa_files(data, task)
        return {"": qa_task(files, num_examples=limit, seed=question_seed, winogrande=winogrande)}

    request.run(tasks)
