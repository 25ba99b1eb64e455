"""``kvcat eval ruler``: RULER's synthetic tasks on compressed contexts."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcat.cli.evaluate import (
    BatchOption,
    ContextSupervisionOption,
    EvalRequest,
    KeepOption,
    MethodOption,
    ModelsArgument,
    OutOption,
    SeedsOption,
    ShardOption,
    SpeedOption,
    seeds_or_default,
)
from kvcat.cli.options import DeviceOption, DtypeOption

if TYPE_CHECKING:
    from kvcat.evals import Task


def ruler_command(
    models: ModelsArgument,
    out: OutOption,
    method: MethodOption = None,
    keep: KeepOption = None,
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="niah_single, niah_multikey_1, niah_multikey_2, niah_multivalue, niah_multiquery, vt (variable "
            "tracking), cwe (common words), fwe (frequent words); several may be given.",
            show_default="all",
        ),
    ] = None,
    length: Annotated[list[int] | None, typer.Option(help="Tokens of the text; several give a folder each.")] = None,
    per_task: Annotated[int, typer.Option(min=1, help="Examples of each task.")] = 20,
    ruler_seed: Annotated[int, typer.Option(min=0, help="Seed of the examples.")] = 0,
    supervision: ContextSupervisionOption = "reconstruction",
    batch_size: BatchOption = 1,
    seed: SeedsOption = None,
    shard: ShardOption = None,
    speed: SpeedOption = False,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
) -> None:
    """Compress texts in which something is hidden, then ask for it: RULER's tasks that need no data.

    Score: the share of the right answers that the greedy answer contains, as in RULER (Hsieh et al. 2024).

    Example: kvcat eval ruler ./model --length 4096 --length 16384 --keep 0.1 0.2 --out ruler
    """
    lengths = length or [4096]
    request = EvalRequest(
        models, out, method or ["attention-matching"], keep or [0.05, 0.1, 0.2, 0.4], batch_size,
        seeds_or_default(seed), shard, speed, device, dtype, "RULER on compressed contexts",
    )  # fmt: skip

    def tasks(tokenizer: Any) -> "dict[str, Task]":
        from kvcat.evals.ruler import RulerOptions, ruler_task
        from kvcat.evals.ruler_texts import RULER_TASKS

        names = tuple(task or RULER_TASKS)
        made = {}
        for tokens in dict.fromkeys(lengths):
            options = RulerOptions(tokens, names, per_task, seed=ruler_seed, supervision=supervision)
            made[str(tokens) if len(lengths) > 1 else ""] = ruler_task(tokenizer, options)
        return made

    request.run(tasks)
