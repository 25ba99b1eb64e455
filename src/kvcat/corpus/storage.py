"""Where a store keeps its files: a folder, or an address that fsspec opens (``s3://``, ...)."""

import os
import tempfile
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec

from kvcat.cache import CompactCache
from kvcat.errors import InputError, one_line
from kvcat.files import (
    append_jsonl,
    atomic_write,
    check_no_link,
    expanded,
    jsonl_bytes,
    make_folder,
    one_writer,
    remove_partial,
)

WRITER_LOCK = ".kvcat.lock"
_HIDDEN = ".kvcat"
_SHARD_LOCKS = ".kvcat-shard-*.lock"
_SECONDS_TO_START = 30.0  # that a shard waits while other shards start


class Storage(ABC):
    """Files by name below one address; every file is written whole or not at all."""

    address: str

    @abstractmethod
    def read(self, name: str) -> bytes | None:
        """The content of a file; None if it does not exist."""

    @abstractmethod
    def write(self, name: str, content: bytes) -> None:
        """Write a file, or replace it."""

    @abstractmethod
    def append(self, name: str, records: list[dict[str, Any]]) -> None:
        """Add records to a log of JSON lines; remote logs are files NAME.0, NAME.1, ..."""

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """The names of all files below a folder, sorted; none if the folder does not exist."""

    @abstractmethod
    def occupant(self) -> str | None:
        """The name of something in the store; None if it is empty."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file if it exists."""

    @abstractmethod
    def check_writable(self) -> None:
        """Raise an ``InputError`` if no file can be written; leaves nothing behind."""

    @abstractmethod
    def save_cache(self, name: str, cache: CompactCache) -> None:
        """Write a cache file, or replace it."""

    @abstractmethod
    def load_cache(self, name: str) -> CompactCache:
        """The cache in a file; ``InputError`` if it is missing or damaged."""

    @abstractmethod
    def writer(self, shard: str | None) -> Any:
        """A block in which this process may write to the store.

        Args:
            shard: name of the part that this process writes, such as "0-of-4"; None: all of it.

        Raises:
            InputError: another process writes to a local store, or to the same part of it.
        """

    @abstractmethod
    def starter(self) -> Any:
        """A block in which no other process of a local store changes its common files."""

    @abstractmethod
    def seconds_between_appends(self, elapsed: float) -> float:
        """How long records may wait to be added to a log in a run of this length."""


class LocalStorage(Storage):
    """Files in a folder.

    No link in the folder is followed, because somebody else may have made it; the folder itself may
    be a link.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.address = str(root)

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if it does not exist."""
        try:
            return self._path(name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, name: str, content: bytes) -> None:
        """Write a file, or replace it."""
        with atomic_write(self._path(name)) as partial:
            partial.write_bytes(content)

    def append(self, name: str, records: list[dict[str, Any]]) -> None:
        """Add records to a log of JSON lines, on disk when this returns."""
        path = self._path(name)
        make_folder(path.parent)
        append_jsonl(path, *records)

    def names(self, folder: str) -> list[str]:
        """The names of all files below a folder, sorted, without hidden ones."""
        names = []
        for place, _, files in os.walk(self._path(folder)):
            below = Path(place).relative_to(self.root)
            names += [(below / name).as_posix() for name in files if not name.startswith(".")]
        return sorted(names)

    def occupant(self) -> str | None:
        """The name of something in the folder that is not hidden; None if it is empty."""
        if not self.root.is_dir():
            return None
        entries = sorted(path.name for path in self.root.iterdir())
        return next((name for name in entries if not name.startswith(_HIDDEN)), None)

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        self._path(name).unlink(missing_ok=True)

    def check_writable(self) -> None:
        """Reject a folder in which, or in whose nearest parent, no file can be written."""
        folder = self.root
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        if not folder.is_dir():
            raise InputError(f"store {self.root}: {folder} is not a folder")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise InputError(f"store {self.root}: no permission to write to {folder}")

    def save_cache(self, name: str, cache: CompactCache) -> None:
        """Write a cache file, or replace it."""
        cache.save(self._path(name))

    def load_cache(self, name: str) -> CompactCache:
        """The cache in a file."""
        return CompactCache.load(self._path(name))

    @contextmanager
    def writer(self, shard: str | None) -> Iterator[None]:
        """A block in which this process may write; a second writer is rejected."""
        if shard is None:
            with one_writer(self.root, WRITER_LOCK):
                self._check_no_shard()
                self._remove_partial()
                yield
                self._remove_partial()  # of a worker on a cluster that died
            return
        with ExitStack() as stack:
            with self.starter():
                stack.enter_context(one_writer(self.root, f".kvcat-shard-{shard}.lock"))
            yield

    def starter(self) -> Any:
        """A block in which no other process of the store changes its common files."""
        return one_writer(self.root, WRITER_LOCK, timeout=_SECONDS_TO_START)

    def seconds_between_appends(self, elapsed: float) -> float:  # noqa: ARG002
        """0: every record is added at once."""
        return 0.0

    def _check_no_shard(self) -> None:
        """Reject a store to which a shard is being written; none can start meanwhile."""
        for lock in sorted(self.root.glob(_SHARD_LOCKS)):
            with one_writer(self.root, lock.name):
                pass
            lock.unlink(missing_ok=True)

    def _remove_partial(self) -> None:
        """Remove temporary files of killed writers."""
        for place, _, _ in os.walk(self.root):
            remove_partial(Path(place))

    def _path(self, name: str) -> Path:
        """The path of a file or folder; ``InputError`` if a part of it below the root is a link."""
        path = self.root
        for step in Path(name).parts:
            path = path / step
            check_no_link(path, self.root)
        return path


