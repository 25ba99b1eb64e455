"""Documents of the installed Python sources, of local files and of Hub data sets.

A source is named by a string: ``installed`` (the Python files of the standard library and of some dependencies), a file
(text, ``.jsonl`` or ``.parquet`` with a ``text`` column), a folder of such files, or ``hub:NAME[/CONFIG][@SPLIT]``.
``stream:`` before a local name asks training to stream it.
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
from io import BufferedReader
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow
from pyarrow import parquet

from kvcat.errors import InputError, one_line
from kvcat.hub import hub_obstacle
from kvcat.tokenization import repaired

PACKED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
SUFFIXES = {
    "parquet": (".parquet",),
    "jsonl": (".jsonl", *(f".jsonl{packed}" for packed in PACKED_SUFFIXES)),
    "text": (".txt", ".md", ".rst", ".py", ".tex", ".html"),
}
HUB_LINES_SUFFIXES = (".json", *(f".json{packed}" for packed in PACKED_SUFFIXES), ".ndjson")
PACKAGES = (
    "torch", "transformers", "numpy", "sympy", "pandas", "matplotlib", "networkx", "huggingface_hub", "datasets",
)  # fmt: skip
SKIPPED_FOLDERS = frozenset(
    ("test", "tests", "testing", "idlelib", "site-packages", "dist-packages", "__pycache__", "_vendor", "lib2to3")
)
INSTALLED_BYTES = (400, 400_000)  # the smallest and the largest file of the installed sources
PIECE_CHARACTERS = 1 << 14
PARQUET_ROWS = 16  # few, as each stream holds so many and a document may be a book
BUFFER_BYTES = 1 << 20

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Document:
    """A text with a name that is the same on every machine."""

    id: str
    text: str


@dataclass(frozen=True)
class SourceFile:
    """A path, or a URL that fsspec opens, with a name that is the same on every machine."""

    name: str
    url: str
    kind: str  # parquet, jsonl, text or python
    text_field: str = "text"  # column of a table


@dataclass(frozen=True)
class Source:
    """The files of a source in the order of their names; the same files have the same revision."""

    name: str
    files: tuple[SourceFile, ...]
    revision: str


def open_documents(source: str, *, text_field: str = "text") -> Iterator[Document]:
    """The documents of a source, in the order of its files.

    A table (``.parquet``, ``.jsonl``) holds one document per row; rows without a text are left out. What is no Unicode
    in a row, such as half of an emoji, becomes U+FFFD, and a warning names the file's first such row. A plain text
    longer than 16,384 characters becomes consecutive documents of at most that size, cut at line ends. A file of any
    other name that is given itself is read as plain text.

    Raises:
        InputError: nothing of that name, no readable file in it, or no connection to the Hub (within seconds); while
            reading: no such column, a damaged file, no UTF-8 text.
    """
    files = [replace(file, text_field=text_field) for file in open_source(source).files]
    return (document for file in files for _, document in read_documents(file))


def open_source(name: str, *, revision: str | None = None) -> Source:
    """The files of a source, none of them read; ``revision`` is a Hub data set's commit."""
    if name.startswith("hub:"):
        return _hub_source(name, revision)
    local = name.removeprefix("stream:")
    files = _installed_files() if local == "installed" else _local_files(Path(local).expanduser())
    return Source(name, tuple(files), _digest(f"{file.name} {Path(file.url).stat().st_size}" for file in files))


def read_documents(
    file: SourceFile, start: int = 0, *, stripe: int = 0, num_stripes: int = 1
) -> Iterator[tuple[int, Document]]:
    """The documents of a file, or of one stripe of it, from a row on, each with its row.

    A parquet file with at least ``num_stripes`` row groups is striped by row groups, so that no byte is read twice; all
    others by rows.
    """
    if file.kind == "python":
        if start == stripe == 0:
            yield 0, Document(file.name, Path(file.url).read_text(encoding="utf-8-sig", errors="replace"))
        return
    try:
        with fsspec.open(file.url, "rb", compression=None if file.kind == "parquet" else "infer") as raw:
            if file.kind == "parquet":
                rows = _parquet_rows(raw, file, start, stripe, num_stripes)
            else:
                rows = enumerate(_json_lines(raw) if file.kind == "jsonl" else _text_pieces(raw, file))
                rows = (row for row in rows if row[0] % num_stripes == stripe)
            for number, values in rows:
                if number >= start and (document := _document(values, number, file)):
                    yield number, document
    except InputError:
        raise
    except Exception as error:  # clients of the network and decompressors raise anything
        raise InputError(f"{file.url} cannot be read as {file.kind}: {one_line(error)}") from error


def _parquet_rows(
    raw: Any, file: SourceFile, start: int, stripe: int, num_stripes: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    with parquet.ParquetFile(raw, buffer_size=BUFFER_BYTES) as table:
        columns = [file.text_field, "id"] if file.text_field in table.schema_arrow.names else None
        by_group, end = num_stripes <= table.num_row_groups, 0
        for group in range(table.num_row_groups):
            row, end = end, end + table.metadata.row_group(group).num_rows
            if end <= start or (by_group and group % num_stripes != stripe):
                continue
            for batch in table.iter_batches(PARQUET_ROWS, [group], columns, use_threads=False):
                for values in _decoded(batch):
                    if by_group or row % num_stripes == stripe:
                        yield row, values
                    row += 1


def _decoded(batch: pyarrow.RecordBatch) -> list[dict[str, Any]]:
    """The rows of a table; texts that are not UTF-8 stay bytes."""
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        pass
    columns = []
    for column in batch.columns:
        is_text = pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type)
        columns.append(column.cast(pyarrow.large_binary()) if is_text else column)
    rows = pyarrow.RecordBatch.from_arrays(columns, batch.schema.names).to_pylist()
    return [{name: _text_or_bytes(value) for name, value in row.items()} for row in rows]


