"""Batches of documents of equal length, in windows of a corpus that fit into memory."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from kvcat.chunks import CHUNK_TOKENS
from kvcat.corpus.compressor import EncodedDocument
from kvcat.corpus.sources import CorpusDocument
from kvcat.errors import InputError

WINDOW_DOCUMENTS = 1024
WINDOW_CHARACTERS = 1 << 24
BATCH_DOCUMENTS = 8
BATCH_TOKENS = CHUNK_TOKENS
"""Most tokens of a batch with several documents, the copies that supervise included."""

Encode = Callable[[CorpusDocument], EncodedDocument]


@dataclass(frozen=True)
class CorpusSize:
    """What a first reading of a corpus shows.

    Args:
        num_documents: documents of the corpus.
        num_missing: those that the store does not have.
        missing_characters: characters of the latter.
    """

    num_documents: int
    num_missing: int
    missing_characters: int


def measure_corpus(
    documents: Iterable[CorpusDocument], has: Callable[[CorpusDocument], bool]
) -> CorpusSize:
    """The size of a corpus, and of what a store does not have.

    Raises:
        InputError: two documents with one id, or no document.
    """
    ids: set[str] = set()
    num_missing = 0
    missing_characters = 0
    for document in documents:
        if document.id in ids:
            raise InputError(f"two documents of the corpus have the id {document.id[:80]!r}")
        ids.add(document.id)
        if not has(document):
            num_missing += 1
            missing_characters += len(document.text)
    if not ids:
        raise InputError("the corpus has no document")
    return CorpusSize(len(ids), num_missing, missing_characters)


def planned_batches(
    documents: Iterable[CorpusDocument],
    encode: Encode,
    has: Callable[[CorpusDocument], bool],
    shard: tuple[int, int] | None = None,
) -> Iterator[list[EncodedDocument]]:
    """Batches of equal length, the longest of a window first, each with a document to make.

    Which documents share a batch, and which shard makes it, depends on the corpus alone. So a run
    that continues makes the same caches as one that was not interrupted.

    Args:
        documents: the corpus, in order.
        encode: a document as token ids.
        has: whether the store has the cache of a document.
        shard: number and count; None: all batches.
    """
    number, count = shard or (0, 1)
    for window_index, window in enumerate(_windows(documents)):
        made = {document.id for document in window if has(document)}
        if len(made) == len(window):
            continue
        encoded = [replace(encode(one), is_made=one.id in made) for one in window]
        encoded.sort(key=lambda one: (*one.lengths, one.document.id), reverse=True)
        for index, batch in enumerate(_equal_batches(encoded), start=window_index):
            is_mine = index % count == number
            if is_mine and not all(one.is_made for one in batch):
                yield batch


def _windows(documents: Iterable[CorpusDocument]) -> Iterator[list[CorpusDocument]]:
    """Consecutive documents, few enough to hold in memory."""
    window: list[CorpusDocument] = []
    num_characters = 0
    for document in documents:
        window.append(document)
        num_characters += len(document.text)
        if len(window) >= WINDOW_DOCUMENTS or num_characters >= WINDOW_CHARACTERS:
            yield window
            window = []
            num_characters = 0
    if window:
        yield window


def _equal_batches(documents: Iterable[EncodedDocument]) -> Iterator[list[EncodedDocument]]:
    """Consecutive documents of equal length; those without tokens are alone."""
    batch: list[EncodedDocument] = []
    for encoded in documents:
        num_tokens = encoded.lengths[0]
        is_full = len(batch) >= BATCH_DOCUMENTS or (len(batch) + 1) * num_tokens > BATCH_TOKENS
        if batch and (is_full or num_tokens == 0 or batch[0].lengths != encoded.lengths):
            yield batch
            batch = []
        batch.append(encoded)
    if batch:
        yield batch
