"""A store of compact caches: reading it by document, and writing to it."""

import math
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from kvcat.cache import CompactCache
from kvcat.corpus.manifest import (
    CACHES,
    JOURNAL,
    Row,
    cache_file,
    journal_rows,
    manifest_rows,
    merged,
    read_rows,
    write_manifest,
)
from kvcat.corpus.settings import CorpusSettings, check_same
from kvcat.corpus.sources import CorpusDocument
from kvcat.corpus.storage import LocalStorage, Storage, open_storage
from kvcat.errors import InputError
from kvcat.files import check_format, json_bytes, parse_json
from kvcat.options import typed_fields

if TYPE_CHECKING:
    import pandas as pd

SETTINGS = "store.json"
_FORMAT = "kvcat-store-1"
_NOT_FINISHED = "its text has changed, and the run that makes the new cache has not finished"
_SECONDS_BETWEEN_READS = 5.0  # of the manifest, for ids that are unknown or had no cache
# the entries of store.json besides its format
_SETTINGS = {
    **get_type_hints(CorpusSettings), "dtype": str, "model": str, "fingerprint": str,
    "tokenizer": str,
}  # fmt: skip


class Store:
    """The compact caches of a corpus, by the ids of their documents.

    Args:
        address: a folder, or an address of fsspec such as ``s3://bucket/caches``.

    Raises:
        InputError: there is no store, or it is damaged.
    """

    def __init__(self, address: str | Path) -> None:
        self._storage = open_storage(address)
        self.address = self._storage.address
        settings = read_settings(self._storage)
        if settings is None:
            raise InputError(f"no store of caches in {address}: it has no {SETTINGS}")
        self.settings = settings
        """How its caches were made, and the name and fingerprint of their model."""
        self._read_at = -math.inf
        self.refresh()

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the documents that have a cache, sorted."""
        return tuple(sorted(id for id, row in self._rows.items() if row.error is None))

    @property
    def rows(self) -> list[Row]:
        """One row per document, sorted by id, with those that have no cache."""
        return [self._rows[id] for id in sorted(self._rows)]

    @property
    def manifest(self) -> "pd.DataFrame":
        """``rows`` as a table of pandas."""
        import pandas as pd

        rows = [row.record() for row in self.rows]
        columns = list(Row.__dataclass_fields__)
        table = pd.DataFrame(rows, columns=pd.Index(columns))
        return table.astype({"tokens": "Int64", "bytes": "Int64", "slots": float, "kl": float})

    def row(self, id: str) -> Row:
        """The row of a document.

        Raises:
            InputError: the store has no document of that id.
        """
        known = self._rows.get(id)
        if known is None or known.error is not None:  # it may have a cache by now
            self.refresh(older_than=_SECONDS_BETWEEN_READS)
        if id not in self._rows:
            raise InputError(f"store {self.address} has no document {_shown(id)}")
        return self._rows[id]

    def refresh(self, *, older_than: float = 0.0) -> None:
        """Read the manifest again, which another process may have written.

        Args:
            older_than: seconds; what was read later stays.
        """
        if time.monotonic() - self._read_at < older_than:
            return
        self._rows = read_rows(self._storage)
        self._read_at = time.monotonic()

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, id: object) -> bool:
        row = self._rows.get(id) if isinstance(id, str) else None
        return row is not None and row.error is None

    def __iter__(self) -> Iterator[str]:
        return iter(self.ids)

    def __getitem__(self, id: str) -> CompactCache:
        """The cache of a document.

        Raises:
            InputError: no such document, one without a cache, or a damaged file.
        """
        row = self.row(id)
        if row.error is not None:
            raise InputError(f"document {_shown(id)} has no cache: {row.error}")
        try:
            cache = self._storage.load_cache(cache_file(id))
        except InputError as error:
            self.refresh()  # its text may have changed to one that can have none
            row = self.row(id)
            if row.error is not None:
                raise InputError(f"document {_shown(id)} has no cache: {row.error}") from None
            raise InputError(
                f"{error}; without this file, the run that made the store makes it again"
            ) from None
        if cache.record.text_checksum != row.checksum:
            self.refresh()
            row = self.row(id)
        if cache.record.text_checksum != row.checksum:
            raise InputError(
                f"the cache of document {_shown(id)} is not of the text in the manifest: the run "
                "that writes the store has not finished"
            )
        return cache

    def check_joined(self) -> None:
        """Raise an ``InputError`` if its documents cannot follow one another in a prompt."""
        if self.settings.get("chat"):
            raise InputError(
                "several documents cannot be joined: the store was made with --chat, so that each "
                "of its documents begins with the chat template's system part and opens a user's "
                "turn, which a prompt has once; make the store without --chat"
            )


class StoreWriter:
    """A store that this process writes to; see ``open_writer``.

    Args:
        listed: rows of the manifest.
        journal: name of the log of this process.
        fingerprint: of the store's model.
    """

    def __init__(
        self, storage: Storage, listed: Mapping[str, Row], journal: str, fingerprint: str
    ) -> None:
        self.storage = storage
        self.listed = listed
        self.rows = read_rows(storage)
        """The newest row of every document, by id."""
        self.journal = journal
        self._fingerprint = fingerprint
        self.failed: set[str] = set()
        """Ids of the documents of which this process found that they cannot have a cache."""
        self.has_added = False
        self._files = frozenset(storage.names(CACHES))
        self._waiting: list[Row] = []
        self._start = time.monotonic()
        self._last_append = self._start

    def has(self, id: str, checksum: str) -> bool:
        """Whether the store had the cache of a text under an id when it was opened."""
        row = self.rows.get(id)
        if row is None or row.error is not None or row.checksum != checksum:
            return False
        if row.fingerprint != self._fingerprint:  # a manifest of another store
            return False
        return cache_file(id) in self._files

    def replaces(self, documents: Iterable[CorpusDocument]) -> None:
        """Record that caches of other texts of these documents are about to be replaced.

        If the run is killed between that and the record of the new cache, an earlier text that
        comes back is not taken for one that has its cache.
        """
        rows = []
        for document in documents:
            row = self.rows.get(document.id)
            if row is not None and row.error is None and row.checksum != document.checksum:
                about = {"method": row.method, "model": row.model, "fingerprint": row.fingerprint}
                rows.append(Row.failed(document.id, document.checksum, _NOT_FINISHED, about))
        if rows:
            self.add(rows)
            self.flush()

    def add(self, rows: Sequence[Row]) -> None:
        """Record documents whose caches are in the store, or that cannot have one."""
        for row in rows:
            earlier = self.rows.get(row.id)
            revision = 0 if earlier is None else earlier.revision + 1
            self.rows[row.id] = replace(row, revision=revision)
            self._waiting.append(self.rows[row.id])
            if row.error in (None, _NOT_FINISHED):
                self.failed.discard(row.id)
            else:
                self.failed.add(row.id)
        self.has_added = self.has_added or bool(rows)
        now = time.monotonic()
        if now - self._last_append >= self.storage.seconds_between_appends(now - self._start):
            self.flush()

    def flush(self) -> None:
        """Write the records that wait to the log."""
        if self._waiting:
            self.storage.append(self.journal, [row.record() for row in self._waiting])
        self._waiting = []
        self._last_append = time.monotonic()


@contextmanager
def open_writer(
    address: str | Path, settings: Mapping[str, Any], shard: tuple[int, int] | None = None
) -> Iterator[StoreWriter]:
    """A block in which this process writes to a store; at its end the manifest is complete.

    Several shards may write at once, each its documents. Their logs remain until a later
    writer of the whole store includes them in the manifest; readers read both.

    Args:
        address: as in ``Store``; a new store is made.
        shard: number and count of the parts, where this process writes one part; None: all.

    Raises:
        InputError: a store with other settings; a folder with other files; another writer.
    """
    storage = open_storage(address)
    with storage.writer(_part(shard)):
        with ExitStack() as stack:
            if shard is not None:
                stack.enter_context(storage.starter())
            _claim(storage, settings)
        # a remote store may have several writers, each with its log
        unique = "" if isinstance(storage, LocalStorage) else f"-{uuid.uuid4().hex[:12]}"
        journal = f"{JOURNAL}/{_part(shard) or 'all'}{unique}.jsonl"
        listed = merged(manifest_rows(storage))
        writer = StoreWriter(storage, listed, journal, settings["fingerprint"])
        try:
            yield writer
        finally:
            writer.flush()
        if shard is None:
            _finish(writer)
        else:
            with storage.starter():
                write_manifest(storage, read_rows(storage).values())


def check_store(
    address: str | Path, settings: Mapping[str, Any], shard: tuple[int, int] | None = None
) -> None:
    """Raise an ``InputError`` if ``open_writer`` would; the model is not compared.

    It costs little and comes before the model is loaded.
    """
    storage = open_storage(address)
    recorded = _settings_of_store_or_empty(storage)
    if recorded is not None:
        check_same(storage.address, recorded, settings)
        with storage.writer(_part(shard)):
            read_rows(storage)
    storage.check_writable()


def _part(shard: tuple[int, int] | None) -> str | None:
    """The name of one of several parts of a store; None: all of it."""
    return None if shard is None else f"{shard[0]}-of-{shard[1]}"


def read_settings(storage: Storage) -> dict[str, Any] | None:
    """The settings of a store; None if there is no store.

    Raises:
        InputError: a damaged file, or a store of another format.
    """
    content = storage.read(SETTINGS)
    if content is None:
        return None
    name = f"{storage.address}/{SETTINGS}"
    settings = parse_json(content, name)
    remedy = "compress the corpus again, into another store"
    check_format(f"store {storage.address}", settings.pop("format", None), _FORMAT, remedy)
    settings = {"in_pieces": False, "tokenizer": "", **settings}  # older stores have no such ones
    typed_fields(_SETTINGS, {"budgets": "", **settings}, name)
    return settings


def _claim(storage: Storage, settings: Mapping[str, Any]) -> None:
    """Write the settings of a new store, or compare them with those of an old one."""
    recorded = _settings_of_store_or_empty(storage)
    if recorded is not None:
        check_same(storage.address, recorded, settings)
        return
    storage.write(SETTINGS, json_bytes({"format": _FORMAT, **settings}))


def _settings_of_store_or_empty(storage: Storage) -> dict[str, Any] | None:
    """The settings of a store; None if its address is empty.

    Raises:
        InputError: there are other files, or as in ``read_settings``.
    """
    settings = read_settings(storage)
    if settings is not None:
        return settings
    occupant = storage.occupant()
    if occupant is None:
        return None
    # another writer may have made the store between the two requests: settings are its first file
    settings = read_settings(storage)
    if settings is None:
        raise InputError(
            f"{storage.address} is not empty and has no {SETTINGS}: it holds {occupant}"
        )
    return settings


def _finish(writer: StoreWriter) -> None:
    """Write the manifest, then remove the logs that it replaces and caches of failed documents.

    A remote store may have other writers now. What they have done may be in no log yet, and their
    manifest may replace this one. So there the log of this process remains, for a later one; only
    caches are removed whose documents failed in this process; and a process that has recorded
    nothing leaves the manifest as it is.
    """
    storage = writer.storage
    is_local = isinstance(storage, LocalStorage)
    if writer.listed and not (is_local or writer.has_added):
        return
    logs = {name: journal_rows(storage, name) for name in storage.names(JOURNAL)}
    rows = merged([*read_rows(storage).values(), *writer.rows.values()])
    write_manifest(storage, rows.values())
    for name in list(logs) if is_local else _finished_logs(logs, writer):
        storage.remove(name)
    failed = [id for id, row in rows.items() if row.error is not None]
    for id in failed if is_local else writer.failed:
        storage.remove(cache_file(id))


def _finished_logs(logs: Mapping[str, Sequence[Row]], writer: StoreWriter) -> list[str]:
    """The names of the logs to which no process adds any more, without that of this process.

    A remote log is several files, none of which changes. What the manifest held when this process
    began is in every manifest that is written since then.
    """

    def is_listed(row: Row) -> bool:
        listed = writer.listed.get(row.id)
        return listed is not None and listed.age >= row.age

    return [
        name
        for name, rows in logs.items()
        if not name.startswith(writer.journal) and all(map(is_listed, rows))
    ]


def _shown(id: str) -> str:
    """An id in a message: its beginning."""
    return repr(id if len(id) <= 80 else f"{id[:77]}...")
