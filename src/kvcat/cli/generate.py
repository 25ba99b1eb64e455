"""``kvcat generate``: answers from a saved compact cache."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from kvcat.cli.options import MODEL_HELP, DeviceOption, DtypeOption, SeedOption
from kvcat.errors import InputError


def generate_command(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    cache: Annotated[Path, typer.Option(help="Cache file that `kvcat compress` wrote with the same model.")],
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="What follows the document; may be given several times. Without it, one prompt a line is read."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 decodes greedily; above it samples.")] = 0.0,
    seed: SeedOption = 0,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
) -> None:
    """Answer prompts from a saved cache; every prompt starts from the document alone.

    A cache made with --chat wraps each prompt in the tokenizer's chat template.

    Example: kvcat generate ./my-model --cache report.safetensors --prompt "What was decided?"
    """
    if not cache.is_file():
        raise InputError(f"no cache file {cache}")

    import torch
    from transformers import TextStreamer

    import kvcat
    from kvcat.compress.documents import question_ids

    loaded, tokenizer = kvcat.load(model, dtype=dtype, device=device)
    compact = kvcat.CompactCache.load(cache, loaded)
    for text in _prompts(prompt):
        ids = question_ids(tokenizer, text, chat=compact.metadata.get("chat") == "yes").to(loaded.device)
        sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
        torch.manual_seed(seed)
        loaded.generate(
            **compact.inputs(loaded, ids),
            max_new_tokens=max_new_tokens,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            **sampling,
        )


def _prompts(given: list[str] | None) -> Iterator[str]:
    if given:
        yield from given
        return
    if sys.stdin.isatty():
        print("one prompt a line, an empty line ends", file=sys.stderr)
    for line in sys.stdin:
        if not line.strip():
            return
        yield line.rstrip("\n")
