"""Documents of the installed Python sources, of local files and of Hub data sets.

A source is named by a string: ``installed`` (the Python files of the standard library and of some
dependencies), a file (text, ``.jsonl`` or ``.parquet`` with a ``text`` column), a folder of such
files, or ``hub:NAME[/CONFIG][@SPLIT]``. With ``stream:`` before a local name, training streams it.
"""

import hashlib
import json
import logging
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from io import BufferedReader
from pathlib import Path
from typing import Any

import fsspec
import fsspec.compression
import pyarrow
from pyarrow import parquet

from kvcat.errors import InputError, one_line
from kvcat.files import MOST_TEXT_BYTES, expanded
from kvcat.hub import HUB_PREFIX, HubDataSet
from kvcat.text.encoder import repaired

COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
SUFFIXES = {
    "parquet": (".parquet",),
    "jsonl": tuple(
        f"{kind}{suffix}"
        for kind in (".jsonl", ".ndjson", ".jsonlines")
        for suffix in ("", *COMPRESSED_SUFFIXES)
    ),
    "text": (".txt", ".md", ".rst", ".py", ".tex", ".html"),
}
JSON_SUFFIXES = (".json", *(f".json{suffix}" for suffix in COMPRESSED_SUFFIXES))
"""Of files that hold JSON lines if they are named themselves, or are a data set of the Hub."""
PACKAGES = (
    "torch",
    "transformers",
    "numpy",
    "sympy",
    "pandas",
    "matplotlib",
    "networkx",
    "huggingface_hub",
    "datasets",
)
SKIPPED_FOLDERS = frozenset(
    (
        "test",
        "tests",
        "testing",
        "idlelib",
        "site-packages",
        "dist-packages",
        "__pycache__",
        "_vendor",
        "lib2to3",
    )
)
INSTALLED_BYTES = range(400, 400_001)  # sizes of the files that are used of the installed sources
INSTALLED = "installed"
"""The source that names the Python sources of this installation."""
READ_WHOLE = "the installed sources are read whole, so that held-out copies can be left out"
TOKENS_INDEX = "tokens.json"
"""A folder that holds this file holds tokens, not text."""
PIECE_CHARACTERS = 1 << 14
PARQUET_ROWS = 16  # few, as each stream holds so many and a document may be a book
BUFFER_BYTES = 1 << 20
HASHED_BYTES = 1 << 16
HASHED_PIECES = 1024

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Document:
    """A text with a name that does not depend on the machine.

    Args:
        text: all of it.
        text_id: the name of the longer text that this is a piece of; "": it is not a piece.
    """

    id: str
    text: str
    text_id: str = ""

    @property
    def split_id(self) -> str:
        """The name that decides the split: pieces of one text are in the same split."""
        return self.text_id or self.id


@dataclass(frozen=True)
class SourceFile:
    """A file of a source, with a name that does not depend on the machine."""

    name: str
    url: str  # a path, or a URL that fsspec opens
    kind: str  # parquet, jsonl, text or python
    text_field: str = "text"  # column of a table
    id_field: str = "id"  # column of a table that names its documents
    is_one_text: bool = False  # the pieces of a plain text belong together


@dataclass(frozen=True)
class Source:
    """The files of a source, in the order of their names.

    Args:
        commit: of a Hub data set; "": the files are local.
    """

    name: str
    files: tuple[SourceFile, ...]
    commit: str = ""

    @cached_property
    def revision(self) -> str:
        """The commit, or a hash of the files' names, sizes and bytes: the same for the same files.

        Of a file above 64 MiB, 1,024 pieces of 64 KiB are hashed, evenly spaced.
        """
        if self.commit:
            return self.commit
        return _digest(f"{file.name} {_digest_of_bytes(Path(file.url))}" for file in self.files)


def open_documents(source: str, *, text_field: str = "text") -> Iterator[Document]:
    """The documents of a source, in the order of its files.

    A table (``.parquet``, ``.jsonl``, ``.ndjson``) holds one document per row; rows without a text,
    or with an empty one, are left out. Characters of a row that are not Unicode, such as half of an
    emoji, become U+FFFD, and a warning names the file's first such row. A plain text longer than
    16,384 characters becomes consecutive pieces of at most that size, cut at line ends. If the
    source has other files as well, they record that they are pieces of one text (``text_id``); if
    it is the only file, they are documents. In a folder, hidden files and files with other suffixes
    are left out; if the source is such a file itself, it is read as plain text, or as JSON lines if
    its name ends in ``.json``.

    Raises:
        InputError: no source of that name, a source without a readable file, or no connection to
            the Hub (within seconds); while reading: no such column, a damaged file, no UTF-8 text.
    """
    files = [replace(file, text_field=text_field) for file in open_source(source).files]
    return (document for file in files for _, document in read_documents(file))


