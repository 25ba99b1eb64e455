"""Documents from local files, folders and the Hub."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvcat.errors import InputError

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".tex", ".html")
TABLE_SUFFIXES = (".parquet", ".jsonl", ".json")
PIECE_CHARACTERS = 1 << 16


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

    A table (``.parquet``, ``.jsonl``) holds one document a row; a plain text longer than 65,536 characters becomes
    consecutive documents of at most that size, cut at line ends, so that a part of it can be held out.

    Raises:
        InputError: path missing, no readable file, text field missing, text that is not UTF-8.
    """
    if not path.exists():
        raise InputError(f"no such text file or folder: {path}")
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in TEXT_SUFFIXES + TABLE_SUFFIXES)
    if not files:
        raise InputError(f"no text, .jsonl or .parquet file in folder {path}")
    return _read_files(files, path if path.is_dir() else path.parent, text_field)


def _read_files(files: list[Path], root: Path, text_field: str) -> Iterator[Document]:
    for file in files:
        name = file.relative_to(root).as_posix()
        if file.suffix in TABLE_SUFFIXES:
            yield from _table_documents(file, name, text_field)
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


def _table_documents(file: Path, name: str, text_field: str) -> Iterator[Document]:
    import datasets

    builder = "parquet" if file.suffix == ".parquet" else "json"
    try:
        rows = datasets.load_dataset(builder, data_files=str(file), split="train", streaming=True)
        for number, row in enumerate(rows):
            yield _row_document(row, f"{name}#{number}", text_field, str(file))
    except (OSError, json.JSONDecodeError, datasets.exceptions.DatasetGenerationError) as error:
        raise InputError(f"{file} cannot be read as {builder}: {str(error).splitlines()[0]}") from None
    except Exception as error:
        if type(error).__module__.startswith("pyarrow"):
            raise InputError(f"{file} cannot be read as {builder}: {str(error).splitlines()[0]}") from None
        raise


def hub_documents(name: str, *, text_field: str = "text") -> Iterator[Document]:
    """Documents of a Hub data set, streamed in the order of its files.

    Args:
        name: ``OWNER/NAME``, ``OWNER/NAME/CONFIG``, each with an optional ``@SPLIT`` (``train`` if absent).
        text_field: the column that holds the text.

    Raises:
        InputError: the Hub cannot be reached, no such data set, no such column.
    """
    import datasets

    path, _, split = name.partition("@")
    owner_name, config = "/".join(path.split("/")[:2]), "/".join(path.split("/")[2:]) or None
    try:
        rows = datasets.load_dataset(owner_name, config, split=split or "train", streaming=True)
    except (OSError, ValueError) as error:
        raise InputError(f"data set {owner_name!r} cannot be opened: {str(error).splitlines()[0]}") from None
    return (_row_document(row, f"{name}#{number}", text_field, owner_name) for number, row in enumerate(rows))


def _row_document(row: dict[str, object], fallback_id: str, text_field: str, source: str) -> Document:
    if text_field not in row:
        raise InputError(f"{source} has no column {text_field!r}; its columns: {', '.join(row)}")
    text = str(row[text_field])
    name = str(row.get("id") or fallback_id)
    return Document(name, lambda: text)
