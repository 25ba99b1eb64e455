"""``kvcat eval needle``: a passkey found in a compressed haystack."""

from pathlib import Path
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

NEEDLE_KEEPS = [0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5]


def needle_command(
    models: ModelsArgument,
    out: OutOption,
    method: MethodOption = None,
    keep: KeepOption = None,
    length: Annotated[int, typer.Option(min=1, help="Tokens of the haystack, exactly.")] = 1024,
    per_depth: Annotated[
        int, typer.Option(min=1, help="Examples at each of five depths; 20 is the paper's, 100 carries claims.")
    ] = 20,
    filler: Annotated[
        Path | None, typer.Option(help="Text file whose sentences are the hay; own sentences otherwise.")
    ] = None,
    needle_seed: Annotated[int, typer.Option(min=0, help="Seed of the examples.")] = 0,
    supervision: ContextSupervisionOption = "reconstruction",
    batch_size: BatchOption = 8,
    seed: SeedsOption = None,
    shard: ShardOption = None,
    speed: SpeedOption = False,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
) -> None:
    """Compress a haystack with a six-digit passkey, then ask for it: greedy answer, exact match.

    The paper's method: --method gradient,init=random. A model that cannot find the passkey with its whole cache has
    no figure here worth reading; the dense accuracy stands beside every other.

    Example: kvcat eval needle base=./base kvcat=./export --method gradient,init=random --keep 0.1 0.2 --out needle
    """
    request = EvalRequest(
        models, out, method or ["attention-matching"], keep or NEEDLE_KEEPS, batch_size, seeds_or_default(seed),
        shard, speed, device, dtype, "A passkey in a compressed haystack",
    )  # fmt: skip

    def tasks(tokenizer: Any) -> "dict[str, Task]":
        from kvcat.evals.haystack import FILLER, read_filler
        from kvcat.evals.needle import NeedleOptions, needle_task

        options = NeedleOptions(length=length, per_depth=per_depth, seed=needle_seed, supervision=supervision)
        sentences = FILLER if filler is None else read_filler(filler)
        name = "passkey" if filler is None else f"passkey:{filler.name}"
        return {"": needle_task(tokenizer, options, filler=sentences, dataset=name)}

    request.run(tasks)
