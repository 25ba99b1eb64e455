"""What is held out: a function of a document's name alone."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Literal

from kvcat.data.rows import Document

Split = Literal["train", "validation", "test"]

HELD_OUT_FRACTION = 0.05
MIN_LINE_CHARACTERS = 12


def name_seed(name: str) -> int:
    """64 bits that depend on the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def _unit(name: str) -> float:
    return name_seed(name) / 2**64


def split_position(document_id: str) -> float:
    """Where a document's name falls in the hash range [0, 1), from which its split follows."""
    return _unit(f"split:{document_id}")


def split_of(document_id: str, fraction: float = HELD_OUT_FRACTION) -> Split:
    """The split a document belongs to: below ``fraction`` of the hash range test, the next as much validation.

    Args:
        document_id: the document's name.
        fraction: share of the documents in each held-out split, in (0, 0.5).
    """
    position = split_position(document_id)
    if position < fraction:
        return "test"
    return "validation" if position < 2 * fraction else "train"


def hash_order(documents: Iterable[Document], seed: int) -> list[Document]:
    """The documents in a random order that depends on their names and the seed alone."""
    return sorted(documents, key=lambda document: _unit(f"{seed}:{document.id}"))


def _lines(text: str) -> set[int]:
    return {hash(line) for raw in text.splitlines() if len(line := raw.strip()) >= MIN_LINE_CHARACTERS}


def drop_near_duplicates(
    held_out: Sequence[Document], training: Iterable[Document], max_shared: float = 0.3
) -> list[Document]:
    """The held-out documents of whose distinct lines at most ``max_shared`` stand in a training document too.

    Lines shorter than 12 characters do not count. Libraries hold many copies of their own files; a copy on the other
    side of the split would measure memory.
    """
    lines = {document.id: _lines(document.text) for document in held_out}
    watched = set().union(*lines.values()) if lines else set()
    seen: set[int] = set()
    for document in training:
        seen |= watched & _lines(document.text)
    return [d for d in held_out if lines[d.id] and len(lines[d.id] & seen) <= max_shared * len(lines[d.id])]


def drop_copies(documents: Iterable[Document], max_shared: float = 0.3) -> list[Document]:
    """The documents of whose distinct lines at most ``max_shared`` stand in one kept before it, in their order.

    Lines shorter than 12 characters do not count, and a document without a longer one is left out.
    """
    seen: set[int] = set()
    kept = []
    for document in documents:
        lines = _lines(document.text)
        if lines and len(lines & seen) <= max_shared * len(lines):
            kept.append(document)
            seen |= lines
    return kept
