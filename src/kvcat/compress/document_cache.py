"""The cache of a document: what the command, a corpus, Ray and Python users call.

text -> token ids -> trace -> compressor of a size -> compact cache
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from kvcat.cache import BeyondHalfError, CompactCache
from kvcat.cache.ranges import Range
from kvcat.compress.base import Compressor, slots_for
from kvcat.compress.compare import NotReachedError, smallest_cache
from kvcat.compress.documents import (
    check_length,
    protected_ranges,
    reconstruction,
    sequence_trace,
)
from kvcat.compress.pieces import check_pieces, compress_in_pieces, num_pieces
from kvcat.compress.prefix import protecting
from kvcat.compress.quantized import slots_and_bits
from kvcat.compress.registry import seeded_compressor
from kvcat.compress.trace import Reconstruction, Trace
from kvcat.errors import InputError, check_kind
from kvcat.models import check_supported, positions_of
from kvcat.settings import DEFAULT_BITS, CacheSettings, DocumentSettings

OnTry = Callable[[int, float], None]
"""Called with a number (of slots, of a step) and the KL found there, nats per token."""


@dataclass(frozen=True)
class Progress:
    """What a long compression reports, and where it saves what is done.

    Args:
        state: file from which the same gradient run continues after a kill; None saves nothing.
        on_read: called when a long document was read, before it is repeated in parts.
        on_trace: called with the document's trace.
        on_piece: called with the trace of each piece that was read, and the seconds of reading it,
            for a document that is compressed in pieces.
        on_step: called after every gradient step with its number and the KL before it.
        on_try: called after every size that ``max_kl`` tries with the slots and the KL.
    """

    state: Path | None = None
    on_read: Callable[[], None] = lambda: None
    on_trace: Callable[[Trace], None] = lambda _: None
    on_piece: Callable[[Trace, float], None] = lambda _trace, _seconds: None
    on_step: OnTry | None = None
    on_try: OnTry | None = None


@dataclass(frozen=True)
class PreparedDocument:
    """A document that can be compressed: everything that needs no weights, checked.

    Args:
        settings: how the cache is made.
        compressor: that of the settings.
        sequence: token ids, with the copy that supervises.
        protected: ranges of the tokens whose slots stay exact.
    """

    settings: DocumentSettings
    compressor: Compressor
    sequence: Reconstruction
    protected: Sequence[Range]


def compress_document(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    settings: DocumentSettings | None = None,
) -> CompactCache:
    """The compact cache of a document, as ``kvcat compress`` makes it.

    Args:
        model, tokenizer: the ones that will answer.
        settings: how the cache is made; None: the default method with a fifth of the slots.

    Raises:
        InputError: an empty document, one too long for the model's positions, or settings that do
            not fit it.
    """
    settings = DocumentSettings() if settings is None else settings
    check_kind(DocumentSettings, "a DocumentSettings or None", settings=settings)
    check_supported(model)
    return compress_prepared(model, prepare_document(tokenizer, model.config, text, settings))


def prepare_document(
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    text: str,
    settings: DocumentSettings,
) -> PreparedDocument:
    """A document for ``compress_prepared``; raises what ``compress_document`` does.

    Args:
        settings: how its cache will be made.
    """
    compressor = document_compressor(settings)
    positions = positions_of(config)
    sequence = reconstruction(tokenizer, text, chat=settings.chat, positions=positions)
    in_parts = _repeats_in_parts(settings, compressor)
    check_length(config, sequence, settings.supervision, in_parts=in_parts)
    if is_in_pieces(settings, sequence):
        check_pieces(config, sequence, _num_slots(sequence, settings))
    protected = protected_ranges(
        tokenizer,
        text,
        system=settings.protect == "system",
        passages=settings.passages,
        chat=settings.chat,
    )
    return PreparedDocument(settings, compressor, sequence, protected)


def compress_prepared(
    model: PreTrainedModel, document: PreparedDocument, progress: Progress | None = None
) -> CompactCache:
    """The compact cache of a prepared document, which reports on the way."""
    progress = progress or Progress()
    settings = document.settings
    compressor = document.compressor
    if is_in_pieces(settings, document.sequence):
        return compress_sequence_in_pieces(
            model, document.sequence, settings, compressor, progress.on_piece
        )
    trace = read_document(model, document.sequence, settings, compressor, progress.on_read)
    progress.on_trace(trace)
    return compress_trace(protecting(trace, document.protected), compressor, settings, progress)


def is_in_pieces(settings: CacheSettings, sequence: Reconstruction) -> bool:
    """Whether a document is compressed in pieces: it has more than one, and the settings say so."""
    return settings.in_pieces and num_pieces(sequence.prefix_len) > 1


def compress_sequence_in_pieces(
    model: PreTrainedModel,
    sequence: Reconstruction,
    settings: CacheSettings,
    compressor: Compressor,
    on_piece: Callable[[Trace, float], None] = lambda _trace, _seconds: None,
) -> CompactCache:
    """The cache of a document that is compressed in pieces, in the size that settings name.

    Args:
        sequence: of one document.
        compressor: that of the settings (``document_compressor``).
        on_piece: as in ``Progress``.
    """
    num_slots = _num_slots(sequence, settings)
    cache = compress_in_pieces(model, sequence, compressor.in_bits(None), num_slots, on_piece)
    if compressor.bits is not None:
        return cache.quantize(compressor.bits)
    if settings.bits == "auto":
        with suppress(BeyondHalfError):  # nobody asked for bits: the numbers stay as they are
            return cache.quantize(DEFAULT_BITS)
    return cache


def _num_slots(sequence: Reconstruction, settings: CacheSettings) -> int:
    """The slots of a document, per layer and head, whose size is no number of bytes."""
    size = settings.size
    return slots_for(sequence.prefix_len, size.get("keep_ratio"), size.get("num_slots"))


def document_compressor(settings: CacheSettings) -> Compressor:
    """The method of the settings with its options, bits and seed.

    Raises:
        InputError: an unknown method or option, a value that is not valid, or a method that cannot
            protect slots or learn from the document alone where the settings want that.
    """
    name, options = settings.method_options()
    compressor = seeded_compressor(name, options, settings.seed)
    settings.check_learner(name if compressor.needs_predictions else None)
    if isinstance(settings, DocumentSettings) and settings.has_protection:
        compressor.check_protects()
    if settings.in_pieces:
        if not compressor.fits_queries:
            raise InputError(
                f"{name} fits no slots to a repetition: in_pieces needs attention-matching "
                "or refined"
            )
        if compressor.bits not in (None, DEFAULT_BITS):
            raise InputError(
                f"in_pieces rounds the slots at the end, for which {compressor.bits} bits are too "
                f"few: give bits {DEFAULT_BITS} or 16"
            )
    return compressor


def read_document(
    model: PreTrainedModel,
    sequence: Reconstruction,
    settings: CacheSettings,
    compressor: Compressor,
    on_read: Callable[[], None] = lambda: None,
) -> Trace:
    """The trace of a document, or of several of equal length, for the method of the settings.

    ``on_read`` is as in ``sequence_trace``.
    """
    return sequence_trace(
        model,
        sequence,
        supervision=settings.supervision,
        room=settings.room,
        in_parts=_repeats_in_parts(settings, compressor),
        on_read=on_read,
    )


def _repeats_in_parts(settings: CacheSettings, compressor: Compressor) -> bool:
    """Whether nothing learns from the predictions of one repetition of the whole document."""
    return settings.learner is None and not compressor.needs_predictions


def compress_trace(
    trace: Trace,
    compressor: Compressor,
    settings: DocumentSettings,
    progress: Progress | None = None,
) -> CompactCache:
    """The cache of a document, or of several of equal length, in the size that settings name.

    Args:
        compressor: that of the settings (``document_compressor``).
        settings: how the cache is made; with ``max_kl`` every document has to reach the KL, and
            ``max_megabytes`` are those of each document.
        progress: what is reported on the way.
    """
    progress = progress or Progress()
    has_default_bits = settings.bits == "auto" and compressor.bits is None
    if has_default_bits and settings.max_megabytes is None:
        # nobody asked for bits: the numbers stay as they are
        with suppress(BeyondHalfError, NotReachedError):
            return compress_trace(trace, compressor.in_bits(DEFAULT_BITS), settings, progress)
    size: dict[str, Any] = settings.size
    if settings.max_kl is not None:
        smallest = smallest_cache(trace, compressor, settings.max_kl, on_try=progress.on_try)
        record = smallest.cache.record
        options = {**record.options, "max_kl": f"{settings.max_kl:g}"}
        record = replace(record, options=options, held_out_kl=smallest.kl)
        return replace(smallest.cache, record=record)
    num_bytes = None
    if settings.max_megabytes is not None:
        num_bytes = int(settings.max_megabytes * 1e6) * trace.batch_size
        choices = None if has_default_bits else [compressor.bits]
        num_slots, bits = slots_and_bits(trace, num_bytes, choices)
        size = {"num_slots": num_slots}
        compressor = compressor if bits is None else compressor.in_bits(bits)
    run: Any = compressor
    if compressor.resumes:
        cache = run(trace, **size, resume=progress.state, on_step=progress.on_step)
    else:
        cache = run(trace, **size)
    if num_bytes is not None and cache.nbytes > num_bytes:
        raise InputError(
            f"{settings.method} makes {cache.nbytes} bytes, more than {num_bytes}: name a number "
            "of slots, or a smaller fraction, instead of megabytes"
        )
    return cache