def open_source(
    name: str, *, revision: str | None = None, also_text: tuple[str, ...] = ()
) -> Source:
    """The files of a source; none is read yet.

    Args:
        name: as in ``open_documents``.
        revision: commit of a Hub data set; None: the newest.
        also_text: suffixes of further files in a local folder that are read as plain text.
    """
    if name.startswith(HUB_PREFIX):
        return _hub_source(name, revision)
    local_name = name.removeprefix("stream:")
    if local_name == INSTALLED and name != INSTALLED:
        raise InputError(f"{READ_WHOLE}: give {INSTALLED}, not {name}")
    path = expanded(local_name)
    files = _installed_files() if local_name == INSTALLED else _local_files(path, also_text)
    return Source(name, tuple(files))


@dataclass(frozen=True)
class Stripe:
    """One of several disjoint shares of a file's rows."""

    number: int
    count: int


WHOLE_FILE = Stripe(number=0, count=1)


def read_documents(
    file: SourceFile, start: int = 0, stripe: Stripe = WHOLE_FILE
) -> Iterator[tuple[int, Document]]:
    """The documents of one stripe of a file, starting at a row, each with the number of its row.

    A parquet file with at least as many row groups as there are stripes is striped by row groups,
    so that no byte is read twice; all others by rows.
    """
    if file.kind == "python":
        if start == stripe.number == 0:
            text = Path(file.url).read_text(encoding="utf-8-sig", errors="replace")
            yield 0, Document(file.name, text)
        return
    for row, values in open_rows(file, start, stripe):
        document = _document(values, row, file)
        if document is not None:
            yield row, document


def open_rows(
    file: SourceFile, start: int = 0, stripe: Stripe = WHOLE_FILE
) -> Iterator[tuple[int, dict[str, Any] | bytes]]:
    """The rows of one stripe of a file, starting at a row: numbers, with columns or a JSON line.

    Raises:
        InputError: a file that cannot be read.
    """
    compression = None if file.kind == "parquet" else "infer"
    if compression and file.url.lower().endswith(".zst"):
        _check_zstd(file.url)
    try:
        with fsspec.open(file.url, "rb", compression=compression) as raw:
            yield from _rows(raw, file, start, stripe)
    except InputError:
        raise
    except Exception as error:  # clients of the network and decompressors raise anything
        raise InputError(f"{file.url} cannot be read as {file.kind}: {one_line(error)}") from error


def _check_zstd(url: str) -> None:
    """Raise an ``InputError`` if nothing here reads .zst files, or what does so reads cut ones.

    fsspec has the decompressor of Python 3.14 or of backports.zstd; without either, that of the
    package zstandard, which ends in the middle of a file as if it were the end.
    """
    decompressor = fsspec.compression.compr.get("zstd")
    if getattr(decompressor, "__name__", "") != "ZstdFile":
        remedy = "pip install -U backports.zstd fsspec"
        raise InputError(f"to read {url}, Python before 3.14 needs a package: {remedy}")


_Row = tuple[int, dict[str, Any] | bytes]
"""The number of a row, and its columns or its JSON line."""


def _rows(raw: Any, file: SourceFile, start: int, stripe: Stripe) -> Iterator[_Row]:
    """The rows of one stripe of an open file, starting at a row."""
    if file.kind == "parquet":
        for row, values in _parquet_rows(raw, file, start, stripe):
            if row >= start:
                yield row, values
        return
    all_values = _json_lines(raw) if file.kind == "jsonl" else _text_pieces(raw, file)
    for row, values in enumerate(all_values):
        if row >= start and row % stripe.count == stripe.number:
            yield row, values


