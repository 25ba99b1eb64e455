"""Documents from local files, folders and the Hub."""

from collections.abc import Iterator
from pathlib import Path

from kvcat.data.rows import Document, read_documents
from kvcat.data.shards import Shards, local_shards, open_shards

__all__ = ["Document", "file_documents", "hub_documents", "open_documents", "shard_documents"]


def open_documents(source: str) -> Iterator[Document]:
    """Documents of a source named on the command line, in the order of its files.

    Args:
        source: ``installed`` (the Python sources of this installation), a file (text, ``.jsonl`` or ``.parquet`` with
            a ``text`` column), a folder of such files, a pattern such as ``texts/*.parquet``, or
            ``hub:NAME[/CONFIG][@SPLIT]`` (streamed); ``stream:`` before a local one makes no difference here.

    Raises:
        InputError: nothing of that name, or no readable file in it.
    """
    return shard_documents(open_shards(source))


def file_documents(path: Path, *, text_field: str = "text") -> Iterator[Document]:
    """Documents of a file or of every readable file below a folder, in the order of their names.

    A table (``.parquet``, ``.jsonl``) holds one document a row, rows without a text left out; a plain text longer than
    16,384 characters becomes consecutive documents of at most that size, cut at line ends, so that a part of it can be
    held out. A file of any other name is read as plain text.

    Args:
        path: file or folder.
        text_field: the column that holds the text.

    Raises:
        InputError: path missing, no readable file; while reading: no such column, a column of something else than
            text, a damaged file, text that is not UTF-8.
    """
    return shard_documents(local_shards(str(path)), text_field=text_field)


def hub_documents(name: str, *, text_field: str = "text") -> Iterator[Document]:
    """Documents of a Hub data set, streamed in the order of its files.

    Args:
        name: ``OWNER/NAME``, ``OWNER/NAME/CONFIG``, each with an optional ``@SPLIT`` (``train`` if absent).
        text_field: the column that holds the text.

    Raises:
        InputError: the Hub cannot be reached (told within seconds), no such data set; while reading: no such column,
            or the network stays away.
    """
    return shard_documents(open_shards(f"hub:{name}"), text_field=text_field)


def shard_documents(shards: Shards, *, text_field: str = "text") -> Iterator[Document]:
    """The documents of these files, in their order."""
    for shard in shards.files:
        for _, document in read_documents(shard, text_field=text_field):
            yield document
