"""``kvcat eval suffix``: held-out text on a compressed prefix."""

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvcat.cli.evaluate import (
    BatchOption,
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
from kvcat.errors import InputError

if TYPE_CHECKING:
    from kvcat.evals import SuffixTask


def suffix_command(
    models: ModelsArgument,
    out: OutOption,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="installed, a text file, .jsonl or .parquet, a folder of them, hub:NAME, or wikitext-103, pg-19, "
            "arxiv, fineweb-edu from the Hub; several give a folder each.",
            show_default="installed",
        ),
    ] = None,
    split: Annotated[
        Literal["test", "validation", "train", "all"],
        typer.Option(help="Documents to use; test and validation are held out by a hash of the document's name."),
    ] = "test",
    supervision: Annotated[
        Literal["suffix", "first-half", "reconstruction"],
        typer.Option(
            help="What caches are fitted to: the suffix that is scored (the paper's probe), its first half, the rest "
            "alone being scored, or the prefix repeated after an instruction."
        ),
    ] = "suffix",
    method: MethodOption = None,
    keep: KeepOption = None,
    prefix: Annotated[int, typer.Option(min=2, help="Tokens of the compressed prefix.")] = 768,
    suffix: Annotated[int, typer.Option(min=2, help="Tokens of the scored suffix.")] = 256,
    windows: Annotated[int, typer.Option(min=1, help="Windows to evaluate.")] = 64,
    per_document: Annotated[int, typer.Option(min=1, help="Most windows from one document.")] = 2,
    window_seed: Annotated[int, typer.Option(min=0, help="Seed of the choice of windows.")] = 0,
    batch_size: BatchOption = 8,
    seed: SeedsOption = None,
    shard: ShardOption = None,
    speed: SpeedOption = False,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
) -> None:
    """Compress the prefix of held-out windows and score the suffix on the compact cache.

    Reports NLL on the compact cache, delta NLL, delta PPL, KL, top-1 agreement, context gain and retention with 95 %
    intervals, paired between models. Killed and started again, it continues.

    Example: kvcat eval suffix base=./base kvcat=./runs/router/export --keep 0.05 0.1 --out results
    """
    sources = data or ["installed"]
    request = EvalRequest(
        models, out, method or ["attention-matching"], keep or [0.05, 0.1, 0.2, 0.4], batch_size,
        seeds_or_default(seed), shard, speed, device, dtype, "Suffix prediction on a compressed prefix",
    )  # fmt: skip

    def tasks(tokenizer: Any) -> "dict[str, SuffixTask]":
        from kvcat.evals import SuffixTask, corpus_documents, windows_from_documents

        made = {}
        for source in sources:
            documents = corpus_documents(source, split, 10 * windows)
            chosen = windows_from_documents(
                documents, tokenizer, prefix_len=prefix, suffix_len=suffix, limit=windows, per_document=per_document,
                seed=window_seed,
            )  # fmt: skip
            name = re.sub(r"[^\w.-]+", "-", source).strip("-.") if len(sources) > 1 else ""
            if name in made:
                raise InputError(f"two --data would write to the same folder {name!r}")
            made[name] = SuffixTask(tuple(chosen), f"{data_name(source)}:{split}", supervision=supervision)
        return made

    request.run(tasks)
