"""``kvcat compress``: a document's cache, compressed once and saved."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kvcat.cli.options import METHODS, MODEL_HELP, DeviceOption, DtypeOption, SeedOption, check_keep, check_method
from kvcat.errors import InputError


def compress_command(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    text: Annotated[Path, typer.Option(help="UTF-8 text file: the document.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Cache file to write (.safetensors).")],
    method: Annotated[str, typer.Option(help=f"One of: {', '.join(METHODS)}.")] = "attention-matching",
    keep: Annotated[float, typer.Option(help="Fraction of the KV slots to KEEP, in (0, 1].")] = 0.1,
    supervision: Annotated[
        Literal["reconstruction", "self"],
        typer.Option(
            help="What the compressor matches: the document repeated after an instruction (needs twice the positions), "
            "or the document's own queries."
        ),
    ] = "reconstruction",
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the document in the tokenizer's chat template.")] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace an existing cache file.")] = False,
    seed: SeedOption = 0,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
) -> None:
    """Compress a document's KV cache once; `kvcat generate` then answers from it again and again.

    Example: kvcat compress ./my-model --text report.txt --keep 0.1 -o report.safetensors
    """
    check_keep(keep)
    check_method(method)
    if method == "gradient" and supervision == "self":
        raise InputError("gradient needs --supervision reconstruction: the prefix alone gives it nothing to predict")
    if output.is_dir():
        raise InputError(f"{output} is a folder: name the cache file to write")
    if output.exists() and not overwrite:
        raise InputError(f"{output} exists; --overwrite replaces it")
    if not output.parent.is_dir():
        raise InputError(f"no folder {output.parent} to write {output.name} to")
    document = read_document(text)

    import kvcat
    from kvcat.compress import make_compressor
    from kvcat.compress.documents import document_trace

    loaded, tokenizer = kvcat.load(model, dtype=dtype, device=device)
    options: dict[str, Any] = {"seed": seed} if method in ("attention-matching", "gradient", "random") else {}
    compressor = make_compressor(method, **options)
    trace = document_trace(loaded, tokenizer, document, supervision=supervision, chat=chat)
    cache = compressor(trace, keep_ratio=keep)
    told = {"supervision": supervision, "chat": "yes" if chat else "no", "dtype": dtype}
    cache = dataclasses.replace(cache, metadata={**cache.metadata, **told})
    cache.save(output)
    print(
        f"{output}: {cache.num_tokens} tokens in {cache.num_slots} slots a layer and head, "
        f"{cache.nbytes / 1e6:.2f} MB ({method}, keep {keep:g}, supervision {supervision})"
    )


def read_document(path: Path) -> str:
    """The document's text.

    Raises:
        InputError: missing, empty, or not UTF-8.
    """
    try:
        document = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read text file {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    if not document.strip():
        raise InputError(f"text file {path} is empty")
    return document