def _parquet_rows(
    raw: Any, file: SourceFile, start: int, stripe: Stripe
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of one stripe of an open parquet file, from the row group of ``start`` on."""
    with parquet.ParquetFile(raw, buffer_size=BUFFER_BYTES) as table:
        names = table.schema_arrow.names
        columns = [file.text_field, file.id_field] if file.text_field in names else None
        for name in columns or names:
            if names.count(name) > 1:
                raise InputError(f"{file.url} has {names.count(name)} columns named {name!r}")
        is_striped_by_group = stripe.count <= table.num_row_groups
        end = 0
        for group in range(table.num_row_groups):
            row = end
            end += table.metadata.row_group(group).num_rows
            in_other_stripe = is_striped_by_group and group % stripe.count != stripe.number
            if end <= start or in_other_stripe:
                continue
            for batch in table.iter_batches(PARQUET_ROWS, [group], columns, use_threads=False):
                for values in _decoded(batch):
                    if is_striped_by_group or row % stripe.count == stripe.number:
                        yield row, values
                    row += 1


def _decoded(batch: pyarrow.RecordBatch) -> list[dict[str, Any]]:
    """The rows of a batch, by column; texts that are not UTF-8 stay bytes."""
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        pass
    columns = []
    for column in batch.columns:
        is_text = pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type)
        columns.append(column.cast(pyarrow.large_binary()) if is_text else column)
    rows = pyarrow.RecordBatch.from_arrays(columns, batch.schema.names).to_pylist()
    return [{name: text_or_bytes(value) for name, value in row.items()} for row in rows]


def text_or_bytes(value: Any) -> Any:
    """Text for bytes that are UTF-8; any other value unchanged."""
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _json_lines(raw: Any) -> Iterator[bytes]:
    """The lines of an open file that are not blank."""
    with BufferedReader(raw, BUFFER_BYTES) as lines:
        while line := lines.readline(MOST_TEXT_BYTES + 1):
            if line.strip():
                yield line  # one that is too long is rejected by row_columns
            remaining = line
            while len(remaining) > MOST_TEXT_BYTES and not remaining.endswith(b"\n"):
                remaining = lines.readline(MOST_TEXT_BYTES + 1)


def _text_pieces(raw: Any, file: SourceFile) -> Iterator[dict[str, str]]:
    """An open text file as rows of at most 16,384 characters, cut at line ends."""
    data = raw.read()
    zero = data.find(b"\0")
    if zero >= 0:
        raise InputError(f"{file.url} is not text: it has a zero byte at {zero}")
    text = data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    start = 0
    while start < len(text):
        end = min(start + PIECE_CHARACTERS, len(text))
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield {file.text_field: text[start:end]}
        start = end


def row_columns(
    values: dict[str, Any] | bytes, row: int, file: SourceFile
) -> tuple[dict[str, Any], bool]:
    """The columns of a row, and whether bytes that are not UTF-8 became U+FFFD.

    Raises:
        InputError: a line that is not a JSON object.
    """
    if isinstance(values, dict):
        return values, False
    where = f"row {row} of {file.url}"
    if len(values) > MOST_TEXT_BYTES:
        raise InputError(f"{where} is longer than {MOST_TEXT_BYTES >> 20} MiB")
    try:
        columns, is_damaged = _json_value(values)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not JSON: {error}") from None
    if not isinstance(columns, dict):
        raise InputError(f"{where} is not a JSON object")
    return columns, is_damaged


def _document(values: dict[str, Any] | bytes, row: int, file: SourceFile) -> Document | None:
    """The document of a row, which is a JSON line or has columns; None: the row has no text."""
    where = f"row {row} of {file.url}"
    columns, is_damaged = row_columns(values, row, file)
    if file.text_field not in columns:
        names = ", ".join(columns)
        raise InputError(f"{where} has no column {file.text_field!r}; its columns: {names}")
    text = text_or_bytes(columns[file.text_field])
    if text is None:
        return None
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
        is_damaged = True
    if not isinstance(text, str):
        kind = type(text).__name__
        raise InputError(f"column {file.text_field!r} of {file.url} holds {kind}, not text")
    text = text.removeprefix("\ufeff")  # a byte order mark is not part of the text
    if not text:
        return None
    recorded_id = columns.get(file.id_field)
    has_id = recorded_id not in (None, "")  # 0 is an id
    name = str(recorded_id) if has_id else f"{file.name}#{row}"
    text_id = f"{file.name}#0" if file.is_one_text else ""
    document = Document(repaired(name), repaired(text), repaired(text_id))
    if is_damaged or document.text != text:
        _report_damage(where, file.url)
    return document


def _json_value(line: bytes) -> tuple[Any, bool]:
    """The value of a JSON line, and whether bytes that are not UTF-8 became U+FFFD."""
    try:
        return json.loads(line), False
    except UnicodeDecodeError:
        return json.loads(line.decode("utf-8-sig", errors="replace")), True


_NUM_DAMAGED: Counter[str] = Counter()  # rows by URL, each time that they are read


def _report_damage(where: str, url: str) -> None:
    """Warn of a file's first row that is not all Unicode, the tenth, the hundredth, and so on."""
    _NUM_DAMAGED[url] += 1
    count = _NUM_DAMAGED[url]
    is_power_of_ten = count == 10 ** (len(str(count)) - 1)
    if is_power_of_ten:
        _LOGGER.warning(
            "%s is not all Unicode text: U+FFFD replaces what is not; such rows read so far: %d",
            where,
            count,
        )


def _installed_files() -> list[SourceFile]:
    """Python files named ``stdlib/...`` or ``PACKAGE/...``, without tests, copies and very large
    files.
    """
    roots = _installed_roots()
    files = []
    for name, root in roots.items():
        for path in _python_files(root):
            if path.stat().st_size in INSTALLED_BYTES:
                relative = path.relative_to(root).as_posix()
                files.append(SourceFile(f"{name}/{relative}", str(path), "python"))
    if not files:
        raise InputError(f"this installation has no Python sources below {roots['stdlib']}")
    return sorted(files, key=lambda file: file.name)


def _installed_roots() -> dict[str, Path]:
    """The folders of the standard library and of installed packages, by name."""
    install = sysconfig.get_paths()
    roots = {"stdlib": Path(install["stdlib"])}
    for package in PACKAGES:
        for site in ("purelib", "platlib"):
            folder = Path(install[site]) / package
            if folder.is_dir():
                roots[package] = folder
    return roots


def _python_files(root: Path) -> Iterator[Path]:
    """The Python files below a folder, without those of tests and copies of other packages."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        for file in files:
            if file.endswith(".py"):
                yield Path(folder, file)


def _local_files(path: Path, also_text: tuple[str, ...]) -> list[SourceFile]:
    """The files of a folder, or the named file itself."""
    if path.is_file():
        kind = _kind(path.name, named=True) or "text"
        return [SourceFile(path.name, str(path), kind)]
    if not path.is_dir():
        raise InputError(f"no such text file or folder: {path}")
    if (path / TOKENS_INDEX).is_file():
        raise InputError(f"{path} holds prepared tokens, not text: name the text itself")
    files = []
    for file in sorted(path.rglob("*")):
        if is_hidden(file, path):
            continue
        kind = _kind(file.name) or ("text" if file.name.lower().endswith(also_text) else None)
        if kind is not None and file.is_file():
            files.append(SourceFile(file.relative_to(path).as_posix(), str(file), kind))
    if not files:
        raise InputError(f"no text, .jsonl or .parquet file in folder {path}")
    return _whole_texts(files)


def is_hidden(file: Path, folder: Path) -> bool:
    """Whether a file, or a folder on the way to it from a folder, has a name that begins with a
    dot.
    """
    return any(name.startswith(".") for name in file.relative_to(folder).parts)


def _whole_texts(files: list[SourceFile]) -> list[SourceFile]:
    """The files of a source; each plain text is one text, unless it is the only file."""
    if len(files) == 1:
        return files
    return [replace(file, is_one_text=file.kind == "text") for file in files]


def _kind(name: str, *, named: bool = False) -> str | None:
    """The kind of a file by its suffix, in small letters or capitals; None: another suffix.

    Args:
        named: it is named itself, or of a data set of the Hub.
    """
    name = name.lower()
    for kind, suffixes in SUFFIXES.items():
        if name.endswith(suffixes):
            return kind
    return "jsonl" if named and name.endswith(JSON_SUFFIXES) else None


def _digest(lines: Iterable[str]) -> str:
    """A hash of some lines."""
    content = "\n".join(lines).encode(errors="surrogateescape")  # names of files may be any bytes
    return hashlib.sha256(content).hexdigest()[:40]


def _digest_of_bytes(path: Path) -> str:
    """The size of a file and a hash of its bytes, all of them or evenly spaced pieces."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        count = min(HASHED_PIECES, -(-size // HASHED_BYTES))
        hashed = hashlib.sha256()
        for number in range(count):
            # the last piece ends with the file
            file.seek(max(0, size - HASHED_BYTES) * number // max(1, count - 1))
            hashed.update(file.read(HASHED_BYTES))
    return f"{size} {hashed.hexdigest()}"


def _hub_source(name: str, revision: str | None) -> Source:
    """The files of a data set on the Hub; its revision is the commit."""
    data_set = HubDataSet.parse(name)
    urls = data_set.file_urls(revision)
    files = _whole_texts([_hub_file(data_set.repository, url) for url in urls])
    commit = re.search(r"@([^/]+)/", urls[0])
    return Source(name, tuple(files), commit=_digest(urls) if commit is None else commit[1])


def _hub_file(repository: str, url: str) -> SourceFile:
    """A file of a data set on the Hub, named by its path in the repository."""
    path = url.partition("://")[2] or url
    file = re.sub(rf"^datasets/{re.escape(repository)}(@[^/]+)?/", "", path)
    kind = _kind(file, named=True)
    if kind is None:
        raise InputError(
            f"data set {repository!r} keeps its text in {file}; only parquet, JSON lines and text "
            "can be streamed"
        )
    return SourceFile(file, url, kind)
