"""The rows of a store's manifest, and the logs from which it is made."""

import hashlib
import io
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

import pyarrow
from pyarrow import compute, parquet

from kvcat.corpus.storage import Storage
from kvcat.errors import InputError, one_line
from kvcat.files import CHECKSUM, NO_SEAL, check_record, check_seal, parse_jsonl, sealed

MANIFEST = "manifest.parquet"
JOURNAL = "journal"
CACHES = "caches"
# Hashes make most of a manifest, and they hardly compress: a real one grows to ten times its size.
_MOST_GROWTH = 100
_SMALL = 1 << 26  # bytes that any manifest may need
_ROW_BYTES = 1024  # of a row in memory, without its texts
_BATCH_ROWS = 1024


@dataclass(frozen=True)
class Row:
    """One document of a store.

    Args:
        id: name of the document.
        checksum: hash of its text.
        tokens: tokens of the document; None if there is no cache, as for the next ones.
        slots: slots per layer and head on average.
        bytes: size of the cache in memory.
        kl: KL(dense || compact) on held-out positions, nats per token; None if not measured.
        supervision: text to which the cache was fitted, "reconstruction" or "self".
        seconds: time that the cache cost.
        method: method with its options.
        model: name of the model.
        fingerprint: fingerprint of the model.
        file: name of the cache file in the store.
        error: why there is no cache; None if there is one.
        finished: seconds since 1970, for people: clocks differ.
        revision: of several rows of a document, the one with the largest revision is the newest.
    """

    id: str
    checksum: str
    tokens: int | None
    slots: float | None
    bytes: int | None
    kl: float | None
    supervision: str | None
    seconds: float
    method: str
    model: str
    fingerprint: str
    file: str | None
    error: str | None
    finished: float
    revision: int = 0

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Row":
        """The row with these values; ``ValueError`` for one that is missing or of another type."""
        check_record(_TYPES, record)
        return cls(**record)

    @property
    def age(self) -> tuple[int, float]:
        """What orders the rows of one document.

        Writers at the same time may give the same revision; only then the clock decides.
        """
        return (self.revision, self.finished)

    @classmethod
    def failed(cls, id: str, checksum: str, error: str, about: Mapping[str, str]) -> "Row":
        """The row of a document without a cache."""
        nothing = dict.fromkeys(("tokens", "slots", "bytes", "kl", "supervision", "file"))
        return cls(
            id=id,
            checksum=checksum,
            seconds=0.0,
            error=error,
            finished=time.time(),
            **about,
            **nothing,
        )

    def record(self) -> dict[str, Any]:
        """The row as JSON values."""
        return dict(vars(self))


SCHEMA = pyarrow.schema(
    [
        ("id", pyarrow.string()),
        ("checksum", pyarrow.string()),
        ("tokens", pyarrow.int64()),
        ("slots", pyarrow.float64()),
        ("bytes", pyarrow.int64()),
        ("kl", pyarrow.float64()),
        ("supervision", pyarrow.string()),
        ("seconds", pyarrow.float64()),
        ("method", pyarrow.string()),
        ("model", pyarrow.string()),
        ("fingerprint", pyarrow.string()),
        ("file", pyarrow.string()),
        ("error", pyarrow.string()),
        ("finished", pyarrow.float64()),
        ("revision", pyarrow.int64()),
    ]
)
"""The columns of ``manifest.parquet``, in the order of ``Row``."""

_TEXTS = [column.name for column in SCHEMA if column.type == pyarrow.string()]
# as a dictionary, a text that many rows share is in memory once
_SHARED = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
_READ_SCHEMA = pyarrow.schema(
    [(column.name, _SHARED if column.name in _TEXTS else column.type) for column in SCHEMA]
)
_MAY_BE_NONE = ("tokens", "slots", "bytes", "kl", "supervision", "file", "error")
_PYTHON_TYPES = {
    pyarrow.string(): (str,),
    pyarrow.int64(): (int,),
    pyarrow.float64(): (float, int),
}
_TYPES = {
    column.name: _PYTHON_TYPES[column.type] + (NoneType,) * (column.name in _MAY_BE_NONE)
    for column in SCHEMA
}


