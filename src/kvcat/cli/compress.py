"""``kvcat compress``: a document's cache, compressed once and saved."""

import dataclasses
import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvcat.cli.options import METHOD_HELP, MODEL_HELP, DeviceOption, DtypeOption, SeedOption, check_keep, check_method
from kvcat.errors import InputError

if TYPE_CHECKING:
    from kvcat.cache import CompactCache
    from kvcat.compress import Compressor, GradientCompression, Trace


def compress_command(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    text: Annotated[Path, typer.Option(help="UTF-8 text file: the document.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Cache file to write (.safetensors).")],
    method: Annotated[str, typer.Option(help=f"One of: {METHOD_HELP}")] = "attention-matching",
    keep: Annotated[
        float | None, typer.Option(help="Fraction of the KV slots to KEEP, in (0, 1].", show_default="0.1")
    ] = None,
    slots: Annotated[int | None, typer.Option(min=1, help="Slots per layer and head, in place of --keep.")] = None,
    max_kl: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="In place of --keep: the smallest cache whose KL on held-out positions is at most so many nats per "
            "token; a quarter of the supervising positions is held out.",
        ),
    ] = None,
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

    Better caches for more time: --method attention-matching,budgets=adaptive or --method
    gradient,init=attention-matching,num_steps=50.
    """
    if sum(budget is not None for budget in (keep, slots, max_kl)) > 1:
        raise InputError("give one of --keep, --slots and --max-kl")
    name = check_method(method)
    if name == "gradient" and supervision == "self":
        raise InputError("gradient needs --supervision reconstruction: the prefix alone gives it nothing to predict")
    if max_kl is not None and supervision == "self":
        raise InputError("--max-kl needs --supervision reconstruction: the prefix alone leaves nothing to judge by")
    if keep is not None:
        check_keep(keep)
    elif slots is None and max_kl is None:
        keep = 0.1
    if output.is_dir():
        raise InputError(f"{output} is a folder: name the cache file to write")
    if output.exists() and not overwrite:
        raise InputError(f"{output} exists; --overwrite replaces it")
    if not output.parent.is_dir():
        raise InputError(f"no folder {output.parent} to write {output.name} to")
    document = read_document(text)

    import kvcat
    from kvcat.compress import parse_method, seeded_compressor
    from kvcat.compress.documents import document_trace

    name, options = parse_method(method)
    compressor = seeded_compressor(name, options, seed)
    loaded, tokenizer = kvcat.load(model, dtype=dtype, device=device)
    trace = document_trace(loaded, tokenizer, document, supervision=supervision, chat=chat)
    digest = hashlib.sha256(repr((model, document, method, keep, slots, seed, chat, dtype)).encode()).hexdigest()
    state = output.with_name(f".{output.name}.{digest[:8]}.state")
    if max_kl is not None:
        cache = _smallest(trace, compressor, max_kl)
    elif isinstance(compressor, kvcat.GradientCompression):
        cache = _optimised(trace, compressor, keep, slots, state)
    else:
        cache = compressor(trace, keep_ratio=keep, num_slots=slots)
    told = {"supervision": supervision, "chat": "yes" if chat else "no", "dtype": dtype}
    cache = dataclasses.replace(cache, metadata={**cache.metadata, **told})
    cache.save(output)
    state.unlink(missing_ok=True)
    kept = cache.mean_slots
    print(
        f"{output}: {cache.num_tokens} tokens in {kept:g} slots a layer and head, {cache.nbytes / 1e6:.2f} MB "
        f"({method}, keep {kept / cache.num_tokens:.4g}, supervision {supervision})"
    )


def _smallest(trace: "Trace", compressor: "Compressor", max_kl: float) -> "CompactCache":
    from kvcat.compress import smallest_cache

    def tell(slots: int, kl: float) -> None:
        print(f"{slots} slots: KL {kl:.5f} nats per token held out", file=sys.stderr, flush=True)

    found = smallest_cache(trace, compressor, max_kl, on_try=tell)
    told = {"max_kl": f"{max_kl:g}", "held_out_kl": f"{found.kl:.6g}"}
    return dataclasses.replace(found.cache, metadata={**found.cache.metadata, **told})


def _optimised(
    trace: "Trace", compressor: "GradientCompression", keep: float | None, slots: int | None, state: Path
) -> "CompactCache":
    """With a bar, and a state from which the same command goes on after a kill."""
    from kvcat.evals.progress import EvalProgress

    with EvalProgress(compressor.num_steps, name="step") as bar:
        return compressor(
            trace, keep_ratio=keep, num_slots=slots, resume=state,
            on_step=lambda _, kl: bar.advance(1, f"KL {kl:.5f}"),
        )  # fmt: skip


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
