"""Splits documents by a hash of their names and leaves out near-duplicates."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from typing import Literal

from kvcat.data.documents import INSTALLED, Document, open_documents
from kvcat.errors import InputError
from kvcat.hub import HUB_PREFIX

Split = Literal["train", "validation", "test"]

HELD_OUT_FRACTION = 0.05
MIN_LINE_CHARACTERS = 12  # shorter lines do not count; a document of such lines alone is left out
MAX_SHARED = 0.3  # largest share of a document's lines that may be in other documents


def name_seed(name: str) -> int:
    """64 bits that depend on the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def split_of(split_id: str) -> Split:
    """The split of a document by a hash of its name (``Document.split_id``).

    The first 5 % of the range of the hash are test, the next 5 % validation.
    """
    position = _hash_fraction(split_id)
    if position < HELD_OUT_FRACTION:
        return "test"
    return "validation" if position < 2 * HELD_OUT_FRACTION else "train"


def hash_order(documents: Iterable[Document], seed: int) -> list[Document]:
    """The documents in a random order that depends on their names and the seed alone."""
    return sorted(documents, key=lambda document: name_seed(f"{seed}:{document.id}") / 2**64)


def split_documents(
    source: str, split: Split | Literal["all"], *, limit: int | None = None
) -> list[Document]:
    """The documents of one split of a source (``open_documents``), in the source's order.

    A document is a whole text: pieces of one are joined. The names are relative to the source, so
    that a subfolder, as a source of its own, has other splits than as a part of its folder. The
    installed Python sources hold copies of their files: held-out documents that share many
    lines with training documents are left out. A ``hub:`` source is streamed, and only the first
    ``limit`` documents of the split are read.

    Raises:
        InputError: a local source has no document in that split.
    """
    documents = _joined(open_documents(source))
    if source.startswith(HUB_PREFIX):
        return list(islice(_of_split(documents, split), limit))
    documents = list(documents)
    chosen = list(_of_split(documents, split))
    if source == INSTALLED and split in ("validation", "test"):
        chosen = drop_near_duplicates(chosen, _of_split(documents, "train"))
    if not chosen:
        raise InputError(
            f"{source} has no document in split {split!r} (of {len(documents)}); split 'all' takes "
            "every document"
        )
    return chosen


def _of_split(documents: Iterable[Document], split: Split | Literal["all"]) -> Iterator[Document]:
    """The documents of a split, in their order."""
    for document in documents:
        if split in ("all", split_of(document.split_id)):
            yield document


def _joined(documents: Iterable[Document]) -> Iterator[Document]:
    """The documents, with the consecutive pieces of each text as one."""
    for text_id, group in groupby(documents, lambda document: document.text_id):
        if text_id:
            yield Document(text_id, "".join(piece.text for piece in group))
        else:
            yield from group


def training_splits(source: str, seed: int) -> tuple[list[Document], list[Document]]:
    """Training and validation documents of a source, each in a random order.

    All of the source is read. Of the installed Python sources, documents that share many lines with
    training documents are left out: more than half of some libraries are copies of their files.
    Pieces of one text are in the same split. If no text's hash falls into validation, the training
    text with the closest hash is held out. The seed orders the training documents; validation
    always has the same order.

    Raises:
        InputError: no training document, or no other text than the one that is trained on.
    """
    splits: dict[Split, list[Document]] = {"train": [], "validation": [], "test": []}
    for document in open_documents(source):
        splits[split_of(document.split_id)].append(document)
    train = splits["train"]
    validation = splits["validation"]
    if source == INSTALLED:
        train = drop_copies(hash_order(train, 0))
        validation = drop_near_duplicates(validation, train)
    names = {document.split_id for document in train}
    if not validation and len(names) > 1:
        closest = min(names, key=_hash_fraction)
        validation = [document for document in train if document.split_id == closest]
        train = [document for document in train if document.split_id != closest]
    if not train or not validation:
        texts = {document.split_id for documents in splits.values() for document in documents}
        raise InputError(
            f"{source} has too few documents ({len(texts)}) to train on some and validate on others"
        )
    return hash_order(train, seed), hash_order(validation, 0)


def drop_near_duplicates(
    held_out: Sequence[Document], training: Iterable[Document]
) -> list[Document]:
    """The held-out documents with at most 30 % of their distinct lines in training documents."""
    lines = {document.id: _lines(document.text) for document in held_out}
    all_lines: set[int] = set().union(*lines.values())
    seen: set[int] = set()
    for document in training:
        seen |= all_lines & _lines(document.text)
    return [document for document in held_out if _is_new(lines[document.id], seen)]


def drop_copies(documents: Iterable[Document]) -> list[Document]:
    """The documents with at most 30 % of their distinct lines in documents kept before."""
    seen: set[int] = set()
    kept = []
    for document in documents:
        lines = _lines(document.text)
        if _is_new(lines, seen):
            kept.append(document)
            seen |= lines
    return kept


def _hash_fraction(split_id: str) -> float:
    """A hash of a document's name, in [0, 1)."""
    return name_seed(f"split:{split_id}") / 2**64


def _lines(text: str) -> set[int]:
    """Hashes of the distinct lines of a text, without short ones."""
    lines = (line.strip() for line in text.splitlines())
    return {hash(line) for line in lines if len(line) >= MIN_LINE_CHARACTERS}


def _is_new(lines: set[int], seen: set[int]) -> bool:
    """Whether at most 30 % of a document's lines were seen before."""
    return bool(lines) and len(lines & seen) <= MAX_SHARED * len(lines)
