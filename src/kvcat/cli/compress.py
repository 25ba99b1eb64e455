"""The command ``kvcat compress``: the cache of a document as a file, or a store of a corpus."""

import dataclasses
import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcat.cli import early
from kvcat.cli import options as opt
from kvcat.cli.corpus import compress_to_store
from kvcat.errors import InputError
from kvcat.files import read_text
from kvcat.options import parse_spec

if TYPE_CHECKING:
    from kvcat.cache import CompactCache
    from kvcat.compress import Compressor, GradientCompression, Trace


def compress(
    model: opt.Model,
    /,
    output: opt.OutputAddress,
    text: opt.Unset[Path] = None,
    corpus: opt.Unset[str] = None,
    method: str = "attention-matching",
    keep: opt.Unset[opt.Fraction] = None,
    slots: opt.Unset[opt.Count] = None,
    max_kl: opt.Unset[opt.Nats] = None,
    mb: opt.Unset[opt.Megabytes] = None,
    bits: opt.CacheBits = "auto",
    supervision: opt.Supervision = "reconstruction",
    chat: bool = False,
    room: opt.Unset[opt.Count] = None,
    protect: opt.Unset[opt.Protect] = None,
    protect_text: opt.Unset[Path] = None,
    overwrite: opt.Overwrite = False,
    seed: opt.Seed = 0,
    device: opt.Device = "cpu",
    dtype: opt.Dtype = "float32",
    text_column: opt.Unset[str] = None,
    id_column: opt.Unset[str] = None,
    check: bool = False,
    shard: opt.Unset[str] = None,
    ray: opt.Unset[str] = None,
    workers: opt.Unset[opt.Count] = None,
) -> None:
    """Compress the KV cache of a document; `kvcat generate` then answers any number of prompts.

    A KV cache has one slot for each token: a key and a value in every layer and head. --keep 0.1
    makes a cache with a tenth of the slots. For questions about facts choose --keep 0.2: a tenth
    loses some of the right answers (docs/leaderboard.md).

    Example: kvcat compress ./my-model --text report.txt --keep 0.1 -o report.safetensors

    With --corpus, all documents of a corpus are compressed into a store; the model is loaded once.
    The same command continues a stopped run, and compresses a document again if its text changed.

    Example: kvcat compress ./my-model --corpus articles.parquet --keep 0.1 -o store

    For an engine that needs the same number of slots in every head, use --method
    attention-matching,budgets=equal: it loses more at the same size.

    Args:
        output: Cache file to write (.safetensors); with --corpus a folder or an address such as
            s3://bucket/store.
        text: Text file (UTF-8) with the document; or give --corpus.
        corpus: Instead of --text: a folder of text files, a .jsonl or .parquet file, or hub:NAME.
        method: NAME or NAME,option=value,...; docs/compress.md lists names and options.
        keep: Fraction of the KV slots to KEEP, in (0, 1]; 0.1 if no size is given.
        slots: Instead of --keep: number of slots per layer and head.
        max_kl: Instead of --keep: find the smallest cache with at most this held-out KL per token.
        mb: Instead of --keep: largest size of keys, values, scales and log-bias in millions of
            bytes; chooses slots and, unless --bits is given, bits.
        bits: Bits of keys and values; 16: the type of the model; auto: 16 or, with --mb, as few as
            are best for that size.
        chat: Put document and prompts into the tokenizer's chat template, as user turns.
        room: Number of tokens that prompt and answer may have. Only models whose rotary factors
            depend on the length (LongRoPE), or with sliding windows, need it.
        text_column: Column of a corpus that holds the texts; by default text.
        id_column: Column of a corpus that holds the ids of the documents; by default id.
        check: Measure every document's KL on held-out positions; about doubles the time.
        shard: RANK/COUNT: compress part RANK of COUNT parts of a corpus, RANK from 0; several
            processes share a store. By default all of the corpus.
        ray: Compress the corpus on a Ray cluster: its address, or auto. By default in this process.
        workers: Most Ray workers at a time; by default as many as the cluster has devices.
        protect: What stays exact in every head and layer, inside the budget: system, all that the
            chat template writes before the document (needs --chat). By default nothing.
        protect_text: Text file; its text, without blanks at both ends, stays exact wherever it
            occurs in the document. By default nothing.
    """
    if corpus is not None:
        compress_to_store(
            model,
            output,
            corpus,
            text=text,
            method=method,
            keep=keep,
            slots=slots,
            bits=bits,
            unsupported={
                "--max-kl": max_kl,
                "--mb": mb,
                "--overwrite": overwrite or None,
                "--protect": protect,
                "--protect-text": protect_text,
            },
            supervision=supervision,
            chat=chat,
            room=room,
            seed=seed,
            device=device,
            dtype=dtype,
            text_column=text_column,
            id_column=id_column,
            check=check,
            shard=shard,
            ray=ray,
            workers=workers,
        )
        return
    corpus_options = {
        "--text-column": text_column,
        "--id-column": id_column,
        "--check": check or None,
        "--shard": shard,
        "--ray": ray,
        "--workers": workers,
    }
    for name, value in corpus_options.items():
        if value is not None:
            raise InputError(f"{name} needs --corpus")
    if text is None:
        raise InputError("missing --text or --corpus (see kvcat compress --help)")
    _compress_text(
        model,
        Path(output),
        text,
        method=method,
        keep=keep,
        slots=slots,
        max_kl=max_kl,
        mb=mb,
        bits=bits,
        supervision=supervision,
        chat=chat,
        room=room,
        protect=protect,
        protect_text=protect_text,
        overwrite=overwrite,
        seed=seed,
        device=device,
        dtype=dtype,
    )