def cache_file(id: str) -> str:
    """The name of a document's cache file in its store: a hash, so that any id is safe."""
    digest = hashlib.sha256(id.encode()).hexdigest()
    return f"{CACHES}/{digest[:2]}/{digest[2:42]}.safetensors"


def read_rows(storage: Storage) -> dict[str, Row]:
    """The last row of every document, by id: from the manifest, and from logs of unfinished runs.

    Raises:
        InputError: a damaged manifest or log.
    """
    rows = []
    # logs first: one that disappears now is in the manifest by then
    for name in storage.names(JOURNAL):
        rows += journal_rows(storage, name)
    return merged([*manifest_rows(storage), *rows])


def merged(rows: Iterable[Row]) -> dict[str, Row]:
    """The newest row of every document, by id."""
    newest: dict[str, Row] = {}
    for row in rows:
        if row.id not in newest or row.age >= newest[row.id].age:
            newest[row.id] = row
    return newest


def write_manifest(storage: Storage, rows: Iterable[Row]) -> None:
    """Write the manifest, ordered by id."""
    ordered = sorted(rows, key=lambda row: row.id)
    table = pyarrow.Table.from_pylist([row.record() for row in ordered], schema=SCHEMA)
    buffer = io.BytesIO()
    with parquet.ParquetWriter(buffer, SCHEMA) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({CHECKSUM: NO_SEAL})
    storage.write(MANIFEST, sealed(buffer.getvalue()))


def manifest_rows(storage: Storage) -> list[Row]:
    """The rows of the manifest; ``InputError`` if it is damaged."""
    content = storage.read(MANIFEST)
    if content is None:
        return []
    name = f"{storage.address}/{MANIFEST}"
    check_seal(content, name)
    try:
        return [Row.of(record) for record in _records(content)]
    except (pyarrow.ArrowException, ValueError, OSError) as error:
        raise InputError(f"{name} is damaged: {one_line(error)}") from None


def _records(content: bytes) -> Iterator[dict[str, Any]]:
    """The records of a manifest; ``ValueError`` as soon as they are too large for their file."""
    table = parquet.ParquetFile(io.BytesIO(content), read_dictionary=_TEXTS)
    if not table.schema_arrow.equals(_READ_SCHEMA):
        raise ValueError("its columns are not those of a manifest")
    most = _SMALL + _MOST_GROWTH * len(content)
    metadata = table.metadata
    unpacked = sum(
        metadata.row_group(group).column(column).total_uncompressed_size
        for group in range(metadata.num_row_groups)
        for column in range(metadata.num_columns)
    )
    size = 0
    if max(unpacked, metadata.num_rows * _ROW_BYTES) <= most:
        for batch in table.iter_batches(_BATCH_ROWS, use_threads=False):
            size += len(batch) * _ROW_BYTES + sum(map(_text_bytes, batch.select(_TEXTS).columns))
            if size > most:
                break
            yield from batch.cast(SCHEMA).to_pylist()
        else:
            return
    raise ValueError(f"its rows need more than {most >> 20} MiB")


def _text_bytes(column: Any) -> int:
    """The bytes of a column's texts, those of equal ones counted each time."""
    lengths = compute.binary_length(column.dictionary).take(column.indices)
    return compute.sum(lengths, min_count=0).as_py()


def journal_rows(storage: Storage, name: str) -> list[Row]:
    """The rows of a log; a last line that a kill left incomplete is skipped."""
    path = f"{storage.address}/{name}"
    records = parse_jsonl(storage.read(name) or b"", path)
    try:
        return [Row.of(record) for record in records]
    except ValueError as error:
        raise InputError(f"{path} is damaged: a line is not a row: {one_line(error)}") from None
