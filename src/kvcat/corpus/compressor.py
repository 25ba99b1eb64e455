"""Batches of documents to caches in a store: the same code in a process, a rank or a Ray actor."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcat.cache import CompactCache, fingerprint
from kvcat.compress import (
    Reconstruction,
    Trace,
    reconstruction,
    split_supervision,
    supervised_kl,
)
from kvcat.compress.document_cache import (
    compress_sequence_in_pieces,
    compress_trace,
    is_in_pieces,
    read_document,
)
from kvcat.compress.parts import num_positions_in_parts
from kvcat.corpus.manifest import Row, cache_file
from kvcat.corpus.settings import CorpusSettings
from kvcat.corpus.sources import CorpusDocument
from kvcat.corpus.storage import Storage
from kvcat.errors import InputError
from kvcat.memory import is_out_of_memory
from kvcat.models import model_name
from kvcat.settings import DocumentSettings

HELD_OUT = 0.25
"""Fraction of the supervising positions, the last ones, at which ``check`` measures the KL."""


@dataclass(frozen=True)
class EncodedDocument:
    """A document as token ids.

    Args:
        sequence: its token ids, on the CPU; None if there is a problem.
        problem: why it cannot be encoded.
        supervision: that of its cache.
        is_made: whether the store has its cache, so that it only completes a batch.
    """

    document: CorpusDocument
    sequence: Reconstruction | None = None
    problem: str | None = None
    supervision: str = "reconstruction"
    is_made: bool = False

    @property
    def lengths(self) -> tuple[int, int, int]:
        """The lengths by which documents are sorted; equal for documents that fit in one batch."""
        if self.sequence is None:
            return (0, 0, 0)
        num_tokens = self.sequence.input_ids.shape[1]
        return (num_tokens, self.sequence.prefix_len, self.sequence.supervision_start)


def encode_document(
    document: CorpusDocument,
    tokenizer: PreTrainedTokenizerBase,
    settings: CorpusSettings,
    positions: int,
) -> EncodedDocument:
    """The document as token ids, or why that is not possible.

    A document that fits into the model's positions alone, but not with a part of it repeated, gets
    the supervision "self", unless the settings need the copy.
    """
    if document.reason is not None:
        return EncodedDocument(document, problem=document.reason)
    try:
        sequence = reconstruction(tokenizer, document.text, chat=settings.chat, positions=positions)
    except InputError as error:
        return EncodedDocument(document, problem=str(error))
    supervision = settings.supervision
    is_too_long = num_positions_in_parts(sequence, positions) > positions >= sequence.prefix_len
    learns = settings.learner is not None or settings.compressor.needs_predictions
    if is_too_long and not learns:
        supervision = "self"
    return EncodedDocument(document, sequence, supervision=supervision)


class CorpusCompressor:
    """Makes the caches of batches of documents and saves them in a store.

    Args:
        model, tokenizer: the ones that will answer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: CorpusSettings,
        storage: Storage,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.settings = settings
        self.storage = storage
        self._document = DocumentSettings.of(settings)
        self._about: dict[str, Any] = {
            "method": settings.method,
            "model": model_name(model),
            "fingerprint": fingerprint(model),
        }

    def __call__(self, batch: Sequence[EncodedDocument]) -> list[Row]:
        """The rows of documents of equal length whose caches this call saved in the store.

        A document that cannot be compressed has a row with the reason; the others are compressed
        without it.

        Raises:
            InputError, OSError: a cache cannot be saved, or the method's file of budgets has
                changed.
        """
        start = time.monotonic()
        usable = [encoded for encoded in batch if encoded.sequence is not None]
        if not usable:
            return [self._failed(encoded, encoded.problem or "") for encoded in batch]
        self.settings.check_budgets()
        try:
            caches = list(self._caches(usable))
        except (InputError, MemoryError, RuntimeError) as error:
            if not isinstance(error, InputError) and not is_out_of_memory(error):
                raise
            if len(usable) > 1:
                missing = [encoded for encoded in usable if not encoded.is_made]
                return [row for encoded in missing for row in self([encoded])]
            reason = "the device has not enough memory for the document"
            if isinstance(error, InputError):
                reason = str(error)
            return [self._failed(encoded, reason) for encoded in usable]
        self.settings.check_budgets()  # it may have changed while the method read it
        missing = []
        for encoded, (cache, kl) in zip(usable, caches, strict=True):
            if not encoded.is_made:
                self.storage.save_cache(cache_file(encoded.document.id), cache)
                missing.append((encoded, cache, kl))
        seconds = (time.monotonic() - start) / max(1, len(missing))
        return [self._row(encoded, cache, kl, seconds) for encoded, cache, kl in missing]

    def _caches(
        self, batch: Sequence[EncodedDocument]
    ) -> Iterator[tuple[CompactCache, float | None]]:
        """The cache of every document with its KL on held-out positions, if that is measured."""
        sequences = [encoded.sequence for encoded in batch if encoded.sequence is not None]
        input_ids = torch.cat([sequence.input_ids for sequence in sequences])
        supervision = batch[0].supervision
        kls: list[float | None] = [None] * len(batch)
        if is_in_pieces(self.settings, sequences[0]) and supervision == "reconstruction":
            caches = (self._compress_pieces(sequence) for sequence in sequences)
        else:
            settings = replace(self.settings, supervision=supervision, in_pieces=False)
            sequence = replace(sequences[0], input_ids=input_ids)
            trace = read_document(self.model, sequence, settings, self.settings.compressor)
            together = self._compress(trace).to("cpu")
            caches = (together.select([index]) for index in range(len(batch)))
            if self.settings.check:
                kls = self._held_out_kls(trace)
        for index, (encoded, cache) in enumerate(zip(batch, caches, strict=True)):
            document = encoded.document
            record = replace(cache.record, id=document.id, text_checksum=document.checksum)
            yield replace(cache, record=record), kls[index]

    def _compress_pieces(self, sequence: Reconstruction) -> CompactCache:
        cache = compress_sequence_in_pieces(
            self.model, sequence, self.settings, self.settings.compressor
        )
        return cache.to("cpu")

    def _compress(self, trace: Trace) -> CompactCache:
        return compress_trace(trace, self.settings.compressor, self._document)

    def _held_out_kls(self, trace: Trace) -> list[float | None]:
        """KL(dense || compact) per document at the last quarter of the supervising positions.

        It is measured with another cache of the same size, which is fitted without them.
        """
        fitted, held_out = split_supervision(trace, HELD_OUT)
        return supervised_kl(held_out, self._compress(fitted)).tolist()

    def _row(
        self, encoded: EncodedDocument, cache: CompactCache, kl: float | None, seconds: float
    ) -> Row:
        document = encoded.document
        return Row(
            id=document.id,
            checksum=document.checksum,
            tokens=cache.num_tokens,
            slots=cache.mean_slots,
            bytes=cache.nbytes,
            kl=kl,
            supervision=encoded.supervision,
            seconds=seconds,
            file=cache_file(document.id),
            error=None,
            finished=time.time(),
            **self._about,
        )

    def _failed(self, encoded: EncodedDocument, error: str) -> Row:
        document = encoded.document
        return Row.failed(document.id, document.checksum, error, self._about)
