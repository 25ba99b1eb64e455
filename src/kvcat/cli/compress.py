"""``kvcat compress`` and ``kvcat pack``: a document's cache, compressed once and saved; and for other engines."""

import dataclasses
import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvcat.cli.options import (
    Device,
    Dtype,
    Model,
    Output,
    Overwrite,
    Seed,
    check_keep,
    check_least,
    check_method,
    check_model,
    check_output,
)
from kvcat.errors import InputError
from kvcat.methods import parse_method

if TYPE_CHECKING:
    from kvcat.cache import CompactCache
    from kvcat.compress import Compressor, Trace


def compress(
    model: Model,
    /,
    text: Path,
    output: Output,
    method: str = "attention-matching",
    keep: float | None = None,
    slots: int | None = None,
    max_kl: float | None = None,
    supervision: Literal["reconstruction", "self"] = "reconstruction",
    chat: bool = False,
    overwrite: Overwrite = False,
    seed: Seed = 0,
    device: Device = "cpu",
    dtype: Dtype = "float32",
) -> None:
    """Compress a document's KV cache once; `kvcat generate` then answers from it again and again.

    Example: kvcat compress ./my-model --text report.txt --keep 0.1 -o report.safetensors

    Better caches for more time: --method attention-matching,budgets=adaptive or
    --method gradient,init=attention-matching,num_steps=50.

    Args:
        text: UTF-8 text file: the document.
        output: Cache file to write (.safetensors).
        method: NAME or NAME,option=value,...; docs/compress.md lists them.
        keep: Fraction of the KV slots to KEEP, in (0, 1]; 0.1 if no budget is given.
        slots: In place of --keep: slots per layer and head.
        max_kl: In place of --keep: find the smallest cache whose KL on held-out positions is at most this many nats
            per token. A quarter of the supervising positions is held out.
        supervision: What the compressor fits to: the document repeated after an instruction (needs twice the
            positions), or the document's own queries.
        chat: Put the document into the tokenizer's chat template, as a user's turn; answers then follow it.
    """
    if sum(budget is not None for budget in (keep, slots, max_kl)) > 1:
        raise InputError("give one of --keep, --slots and --max-kl")
    check_method(method)
    name, options = parse_method(method)
    if supervision == "self" and (name == "gradient" or max_kl is not None):
        what = "--max-kl" if max_kl is not None else name
        raise InputError(f"{what} needs --supervision reconstruction: the document alone leaves nothing to predict")
    if max_kl is not None and not max_kl >= 0:
        raise InputError(f"--max-kl is {max_kl:g}; it must not be negative")
    if max_kl is None and slots is None:
        keep = 0.1 if keep is None else keep
        check_keep(keep)
    check_least(1, slots=slots)
    check_least(0, seed=seed)
    document = _read(text)
    check_output(output, overwrite=overwrite)
    check_model(model)

    import kvcat
    from kvcat.compress import seeded_compressor
    from kvcat.compress.documents import document_trace

    compressor = seeded_compressor(name, options, seed)
    loaded, tokenizer = kvcat.load(model, dtype=dtype, device=device)
    trace = document_trace(loaded, tokenizer, document, supervision=supervision, chat=chat)
    digest = hashlib.sha256(repr((model, document, method, keep, slots, seed, chat, dtype)).encode()).hexdigest()
    state = output.with_name(f".{output.name}.{digest[:8]}.state")
    if max_kl is not None:
        cache = _smallest(trace, compressor, max_kl)
    elif isinstance(compressor, kvcat.GradientCompression):
        cache = _optimised(trace, compressor, {"keep_ratio": keep, "num_slots": slots, "resume": state})
    else:
        cache = compressor(trace, keep_ratio=keep, num_slots=slots)
    made = {"supervision": supervision, "chat": "yes" if chat else "no", "dtype": dtype}
    dataclasses.replace(cache, metadata={**cache.metadata, **made}).save(output)
    state.unlink(missing_ok=True)
    kept = cache.mean_slots
    print(
        f"{output}: {cache.num_tokens} tokens in {kept:g} slots a layer and head, {cache.nbytes / 1e6:.2f} MB "
        f"({method}, keep {kept / cache.num_tokens:.4g}, supervision {supervision})"
    )


def pack(
    model: Model,
    /,
    cache: Path,
    output: Output,
    engine: Literal["transformers", "llama.cpp"] = "transformers",
    positions: Literal["rerotated", "original"] = "rerotated",
    drop_log_bias: bool = False,
    cache_type: Literal["float16", "float32", "bfloat16"] = "float16",
    flash_attention: bool = True,
    num_streams: int = 1,
    placeholder: int = 0,
    overwrite: Overwrite = False,
    device: Device = "cpu",
) -> None:
    """Write a saved cache as a file for an engine that knows no kvcat; docs/engines.md shows how each reads it.

    The cache must have no log-bias: compress with --method attention-matching,log_bias=false, or by eviction.

    Example: kvcat pack ./my-model --cache report.safetensors -o report.bin --engine llama.cpp

    Args:
        cache: Cache file that `kvcat compress` wrote.
        output: File to write.
        engine: transformers: plain tensors in safetensors; llama.cpp: the state of a sequence.
        positions: rerotated looks like an ordinary short prefix; original needs an engine that takes positions.
        drop_log_bias: Leave out the log-bias, which changes the answers.
        cache_type: Of llama.cpp's cache (--cache-type-k, --cache-type-v).
        flash_attention: Whether llama.cpp will run with flash attention.
        num_streams: llama.cpp's --parallel, unless its cache is unified.
        placeholder: Token id that llama.cpp gets for every slot.
    """
    check_output(output, overwrite=overwrite)
    check_least(1, num_streams=num_streams)
    check_least(0, placeholder=placeholder)
    if not cache.is_file():
        raise InputError(f"no cache file {cache}")
    check_model(model)

    import kvcat
    from kvcat.serving import check_plain, export_prefix, next_position, write_llama_cpp

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
        layout: dict[str, Any] = {"dtype": cache_type, "flash_attention": flash_attention, "num_streams": num_streams}
        write_llama_cpp(compact, loaded, output, placeholder=placeholder, **layout, **shape)
    following = next_position(compact, positions)
    print(f"{output}: {compact.mean_slots:g} slots for {engine}, {positions}; the next token stands at {following}")


def _smallest(trace: "Trace", compressor: "Compressor", max_kl: float) -> "CompactCache":
    from kvcat.compress import smallest_cache

    def tell(slots: int, kl: float) -> None:
        print(f"{slots} slots: KL {kl:.5f} nats per token held out", file=sys.stderr, flush=True)

    found = smallest_cache(trace, compressor, max_kl, on_try=tell)
    told = {"max_kl": f"{max_kl:g}", "held_out_kl": f"{found.kl:.6g}"}
    return dataclasses.replace(found.cache, metadata={**found.cache.metadata, **told})


def _optimised(trace: "Trace", compressor: Any, options: dict[str, Any]) -> "CompactCache":
    """With a bar, and a state from which the same command continues after a kill."""
    from kvcat.evals import Progress

    with Progress(compressor.num_steps, "step") as bar:
        return compressor(trace, on_step=lambda _, kl: bar.advance(1, f"KL {kl:.5f}"), **options)


def _read(path: Path) -> str:
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
