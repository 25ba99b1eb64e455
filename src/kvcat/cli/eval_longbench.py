"""``kvcat eval longbench``: LongBench v2 with compressed contexts."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcat.cli.evaluate import (
    EvalRequest,
    KeepOption,
    MethodOption,
    ModelsArgument,
    OutOption,
    SeedsOption,
    ShardOption,
    SpeedOption,
    data_name,
    seeds_or_default,
)
from kvcat.cli.options import DeviceOption, DtypeOption

if TYPE_CHECKING:
    from kvcat.evals import Task


def longbench_command(
    models: ModelsArgument,
    out: OutOption,
    data: Annotated[
        str, typer.Option(help="hub:OWNER/NAME, or a .jsonl, .json or .parquet file in LongBench v2's schema.")
    ] = "hub:zai-org/LongBench-v2",
    sub_domain: Annotated[
        list[str] | None,
        typer.Option(help="Sub-domains, or `all`; several may be given.", show_default="the paper's seven, 221 rows"),
    ] = None,
    max_tokens: Annotated[
        int,
        typer.Option(min=64, help="Longest sequence; contexts are cut in the middle so that their repetition fits."),
    ] = 32_768,
    method: MethodOption = None,
    keep: KeepOption = None,
    limit: Annotated[int | None, typer.Option(min=1, help="The first so many examples, a fair sample.")] = None,
    seed: SeedsOption = None,
    shard: ShardOption = None,
    speed: SpeedOption = False,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
) -> None:
    """Compress long contexts by reconstruction, then answer the question on the compact cache.

    The four answers are scored by log-likelihood; dense, no context, and plain text of the same budget stand beside.
    The paper's method: --method gradient,activation_checkpointing=true. Figures of a model whose dense accuracy is not
    above chance are labelled plumbing.

    Example: kvcat eval longbench base=./base kvcat=./export --method gradient --keep 0.1 0.2 0.5 --out longbench
    """
    ratios = keep or [0.1, 0.2, 0.5]
    request = EvalRequest(
        models, out, method or ["attention-matching"], ratios, 1, seeds_or_default(seed), shard, speed, device, dtype,
        "LongBench v2 on compressed contexts",
    )  # fmt: skip

    def tasks(tokenizer: Any) -> "dict[str, Task]":  # noqa: ARG001 examples are text
        from kvcat.evals.longbench import LongBenchTask
        from kvcat.evals.longbench_rows import PAPER_SUB_DOMAINS, longbench_examples

        wanted = None if sub_domain == ["all"] else tuple(sub_domain or PAPER_SUB_DOMAINS)
        examples = longbench_examples(data, sub_domains=wanted)[:limit]
        return {"": LongBenchTask(examples, data_name(data), max_tokens=max_tokens, keep_ratios=tuple(ratios))}

    request.run(tasks)
