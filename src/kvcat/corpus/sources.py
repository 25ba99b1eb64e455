"""The documents of a corpus: text files of a folder, rows of tables, data sets of the Hub."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import fsspec

from kvcat.data import (
    SUFFIXES,
    SourceFile,
    is_hidden,
    open_rows,
    open_source,
    row_columns,
    text_or_bytes,
)
from kvcat.errors import InputError, one_line
from kvcat.files import MOST_TEXT_BYTES, expanded, full_path, parse_text
from kvcat.hub import HUB_PREFIX
from kvcat.text.encoder import repaired

DEFAULT_TEXT_COLUMN = "text"
DEFAULT_ID_COLUMN = "id"
_ALSO_TEXT = (".json",)  # a document like any other; for training it is none


@dataclass(frozen=True)
class CorpusDocument:
    """A document of a corpus, or the reason why a file or row holds none.

    Args:
        id: name of the document, unique in its corpus.
        text: the document; empty if there is a problem.
        problem: why the document has no text; None if it has one.
    """

    id: str
    text: str = ""
    problem: str | None = None

    @property
    def reason(self) -> str | None:
        """Why the document cannot have a cache of any model; None if it has a text."""
        if self.problem is not None:
            return self.problem
        return None if self.text.strip() else "the document is empty"

    @cached_property
    def checksum(self) -> str:
        """A hash of the text: a document with another text has another checksum."""
        content = self.text if self.problem is None else f"{self.problem}\0"
        return hashlib.sha256(content.encode()).hexdigest()[:32]


class Content(NamedTuple):
    """What identifies a document's text, and what it costs."""

    checksum: str
    num_characters: int


@dataclass(frozen=True)
class Corpus:
    """A corpus that was read once: no id occurs twice, and some document has a text.

    Args:
        contents: contents of all documents, by id.
    """

    files: Sequence[SourceFile]
    contents: Mapping[str, Content]

    @classmethod
    def read(cls, files: Sequence[SourceFile]) -> "Corpus":
        """The corpus in some files, of which it keeps no text.

        Raises:
            InputError: two documents with one id, no document, or none with a text; and as
                ``read_corpus``.
        """
        contents: dict[str, Content] = {}
        failure = None
        num_texts = 0
        for document in read_corpus(files):
            if document.id in contents:
                raise InputError(f"two documents of the corpus have the id {document.id[:80]!r}")
            contents[document.id] = Content(document.checksum, len(document.text))
            if document.reason is None:
                num_texts += 1
            elif failure is None:
                failure = document
        if failure is None and not num_texts:
            raise InputError("the corpus has no document")
        if failure is not None and not num_texts:
            raise InputError(
                f"none of the {len(contents)} documents of the corpus has a text; the first, "
                f"{failure.id[:80]!r}: {failure.reason}"
            )
        return cls(files, contents)

    def documents(self) -> Iterator[CorpusDocument]:
        """All documents, in order; they are read again."""
        return read_corpus(self.files)


