"""Documents from local files, folders and the Hub."""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcat.errors import InputError
from kvcat.network import hub_obstacle

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".tex", ".html")
TABLE_SUFFIXES = (".parquet", ".jsonl")
PIECE_CHARACTERS = 1 << 14
PARQUET_ROWS = 256


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


def open_documents(source: str) -> Iterator[Document]:
    """Documents of a source named on the command line.

    Args:
        source: ``installed`` (the Python sources of this installation), a file (text, ``.jsonl`` or ``.parquet`` with
            a ``text`` column), a folder of such files, or ``hub:NAME[/CONFIG][@SPLIT]`` (streamed).

    Raises:
        InputError: nothing of that name, or no readable file in it.
    """
    if source == "installed":
        from kvcat.data.installed import installed_documents

        return iter(installed_documents())
    if source.startswith("hub:"):
        return hub_documents(source.removeprefix("hub:"))
    return file_documents(Path(source))


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
    if not path.exists():
        raise InputError(f"no such text file or folder: {path}")
    named = TEXT_SUFFIXES + TABLE_SUFFIXES
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in named and p.is_file())
    if not files:
        raise InputError(f"no text, .jsonl or .parquet file in folder {path}")
    return _read_files(files, path if path.is_dir() else path.parent, text_field)


def _read_files(files: list[Path], root: Path, text_field: str) -> Iterator[Document]:
    for file in files:
        name = file.relative_to(root).as_posix()
        if file.suffix in TABLE_SUFFIXES:
            yield from _row_documents(_table_rows(file), name, text_field, str(file))
        else:
            yield from _text_pieces(file, name)


def _text_pieces(file: Path, name: str) -> Iterator[Document]:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    start, number = 0, 0
    while start < len(text):
        end = min(start + PIECE_CHARACTERS, len(text))
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        piece = text[start:end]
        yield Document(f"{name}#{number}", lambda piece=piece: piece)
        start, number = end, number + 1


def _table_rows(file: Path) -> Iterator[dict[str, Any]]:
    if file.suffix == ".parquet":
        yield from _parquet_rows(file)
        return
    with file.open(encoding="utf-8") as lines:
        try:
            yield from (_json_row(line, number, file) for number, line in enumerate(lines, 1) if line.strip())
        except UnicodeDecodeError as error:
            raise InputError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def _json_row(line: str, number: int, file: Path) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"line {number} of {file} is not JSON: {error.msg}") from None
    if not isinstance(row, dict):
        raise InputError(f"line {number} of {file} is no JSON object")
    return row


def _parquet_rows(file: Path) -> Iterator[dict[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=PARQUET_ROWS):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{file} cannot be read as parquet: {_one_line(error)}") from None


def hub_documents(name: str, *, text_field: str = "text") -> Iterator[Document]:
    """Documents of a Hub data set, streamed in the order of its files.

    Args:
        name: ``OWNER/NAME``, ``OWNER/NAME/CONFIG``, each with an optional ``@SPLIT`` (``train`` if absent).
        text_field: the column that holds the text.

    Raises:
        InputError: the Hub cannot be reached (told within seconds), no such data set; while reading: no such column.
    """
    path, _, split = name.partition("@")
    owner_name, config = "/".join(path.split("/")[:2]), "/".join(path.split("/")[2:]) or None
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", owner_name):
        raise InputError(f"hub:{name} names no data set: write hub:OWNER/NAME, hub:OWNER/NAME/CONFIG or ...@SPLIT")
    if obstacle := hub_obstacle():
        raise InputError(f"data set {owner_name!r} is on the Hub, and {obstacle}")
    import datasets

    try:
        rows = datasets.load_dataset(owner_name, config, split=split or "train", streaming=True)
    except (OSError, ValueError) as error:
        raise InputError(f"data set {owner_name!r} cannot be opened: {_one_line(error)}") from None
    return _row_documents(rows, name, text_field, owner_name)


def _row_documents(rows: Iterable[dict[str, Any]], name: str, text_field: str, source: str) -> Iterator[Document]:
    for number, row in enumerate(rows):
        if text_field not in row:
            raise InputError(f"row {number} of {source} has no column {text_field!r}; its columns: {', '.join(row)}")
        text = row[text_field]
        if text is None:
            continue
        if not isinstance(text, str):
            raise InputError(f"column {text_field!r} of {source} holds {type(text).__name__}, not text")
        yield Document(str(row.get("id") or f"{name}#{number}"), lambda text=text: text)


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