class RemoteStorage(Storage):
    """Files below an address of fsspec whose writes are whole, such as an object store's.

    Args:
        root: path in it.
        address: for messages.
    """

    def __init__(self, filesystem: Any, root: str, address: str) -> None:
        self.filesystem = filesystem
        self.root = root.rstrip("/")
        self.address = address.rstrip("/")
        self._next_number: dict[str, int] = {}

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if it does not exist."""
        with self._connection(f"read {name} in"):
            try:
                return self.filesystem.cat_file(f"{self.root}/{name}")
            except FileNotFoundError:
                return None

    def write(self, name: str, content: bytes) -> None:
        """Write a file, or replace it."""
        with self._connection(f"write {name} to"):
            self.filesystem.pipe_file(f"{self.root}/{name}", content)

    def append(self, name: str, records: list[dict[str, Any]]) -> None:
        """Add records as a new file NAME.NUMBER: object stores cannot append."""
        number = self._next_number.get(name, 0)
        self.write(f"{name}.{number:06d}", jsonl_bytes(*records))
        self._next_number[name] = number + 1

    def names(self, folder: str) -> list[str]:
        """The names of all files below a folder, sorted, as the server lists them now."""
        with self._connection("list"):
            self.filesystem.invalidate_cache()
            paths = self.filesystem.find(f"{self.root}/{folder}")
        root = f"{self.root.lstrip('/')}/"
        return sorted(path.lstrip("/").removeprefix(root) for path in paths)

    def occupant(self) -> str | None:
        """The name of something below the address; None if it is empty."""
        with self._connection("list"):
            try:
                self.filesystem.invalidate_cache()
                entries = self.filesystem.ls(self.root, detail=False)
            except FileNotFoundError:
                return None
        names = sorted(entry.rstrip("/").rpartition("/")[2] for entry in entries)
        return next((name for name in names if not name.startswith(_HIDDEN)), None)

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        with self._connection(f"remove {name} from"), suppress(FileNotFoundError):
            self.filesystem.rm_file(f"{self.root}/{name}")

    def check_writable(self) -> None:
        """Write a small file and remove it: a missing bucket or wrong key shows here."""
        path = f"{self.root}/{_HIDDEN}-{uuid.uuid4().hex}"
        with self._connection("write to"):
            self.filesystem.pipe_file(path, b"")
            self.filesystem.rm_file(path)

    def save_cache(self, name: str, cache: CompactCache) -> None:
        """Write a cache file, or replace it."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "cache")
            cache.save(file)
            self.write(name, file.read_bytes())

    def load_cache(self, name: str) -> CompactCache:
        """The cache in a file."""
        content = self.read(name)
        if content is None:
            raise InputError(f"no cache file {self.address}/{name}")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "cache")
            file.write_bytes(content)
            try:
                return CompactCache.load(file)
            except InputError as error:
                reason = str(error).replace(str(file), f"{self.address}/{name}")
                raise InputError(reason) from None

    @contextmanager
    def writer(self, shard: str | None) -> Iterator[None]:  # noqa: ARG002
        """A block in which this process may write; writers of the same documents write the same."""
        yield

    def starter(self) -> Any:
        """A block without effect."""
        return ExitStack()

    def seconds_between_appends(self, elapsed: float) -> float:
        """10 seconds, or 1 % of a long run: a log must not become very many files."""
        return max(10.0, elapsed / 100)

    @contextmanager
    def _connection(self, doing: str) -> Iterator[None]:
        """A block whose errors of the network become one line."""
        try:
            yield
        except InputError:
            raise
        except Exception as error:  # clients of the network raise anything
            raise InputError(f"cannot {doing} {self.address}: {one_line(error)}") from error


def open_storage(address: str | Path) -> Storage:
    """The files below a folder or an address of fsspec.

    Raises:
        InputError: an unknown kind of address, or one whose package is not installed.
    """
    text = str(address)
    if not text.strip():
        raise InputError("the address of the store is empty: name a folder or s3://BUCKET/STORE")
    if "://" not in text:
        return LocalStorage(expanded(text))
    try:
        filesystem, root = fsspec.core.url_to_fs(text)
    except ImportError as error:
        raise InputError(f"{text} needs a package that is not installed: {error}") from None
    except Exception as error:  # each kind of address has errors of its own
        raise InputError(f"cannot open {text}: {one_line(error)}") from error
    if text.startswith(("file://", "local://")):
        return LocalStorage(Path(root))
    return RemoteStorage(filesystem, root, text)
