"""The command ``kvcat compress``: the cache of a document as a file."""

import hashlib
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from kvcat import option_types as opt
from kvcat.cli import early
from kvcat.cli.options import check_output
from kvcat.errors import InputError
from kvcat.files import MOST_TEXT_BYTES, parse_text, read_text
from kvcat.options import budget_files
from kvcat.settings import DocumentSettings

if TYPE_CHECKING:
    import torch

    from kvcat.compress import Trace
    from kvcat.compress.document_cache import PreparedDocument, Progress


def compress(
    model: opt.Model,
    /,
    text: Path,
    output: opt.Output,
    settings: tyro.conf.OmitArgPrefixes[DocumentSettings],
    protect_text: opt.Unset[Path] = None,
    overwrite: opt.Overwrite = False,
    device: opt.Device = "cpu",
    dtype: opt.Dtype = "float32",
) -> None:
    """Compress the KV cache of a document; `kvcat generate` then answers any number of prompts.

    A KV cache has one slot for each token: a key and a value in every layer and head. --keep 0.2
    makes a cache with a fifth of the slots; a tenth loses some of the right answers about facts
    (docs/leaderboard.md). `kvcat corpus` compresses many documents.

    Example: kvcat compress ./my-model --text report.txt --keep 0.2 -o report.safetensors

    For an engine that needs the same number of slots in every head, use --method
    attention-matching,budgets=equal: it loses more at the same size.

    {methods}

    Args:
        text: Text file (UTF-8) with the document; - is standard input.
        output: Cache file to write (.safetensors).
        protect_text: Text file; its text, without blanks at both ends, stays exact wherever it
            occurs in the document. By default nothing.
    """
    document = _read_text(text)
    if protect_text is not None:
        settings = replace(settings, passages=(_read_text(protect_text).strip(),))
    sources = [text, protect_text, model, *budget_files(settings.method)]
    check_output(output, overwrite=overwrite, sources=sources)
    early.check_method(settings.method)
    early.check_device(device)
    early.check_model(model)

    import kvcat
    from kvcat.compress.document_cache import compress_prepared, prepare_document
    from kvcat.models import load_tokenizer, read_config

    prepared = prepare_document(load_tokenizer(model), read_config(model), document, settings)
    loaded, _ = kvcat.load(model, dtype=dtype, device=device, tokenizer=False)
    # the same command continues from this file after a kill
    command = hashlib.sha256(repr((model, document, settings, dtype)).encode()).hexdigest()
    state = output.with_name(f".{output.name}.{command[:8]}.state")
    cost = _Cost(loaded.device)
    with ExitStack() as bars:
        cache = compress_prepared(loaded, prepared, _progress(prepared, state, cost, bars))
    cost.print(cache.num_tokens)
    cache.save(output)
    state.unlink(missing_ok=True)
    mean_slots = cache.mean_slots
    print(
        f"{output}: {cache.num_tokens} tokens in {mean_slots:g} slots per layer and head, "
        f"{cache.nbytes / 1e6:.2f} MB"
    )
    bits = "" if cache.bits is None else f"{cache.bits} bits, "
    is_fitted = prepared.compressor.fits_queries or prepared.compressor.needs_predictions
    fit = ""
    if is_fitted and mean_slots < cache.num_tokens:  # the whole cache stays as it was
        repeats = settings.supervision == "reconstruction"
        fitted_to = "a repetition of the text" if repeats else "the text's own queries"
        fit = f" (fitted to {fitted_to})"
    print(f"  {settings.method}, {bits}keep {mean_slots / cache.num_tokens:.4g}{fit}")


class _Cost:
    """Seconds and memory of a compression, and those of reading the document alone.

    A document that is repeated in the same pass was read in its share of the pass's tokens.
    """

    def __init__(self, device: "torch.device") -> None:
        from kvcat.memory import PeakMemory

        self._peak = PeakMemory(device)
        self._begun = time.perf_counter()
        self._reading = 0.0
        self._whole_bytes = 0  # of the uncompressed cache

    def end_reading(self) -> None:
        """Keep the seconds so far."""
        self._reading = time.perf_counter() - self._begun

    def end_trace(self, trace: "Trace") -> None:
        """Keep the seconds of reading, unless they are known, and the size of the whole cache."""
        if not self._reading:
            share = trace.prefix_len / trace.input_ids.shape[1]
            self._reading = share * (time.perf_counter() - self._begun)
        self._whole_bytes = sum(states.nbytes for states in (*trace.keys, *trace.values))

    def add_piece(self, trace: "Trace", seconds: float) -> None:
        """Count a piece of the document and the seconds of reading it."""
        self._reading += seconds
        self._whole_bytes += sum(states.nbytes for states in (*trace.keys, *trace.values))

    def print(self, num_tokens: int) -> None:
        """One line of what the document cost; of a long one also what 10,000 tokens would.

        Short ones cost less for each token, because all of their queries see few slots.
        """
        from kvcat.compress.segments import SEGMENT_TOKENS

        seconds = time.perf_counter() - self._begun
        reading = self._reading
        line = f"{seconds:.1f} s, {seconds / reading:.1f} times reading alone ({reading:.1f} s)"
        if num_tokens > SEGMENT_TOKENS:
            line += f"; {seconds * 10_000 / num_tokens:.0f} s for 10,000 tokens"
        peak = self._peak.bytes()
        if peak is not None:
            ratio = peak / self._whole_bytes
            line += f"; memory {peak / 1e6:.0f} MB, {ratio:.1f} times the whole cache's"
        print(line, file=sys.stderr)


def _read_text(path: Path) -> str:
    """The text in a file, or of standard input for ``-``; ``InputError`` if it is blank."""
    name = f"text file {path}"
    if str(path) == "-":
        name = "standard input"
        with open(0, "rb", closefd=False) as stream:
            document = parse_text(stream.read(MOST_TEXT_BYTES + 1), name)
    else:
        document = read_text(path)
    if not document.strip():
        raise InputError(f"{name} is empty")
    return document


def _progress(
    document: "PreparedDocument", state: Path, cost: _Cost, bars: ExitStack
) -> "Progress":
    """A line for every size that is tried, or a bar of gradient steps, closed by ``bars``."""
    from kvcat.compress.document_cache import Progress
    from kvcat.evals import progress_bar

    progress = Progress(on_read=cost.end_reading, on_trace=cost.end_trace, on_piece=cost.add_piece)
    compressor = document.compressor

    def show_size(num_slots: int, kl: float) -> None:
        line = f"{num_slots} slots: KL {kl:z.5f} nats per token, held out"
        print(line, file=sys.stderr, flush=True)

    if document.settings.max_kl is not None or not compressor.resumes:
        return replace(progress, on_try=show_size)
    if not compressor.last_step:
        return progress
    bar = bars.enter_context(progress_bar(compressor.last_step, "step"))

    def show_step(_: int, kl: float) -> None:
        bar.set_postfix_str(f"KL {kl:z.5f}", refresh=False)
        bar.update()

    return replace(progress, state=state, on_step=show_step)
