"""Documents of one file, from any row on, read on through failures of the network."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from kvcat.data.retry import Retries, one_line, passing, unreadable
from kvcat.data.shards import PACKED_SUFFIXES, Shard
from kvcat.errors import InputError

PIECE_CHARACTERS = 1 << 14
PARQUET_ROWS = 16  # few, as each stream holds so many and a document may be a book
BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class Document:
    """A text with a name; the text is read on demand, so that a corpus can be listed without being loaded.

    Args:
        id: name that stays the same on every machine; the held-out split is a hash of it.
        read: returns the text.
    """

    id: str
    read: Callable[[], str]

    @property
    def text(self) -> str:
        """The document's text."""
        return self.read()


class Place(NamedTuple):
    """Where in a file a document stands: its row, and for JSON lines the byte at which the row begins."""

    row: int = 0
    byte: int = 0


START = Place()


def read_documents(
    shard: Shard, *, place: Place = START, stripe: int = 0, stripes: int = 1, text_field: str = "text"
) -> Iterator[tuple[Place, Document]]:
    """The documents of a file, or of one stripe of it, from a place on, each with its own place.

    Parquet files go straight to the row group of the place, plain JSON lines to its byte. A parquet file with at least
    ``stripes`` row groups is striped by row groups, so that no byte is read twice; everything else by rows. A remote
    file that fails for a passing reason is opened again after the last document, with growing waits.

    Args:
        shard: the file.
        place: a place that an earlier reading of the same stripe gave, or the start.
        stripe: which of the stripes, from 0.
        stripes: parts that the file is read in; together they are the file.
        text_field: the column that holds the text.

    Raises:
        InputError: no such column, a column of something else than text, a damaged file, text that is not UTF-8, or a
            network that stays away.
    """
    retries, last = Retries(shard.url), None
    while True:
        try:
            for here, document in _READERS[shard.kind](shard, last or place, stripe, stripes, text_field):
                if here == last:
                    continue
                yield here, document
                last = here
                retries.succeeded()
            return
        except InputError:
            raise
        except Exception as error:
            if shard.remote and passing(error):
                retries.wait(error)
            elif unreadable(error):
                raise InputError(f"{shard.url} cannot be read as {shard.kind}: {one_line(error)}") from None
            else:
                raise


def _parquet_documents(
    shard: Shard, place: Place, stripe: int, stripes: int, text_field: str
) -> Iterator[tuple[Place, Document]]:
    from pyarrow import parquet

    with ExitStack() as stack:
        file = stack.enter_context(_open(shard)) if shard.remote else shard.url
        table = stack.enter_context(parquet.ParquetFile(file, buffer_size=BUFFER_BYTES))
        columns = table.schema_arrow.names
        if text_field not in columns:
            raise InputError(f"{shard.url} has no column {text_field!r}; its columns: {', '.join(columns)}")
        by_group, end = stripes <= table.num_row_groups, 0
        for group in range(table.num_row_groups):
            start, end = end, end + table.metadata.row_group(group).num_rows
            if end <= place.row or (by_group and group % stripes != stripe):
                continue
            batches = table.iter_batches(
                PARQUET_ROWS, [group], [c for c in (text_field, "id") if c in columns], use_threads=False
            )
            for batch in batches:
                first, start = start, start + batch.num_rows
                for row in range(max(place.row, first), start):
                    if by_group or row % stripes == stripe:
                        values = {name: batch.column(name)[row - first].as_py() for name in batch.schema.names}
                        yield from _row_document(values, Place(row), shard, text_field)


def _line_documents(
    shard: Shard, place: Place, stripe: int, stripes: int, text_field: str
) -> Iterator[tuple[Place, Document]]:
    with _open(shard) as file:
        row = byte = 0
        if place.byte and not shard.url.endswith(PACKED_SUFFIXES):
            row, byte = place
            file.seek(byte)
        for line in file:
            here, byte = Place(row, byte), byte + len(line)
            if not line.strip():
                continue
            if row >= place.row and row % stripes == stripe:
                yield from _row_document(_json_row(line, here, shard), here, shard, text_field)
            row += 1


def _text_documents(shard: Shard, place: Place, stripe: int, stripes: int, _: str) -> Iterator[tuple[Place, Document]]:
    with _open(shard) as file:
        text = _decoded(file.read(), shard).replace("\r\n", "\n").replace("\r", "\n")
    start, row = 0, 0
    while start < len(text):
        end = min(start + PIECE_CHARACTERS, len(text))
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        if row >= place.row and row % stripes == stripe:
            piece = text[start:end]
            yield Place(row), Document(f"{shard.name}#{row}", lambda piece=piece: piece)
        start, row = end, row + 1


def _whole_document(shard: Shard, place: Place, stripe: int, *_: object) -> Iterator[tuple[Place, Document]]:
    from kvcat.data import installed

    if place.row == 0 and stripe == 0:
        yield START, Document(shard.name, lambda: installed.read_source(Path(shard.url)))


_READERS = {
    "parquet": _parquet_documents,
    "jsonl": _line_documents,
    "text": _text_documents,
    "whole": _whole_document,
}


@contextmanager
def _open(shard: Shard) -> Iterator[Any]:
    """The file's bytes, unpacked; a remote one is fetched in ranges of a mebibyte, as far as it is read."""
    import fsspec
    from fsspec.compression import compr
    from fsspec.utils import infer_compression

    system, path = fsspec.url_to_fs(shard.url)
    with ExitStack() as stack:
        raw = stack.enter_context(system.open(path, "rb", **({"cache_type": "none"} if shard.remote else {})))
        if shard.kind == "parquet":
            yield raw
            return
        packing = infer_compression(shard.url)
        if packing is None:
            yield BufferedReader(raw, BUFFER_BYTES)
        elif packing in compr:
            yield BufferedReader(stack.enter_context(compr[packing](BufferedReader(raw, BUFFER_BYTES), mode="rb")))
        else:
            raise InputError(f"{shard.url} is packed with {packing}, which no installed library unpacks")


def _row_document(
    values: dict[str, Any], place: Place, shard: Shard, text_field: str
) -> Iterator[tuple[Place, Document]]:
    """The document of a row; none where it has no text."""
    if text_field not in values:
        raise InputError(
            f"row {place.row} of {shard.url} has no column {text_field!r}; its columns: {', '.join(values)}"
        )
    text = values[text_field]
    if text is None:
        return
    if not isinstance(text, str):
        raise InputError(f"column {text_field!r} of {shard.url} holds {type(text).__name__}, not text")
    name = values.get("id")
    yield place, Document(str(name or f"{shard.name}#{place.row}"), lambda: text)


def _json_row(line: bytes, place: Place, shard: Shard) -> dict[str, Any]:
    try:
        row = json.loads(_decoded(line, shard, place.byte))
    except json.JSONDecodeError as error:
        raise InputError(f"row {place.row} of {shard.url}, at byte {place.byte}, is not JSON: {error.msg}") from None
    if not isinstance(row, dict):
        raise InputError(f"row {place.row} of {shard.url}, at byte {place.byte}, is no JSON object")
    return row


def _decoded(data: bytes, shard: Shard, offset: int = 0) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{shard.url} is not UTF-8 text: {error.reason} at byte {offset + error.start}") from None