def _compress_text(
    model: str,
    output: Path,
    text: Path,
    *,
    method: str,
    keep: float | None,
    slots: int | None,
    max_kl: float | None,
    mb: float | None,
    bits: str,
    supervision: str,
    chat: bool,
    room: int | None,
    protect: str | None,
    protect_text: Path | None,
    overwrite: bool,
    seed: int,
    device: str,
    dtype: str,
) -> None:
    """Write the cache of one document."""
    num_budgets = sum(budget is not None for budget in (keep, slots, max_kl, mb))
    if num_budgets > 1:
        raise InputError("give one of --keep, --slots, --max-kl and --mb")
    num_bytes = None if mb is None else int(mb * 1e6)
    keep_ratio = keep if num_budgets else 0.1
    document = _read_text(text)
    passages = _passages(protect_text, document)
    if protect == "system" and not chat:
        raise InputError("--protect system needs --chat: only a chat template has a system turn")
    has_protection = protect is not None or bool(passages)
    opt.check_output(output, overwrite=overwrite, sources=[text, protect_text, model])
    early.check_method(method)
    name, options = parse_spec(method)
    if bits != "auto" and "bits" in options:
        raise InputError(f"--bits {bits} and the bits of {method}: give one of them")
    if bits not in ("auto", "16"):
        options["bits"] = bits
    if has_protection and "bits" in options:
        raise InputError(f"protected slots are exact, not in {options['bits']} bits")
    if has_protection and name.startswith("kvpress:"):
        raise InputError(f"{name} protects no slots: leave out --protect and --protect-text")
    learner = "--max-kl" if max_kl is not None else name
    if supervision == "self" and learner in ("gradient", "--max-kl"):
        raise InputError(
            f"{learner} needs --supervision reconstruction: "
            "the document alone leaves nothing to predict"
        )
    early.check_device(device)
    early.check_model(model)

    import kvcat
    from kvcat.compress import (
        protected_ranges,
        protecting,
        reconstruction,
        seeded_compressor,
        slots_and_bits,
    )
    from kvcat.compress.calibration import budget_files
    from kvcat.compress.documents import check_length, sequence_trace
    from kvcat.models import load_tokenizer, positions_of, read_config

    opt.check_output(output, overwrite=overwrite, sources=budget_files(method))
    compressor = seeded_compressor(name, options, seed)
    config = read_config(model)
    tokenizer = load_tokenizer(model)
    sequence = reconstruction(tokenizer, document, chat=chat, positions=positions_of(config))
    check_length(config, sequence, supervision)
    ranges = protected_ranges(
        tokenizer,
        document,
        system=protect == "system",
        passages=passages,
        chat=chat,
    )
    loaded, _ = kvcat.load(model, dtype=dtype, device=device, tokenizer=False)
    trace = sequence_trace(loaded, sequence, supervision=supervision, room=room)
    trace = protecting(trace, ranges)
    if num_bytes is not None:
        keep_ratio = None
        is_chosen = bits == "16" or compressor.bits or has_protection
        choices = [compressor.bits] if is_chosen else None
        slots, cache_bits = slots_and_bits(trace, num_bytes, choices)
        compressor = compressor if cache_bits is None else compressor.in_bits(cache_bits)
    command = (model, document, method, keep_ratio, slots, seed, chat, room, dtype)
    protected = (trace.protected,) if trace.protected else ()
    state = _state_file(output, (*command, *protected))
    if max_kl is not None:
        cache = _smallest_cache(trace, compressor, max_kl)
    elif isinstance(compressor, kvcat.GradientCompression) and compressor.num_steps:
        cache = _trained_cache(trace, compressor, keep_ratio, slots, state)
    else:
        cache = compressor(trace, keep_ratio=keep_ratio, num_slots=slots)
    if num_bytes is not None and cache.nbytes > num_bytes:
        raise InputError(f"{method} makes {cache.nbytes} bytes, more than {num_bytes}: give fewer")
    cache.save(output)
    state.unlink(missing_ok=True)
    mean_slots = cache.mean_slots
    print(
        f"{output}: {cache.num_tokens} tokens in {mean_slots:g} slots per layer and head, "
        f"{cache.nbytes / 1e6:.2f} MB"
    )
    print(
        f"  {method}, {_bits_text(cache)}keep {mean_slots / cache.num_tokens:.4g}, "
        f"supervision {supervision}"
    )


