"""Held-out documents: the split is a hash of a document's name; near-duplicates are left out."""

import hashlib
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Literal

from kvcat.data.documents import Document, open_documents
from kvcat.errors import InputError

Split = Literal["train", "validation", "test"]

HELD_OUT_FRACTION = 0.05
MIN_LINE_CHARACTERS = 12  # shorter lines do not count, and a document without a longer one is left out
MAX_SHARED = 0.3  # share of a document's lines that may stand in other documents


def name_seed(name: str) -> int:
    """64 bits that depend on the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def split_of(document_id: str) -> Split:
    """The split of a document by its name: test in the first 5 % of the hash range, then as much validation."""
    position = _position(document_id)
    if position < HELD_OUT_FRACTION:
        return "test"
    return "validation" if position < 2 * HELD_OUT_FRACTION else "train"


def hash_order(documents: Iterable[Document], seed: int) -> list[Document]:
    """The documents in a random order that depends on their names and the seed alone."""
    return sorted(documents, key=lambda document: name_seed(f"{seed}:{document.id}") / 2**64)


def split_documents(source: str, split: Split | Literal["all"], *, limit: int | None = None) -> list[Document]:
    """The documents of one split of a source (``open_documents``), in the source's order.

    The installed Python sources hold copies of their own files; held-out documents that share many lines with training
    documents are left out there. Of a ``hub:`` source, which is streamed, only the first ``limit`` are read.
    ``InputError`` where a local source has no document.
    """
    documents = open_documents(source)
    if source.startswith("hub:"):
        return list(islice((d for d in documents if split in ("all", split_of(d.id))), limit))
    documents = list(documents)
    chosen = [d for d in documents if split in ("all", split_of(d.id))]
    if source == "installed" and split in ("validation", "test"):
        chosen = drop_near_duplicates(chosen, (d for d in documents if split_of(d.id) == "train"))
    if not chosen:
        raise InputError(
            f"{source} has no document in split {split!r} (of {len(documents)}); split 'all' takes every document"
        )
    return chosen


def training_splits(source: str, seed: int) -> tuple[list[Document], list[Document]]:
    """Training and validation documents of a source that is read whole, each in a random order.

    Of the installed Python sources, documents that share many lines with training documents are left out: more than
    half of some libraries are copies of their own files. Where no document's hash falls into validation, the training
    document whose hash is closest to that range is held out. The seed orders the training documents; validation has one
    order. ``InputError`` for fewer than two documents.
    """
    splits: dict[Split, list[Document]] = {"train": [], "validation": [], "test": []}
    for document in open_documents(source):
        splits[split_of(document.id)].append(document)
    train, validation = splits["train"], splits["validation"]
    if source == "installed":
        train = drop_copies(hash_order(train, 0))
        validation = drop_near_duplicates(validation, train)
    if not validation and len(train) > 1:
        validation = [min(train, key=lambda document: _position(document.id))]
        train.remove(validation[0])
    if not train or not validation:
        count = sum(map(len, splits.values()))
        raise InputError(f"{source} has too few documents ({count}) to train on some and validate on others")
    return hash_order(train, seed), hash_order(validation, 0)


def drop_near_duplicates(held_out: Sequence[Document], training: Iterable[Document]) -> list[Document]:
    """The held-out documents of whose distinct lines at most 30 % stand in a training document too."""
    lines = {document.id: _lines(document.text) for document in held_out}
    watched: set[int] = set().union(*lines.values())
    seen: set[int] = set()
    for document in training:
        seen |= watched & _lines(document.text)
    return [document for document in held_out if _is_new(lines[document.id], seen)]


def drop_copies(documents: Iterable[Document]) -> list[Document]:
    """The documents of whose distinct lines at most 30 % stand in one that was kept before."""
    seen: set[int] = set()
    kept = []
    for document in documents:
        if _is_new(lines := _lines(document.text), seen):
            kept.append(document)
            seen |= lines
    return kept


def _position(document_id: str) -> float:
    """Where a document's name falls in the hash range [0, 1)."""
    return name_seed(f"split:{document_id}") / 2**64


def _lines(text: str) -> set[int]:
    return {hash(line) for raw in text.splitlines() if len(line := raw.strip()) >= MIN_LINE_CHARACTERS}


def _is_new(lines: set[int], seen: set[int]) -> bool:
    return bool(lines) and len(lines & seen) <= MAX_SHARED * len(lines)