def _text_or_bytes(value: Any) -> Any:
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        return value


def _json_lines(raw: Any) -> Iterator[bytes]:
    with BufferedReader(raw, BUFFER_BYTES) as lines:
        yield from filter(bytes.strip, lines)


def _text_pieces(raw: Any, file: SourceFile) -> Iterator[dict[str, str]]:
    data = raw.read()
    if (zero := data.find(b"\0")) >= 0:
        raise InputError(f"{file.url} is not text: it has a zero byte at {zero}")
    text = data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    start = 0
    while start < len(text):
        end = min(start + PIECE_CHARACTERS, len(text))
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield {file.text_field: text[start:end]}
        start = end


def _document(values: dict[str, Any] | bytes, row: int, file: SourceFile) -> Document | None:
    """The document of a table's row, of a JSON line or of a piece of text; None where a row has no text."""
    where = f"row {row} of {file.url}"
    is_damaged = False
    try:
        if isinstance(values, bytes):
            values, is_damaged = _json_value(values)
    except ValueError as error:
        raise InputError(f"{where} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{where} is no JSON object")
    if file.text_field not in values:
        raise InputError(f"{where} has no column {file.text_field!r}; its columns: {', '.join(values)}")
    text = values[file.text_field]
    if text is None:
        return None
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
        is_damaged = True
    if not isinstance(text, str):
        raise InputError(f"column {file.text_field!r} of {file.url} holds {type(text).__name__}, not text")
    name = str(values.get("id") or f"{file.name}#{row}")
    document = Document(repaired(name), repaired(text))
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
    """Warn of a file's first row that is not all Unicode, of the tenth, the hundredth, and so on."""
    _NUM_DAMAGED[url] += 1
    count = _NUM_DAMAGED[url]
    if count == 10 ** (len(str(count)) - 1):
        _LOGGER.warning(
            "%s is not all Unicode text: U+FFFD replaces what is not; such rows read so far: %d",
            where,
            count,
        )


def _installed_files() -> list[SourceFile]:
    """Python files named ``stdlib/...`` or ``PACKAGE/...``; no tests, vendored copies, giants."""
    install = sysconfig.get_paths()
    roots = {"stdlib": Path(install["stdlib"])}
    sites = [Path(install[site]) for site in ("purelib", "platlib")]
    roots |= {package: site / package for package in PACKAGES for site in sites if (site / package).is_dir()}
    found = []
    for name, root in roots.items():
        for folder, folders, files in os.walk(root):
            folders[:] = [f for f in folders if f not in SKIPPED_FOLDERS]
            paths = [Path(folder, file) for file in files if file.endswith(".py")]
            found += [
                SourceFile(f"{name}/{path.relative_to(root).as_posix()}", str(path), "python")
                for path in paths
                if INSTALLED_BYTES[0] <= path.stat().st_size <= INSTALLED_BYTES[1]
            ]
    if not found:
        raise InputError(f"this installation has no Python sources below {roots['stdlib']}")
    return sorted(found, key=lambda file: file.name)


def _local_files(path: Path) -> list[SourceFile]:
    if path.is_file():
        root, found = path.parent, [path]
    elif path.is_dir():
        if (path / "tokens.json").is_file():
            raise InputError(f"{path} holds prepared tokens, not text: name the text itself")
        root, found = path, sorted(p for p in path.rglob("*") if _kind(p.name) and p.is_file())
        if not found:
            raise InputError(f"no text, .jsonl or .parquet file in folder {path}")
    else:
        raise InputError(f"no such text file or folder: {path}")
    return [SourceFile(p.relative_to(root).as_posix(), str(p), _kind(p.name) or "text") for p in found]


def _kind(name: str) -> str | None:
    return next((kind for kind, suffixes in SUFFIXES.items() if name.endswith(suffixes)), None)


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:40]


def _hub_source(name: str, revision: str | None) -> Source:
    path, _, split = name.removeprefix("hub:").partition("@")
    repository, config = "/".join(path.split("/")[:2]), "/".join(path.split("/")[2:]) or None
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", repository):
        raise InputError(f"{name} names no data set: write hub:OWNER/NAME, hub:OWNER/NAME/CONFIG or ...@SPLIT")
    if obstacle := hub_obstacle():
        raise InputError(f"data set {repository!r} is on the Hub, and {obstacle}")
    try:
        listed = datasets.load_dataset_builder(repository, config, revision=revision).config.data_files or {}
    except (OSError, ValueError) as error:
        raise InputError(f"data set {repository!r} cannot be opened: {one_line(error)}") from None
    urls = sorted(map(str, listed.get(split or "train") or ()))
    if not urls:
        found = ", ".join(map(str, listed)) or "none"
        raise InputError(f"data set {repository!r} has no split {split or 'train'!r}; its splits: {found}")
    files = []
    for url in urls:
        file = re.sub(rf"^datasets/{re.escape(repository)}(@[^/]+)?/", "", url.partition("://")[2] or url)
        kind = "jsonl" if file.endswith(HUB_LINES_SUFFIXES) else _kind(file)
        if kind is None:
            raise InputError(
                f"data set {repository!r} keeps its text in {file}; only parquet, JSON lines and text stream"
            )
        files.append(SourceFile(file, url, kind))
    commit = re.search(r"@([^/]+)/", urls[0])
    return Source(name, tuple(files), commit[1] if commit else _digest(urls))