def _bits_text(cache: "CompactCache") -> str:
    """The bits of a cache as part of a line; empty for ordinary numbers."""
    return "" if cache.bits is None else f"{cache.bits} bits, "


def _read_text(path: Path) -> str:
    """The text in a file; ``InputError`` if it is blank."""
    document = read_text(path)
    if not document.strip():
        raise InputError(f"text file {path} is empty")
    return document


def _passages(path: Path | None, document: str) -> tuple[str, ...]:
    """The text to protect, without blanks at both ends; ``InputError`` if it does not occur."""
    if path is None:
        return ()
    passage = _read_text(path).strip()
    if passage not in document:
        raise InputError(f"the text of {path} is not in the document")
    return (passage,)


def _state_file(output: Path, command: tuple[Any, ...]) -> Path:
    """The file of saved progress, from which the same command continues after a kill."""
    digest = hashlib.sha256(repr(command).encode()).hexdigest()
    return output.with_name(f".{output.name}.{digest[:8]}.state")


def _smallest_cache(trace: "Trace", compressor: "Compressor", max_kl: float) -> "CompactCache":
    """The smallest cache with at most this KL on held-out positions; prints every attempt."""
    from kvcat.compress import smallest_cache

    def show(num_slots: int, kl: float) -> None:
        line = f"{num_slots} slots: KL {kl:z.5f} nats per token, held out"
        print(line, file=sys.stderr, flush=True)

    smallest = smallest_cache(trace, compressor, max_kl, on_try=show)
    record = smallest.cache.record
    options = {**record.options, "max_kl": f"{max_kl:g}"}
    record = dataclasses.replace(record, options=options, held_out_kl=smallest.kl)
    return dataclasses.replace(smallest.cache, record=record)


def _trained_cache(
    trace: "Trace",
    compressor: "GradientCompression",
    keep_ratio: float | None,
    num_slots: int | None,
    state: Path,
) -> "CompactCache":
    """The cache that a compressor trains, with a progress bar; continues from ``state``."""
    from kvcat.evals import progress_bar

    with progress_bar(compressor.num_steps, "step") as bar:

        def show(_: int, kl: float) -> None:
            bar.set_postfix_str(f"KL {kl:z.5f}", refresh=False)
            bar.update()

        return compressor(
            trace, keep_ratio=keep_ratio, num_slots=num_slots, resume=state, on_step=show
        )