def corpus_files(
    source: str,
    *,
    text_column: str = DEFAULT_TEXT_COLUMN,
    id_column: str = DEFAULT_ID_COLUMN,
    store: str = "",
) -> Sequence[SourceFile]:
    """The files of a corpus; none is read yet.

    Args:
        source: a folder of text files (``.json`` too), ``.jsonl`` or ``.parquet`` files; one such
            file; or ``hub:NAME[/CONFIG][@SPLIT]``.
        text_column, id_column: columns of a table.
        store: address of the store that will hold the caches, which must not be in the folder.

    Raises:
        InputError: no such source, a file of another kind, columns of text files, a column without
            a name, or no connection to the Hub (within seconds).
    """
    if not source.strip():
        raise InputError("the name of the corpus is empty: name a folder, a file or hub:NAME")
    if source == "installed" or source.startswith("stream:"):
        raise InputError(f"{source} is not a corpus: name a folder, a file or hub:NAME")
    is_local = not source.startswith(HUB_PREFIX) and store != "" and "://" not in store
    if is_local and full_path(store).is_relative_to(full_path(source)):
        raise InputError(f"store {store} is inside the corpus {source}: choose another folder")
    files = open_source(source, also_text=_ALSO_TEXT).files
    known = tuple(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
    if expanded(source).is_file() and not source.lower().endswith(known):
        raise InputError(
            f"{source} is not a corpus: rows are in .jsonl or .parquet files, one document each in "
            f"text files ({', '.join(SUFFIXES['text'])})"
        )
    columns = (text_column, id_column)
    if not all(columns):
        raise InputError("the name of a column is empty")
    has_table = any(file.kind != "text" for file in files)
    if files and not has_table and columns != (DEFAULT_TEXT_COLUMN, DEFAULT_ID_COLUMN):
        raise InputError(
            f"{source} holds text files alone, which have no columns: leave out the columns "
            f"{text_column!r} and {id_column!r}"
        )
    return [replace(file, text_field=text_column, id_field=id_column) for file in files]


def left_out(source: str, files: Sequence[SourceFile]) -> list[Path]:
    """The files of a corpus' folder of kinds that are not documents, without hidden
    ones.
    """
    folder = expanded(source)
    if source.startswith(HUB_PREFIX) or not folder.is_dir():
        return []
    known = {Path(file.url) for file in files}
    # a link that leads nowhere is named as well
    others = sorted(path for path in folder.rglob("*") if not path.is_dir() and path not in known)
    return [path for path in others if not is_hidden(path, folder)]


def read_corpus(files: Iterable[SourceFile]) -> Iterator[CorpusDocument]:
    """The documents of the files, in order.

    A text file is one document, named by its path in the folder. A row of a table is one document,
    named by its id column, or by the file and the number of the row if it has none.

    Raises:
        InputError: a table that cannot be read, or that lacks the text column or a named id column.
    """
    for file in files:
        if file.kind == "text":
            yield _text_document(file)
            continue
        for row, values in open_rows(file):
            yield _row_document(values, row, file)


def _text_document(file: SourceFile) -> CorpusDocument:
    """The document in a text file."""
    name = repaired(file.name)
    try:
        with fsspec.open(file.url, "rb") as raw:
            stream: Any = raw
            data: bytes = stream.read(MOST_TEXT_BYTES + 1)
    except Exception as error:  # clients of the network raise anything
        return CorpusDocument(name, problem=f"the file cannot be read: {one_line(error)}")
    try:
        return CorpusDocument(name, parse_text(data, "the file"))
    except InputError as error:
        return CorpusDocument(name, problem=str(error))


def _row_document(values: dict[str, Any] | bytes, row: int, file: SourceFile) -> CorpusDocument:
    """The document in a row of a table."""
    default_id = f"{file.name}#{row}"
    try:
        columns, is_damaged = row_columns(values, row, file)
    except InputError as error:
        return CorpusDocument(repaired(default_id), problem=str(error))
    recorded_id = text_or_bytes(columns.get(file.id_field))
    has_id = recorded_id not in (None, "") and not isinstance(recorded_id, bytes)
    name = repaired(str(recorded_id) if has_id else default_id)
    wanted = [file.text_field]
    if file.id_field != DEFAULT_ID_COLUMN:  # rows of most tables have no id, but the user named one
        wanted.append(file.id_field)
    for column in wanted:
        if column in columns:
            continue
        reason = f"row {row} has no column {column!r}; its columns: {', '.join(columns)}"
        if file.kind == "parquet":  # no row of the table has it
            raise InputError(f"{file.url}: {reason}")
        return CorpusDocument(name, problem=reason)
    if is_damaged:
        return CorpusDocument(name, problem=f"row {row} is not UTF-8 text")
    text = text_or_bytes(columns[file.text_field])
    if not isinstance(text, str):
        kinds = {"NoneType": "nothing", "bytes": "bytes that are not UTF-8"}
        kind = kinds.get(type(text).__name__, type(text).__name__)
        return CorpusDocument(name, problem=f"column {file.text_field!r} holds {kind}, not text")
    if repaired(text) != text:
        return CorpusDocument(name, problem=f"column {file.text_field!r} holds half a character")
    return CorpusDocument(name, text.removeprefix("\ufeff"))
