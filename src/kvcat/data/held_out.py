"""Documents that training never saw."""

from itertools import islice
from typing import Literal

from kvcat.data.documents import Document, open_documents
from kvcat.data.split import Split, drop_copies, drop_near_duplicates, hash_order, split_of, split_position
from kvcat.errors import InputError


def split_documents(source: str, split: Split | Literal["all"], *, limit: int | None = None) -> list[Document]:
    """The documents of one split of a source, in the source's order.

    The installed Python sources hold copies of their own files; held-out documents that share many lines with training
    documents are left out there.

    Args:
        source: as in ``open_documents``.
        split: train, validation, test (held out by a hash of the name), or all.
        limit: the first so many of a ``hub:`` source, which is streamed; everything else is read to its end.

    Raises:
        InputError: no such source, or no document in that split.
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


def local_splits(source: str, seed: int) -> dict[str, list[Document]]:
    """Training and validation documents of a source that is read whole, each in a random order of its own.

    Of the installed Python sources, training documents that share many lines with others are left out: more than half
    of some libraries are copies of their own files.

    Where no document's hash falls into validation, as can be with few documents, the training document next to that
    part of the hash range is held out.

    Args:
        source: as in ``open_documents``.
        seed: seed of the order of the training documents; validation has one order.

    Raises:
        InputError: fewer than two documents.
    """
    splits: dict[str, list[Document]] = {"train": [], "validation": [], "test": []}
    for document in open_documents(source):
        splits[split_of(document.id)].append(document)
    if source == "installed":
        splits["train"] = drop_copies(hash_order(splits["train"], 0))
    if not splits["validation"] and len(splits["train"]) > 1:
        nearest = min(splits["train"], key=lambda document: split_position(document.id))
        splits["train"].remove(nearest)
        splits["validation"].append(nearest)
    if not splits["train"] or not splits["validation"]:
        count = sum(map(len, splits.values()))
        raise InputError(f"{source} has too few documents ({count}) to train on some and validate on others")
    return {"train": hash_order(splits["train"], seed), "validation": hash_order(splits["validation"], 0)}
