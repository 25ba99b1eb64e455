"""Batches of documents of equal length, in windows of a corpus that fit into memory."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from kvcat.corpus.compressor import EncodedDocument
from kvcat.corpus.sources import Corpus, CorpusDocument
from kvcat.memory import CHUNK_TOKENS

WINDOW_DOCUMENTS = 1024
WINDOW_CHARACTERS = 1 << 24
BATCH_DOCUMENTS = 8
BATCH_TOKENS = CHUNK_TOKENS
"""Most tokens of a batch with several documents, the copies that supervise included."""

Encode = Callable[[CorpusDocument], EncodedDocument]


Has = Callable[[str, str], bool]
"""Whether a store has the cache of a document, from its id and the checksum of its text."""


@dataclass(frozen=True)
class CorpusSize:
    """How much of a corpus is missing in a store.

    Args:
        num_documents: documents of the corpus.
        num_missing: those that the store does not have.
        missing_characters: characters of the latter.
    """

    num_documents: int
    num_missing: int
    missing_characters: int


def missing_in(has: Has, corpus: Corpus) -> CorpusSize:
    """How much of a corpus a store does not have."""
    num_missing = 0
    missing_characters = 0
    for id, content in corpus.contents.items():
        if not has(id, content.checksum):
            num_missing += 1
            missing_characters += content.num_characters
    return CorpusSize(len(corpus.contents), num_missing, missing_characters)


def planned_batches(
    documents: Iterable[CorpusDocument],
    encode: Encode,
    has: Has,
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
        made = {one.id for one in window if has(one.id, one.checksum)}
        if len(made) == len(window):
            continue
        encoded = [replace(encode(one), is_made=one.id in made) for one in window]
        encoded.sort(key=lambda one: (*one.lengths, one.document.id), reverse=True)
        # another shard begins in every window: the first batch of each has its longest documents
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
