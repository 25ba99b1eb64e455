"""``kvcat pack``: a saved cache as another program's file."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kvcat.cli.options import MODEL_HELP, DeviceOption
from kvcat.errors import InputError


def pack_command(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    cache: Annotated[Path, typer.Option(help="Cache file that `kvcat compress` wrote with the same model.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")],
    engine: Annotated[
        Literal["transformers", "llama.cpp"],
        typer.Option(help="transformers: plain tensors in safetensors; llama.cpp: the state of a sequence."),
    ] = "transformers",
    positions: Annotated[
        Literal["rerotated", "original"],
        typer.Option(help="rerotated poses as an ordinary short prefix; original needs an engine told of positions."),
    ] = "rerotated",
    drop_log_bias: Annotated[
        bool, typer.Option("--drop-log-bias", help="Leave out the log-bias, which changes the answers.")
    ] = False,
    cache_type: Annotated[
        Literal["float16", "float32", "bfloat16"], typer.Option(help="Of llama.cpp's cache (--cache-type-k, -v).")
    ] = "float16",
    flash_attention: Annotated[bool, typer.Option(help="Whether llama.cpp will run with flash attention.")] = True,
    num_streams: Annotated[int, typer.Option(min=1, help="llama.cpp's --parallel, unless its cache is unified.")] = 1,
    placeholder: Annotated[int, typer.Option(min=0, help="Token id that llama.cpp is given for every slot.")] = 0,
    overwrite: Annotated[bool, typer.Option(help="Replace an existing file.")] = False,
    device: DeviceOption = "cpu",
) -> None:
    """Write a saved cache as a file for an engine that knows no kvcat; docs/engines.md shows how each reads it.

    The cache must have no log-bias: compress with --method attention-matching,log_bias=false, or by eviction.

    Example: kvcat pack ./my-model --cache report.safetensors -o report.bin --engine llama.cpp
    """
    if output.exists() and not overwrite:
        raise InputError(f"{output} exists; --overwrite replaces it")
    if not output.parent.is_dir():
        raise InputError(f"no folder {output.parent} to write {output.name} to")
    if not cache.is_file():
        raise InputError(f"no cache file {cache}")

    import kvcat
    from kvcat.serving.llama_cpp import write_llama_cpp
    from kvcat.serving.transformers import check_plain, export_prefix, next_position

    compact = kvcat.CompactCache.load(cache)
    check_plain(compact, drop_log_bias=drop_log_bias)
    dtype = compact.metadata.get("dtype", "float32")
    loaded, _ = kvcat.load(model, dtype=dtype, device=device, tokenizer=False)
    compact.check_model(loaded, str(cache))
    compact = compact.to(loaded.device)
    shape: dict[str, Any] = {"positions": positions, "drop_log_bias": drop_log_bias}
    if engine == "transformers":
        export_prefix(compact, loaded, output, **shape)
    else:
        layout = {"dtype": cache_type, "flash_attention": flash_attention, "num_streams": num_streams}
        write_llama_cpp(compact, loaded, output, placeholder=placeholder, **layout, **shape)
    following = next_position(compact, positions)
    print(f"{output}: {compact.mean_slots:g} slots for {engine}, {positions}; the next token stands at {following}")
