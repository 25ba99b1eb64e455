"""Atomic files, logs that survive a kill, and locks for one writer per folder."""

import json
import os
import shutil
import threading
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from kvcat.errors import InputError

LOCK_FILE = ".kvcat.lock"
MOST_TEXT_BYTES = 1 << 28
"""The largest size of one document's file: far more than any model reads, and fits in memory."""
_PARTIAL = ".partial-"


@contextmanager
def atomic_write(target: Path) -> Iterator[Path]:
    """A temporary path that replaces the target at the end of the block.

    The block writes a file, or makes a folder and writes into it. If the block raises an error, its
    output is removed and the target is unchanged. A kill leaves the temporary path, which
    ``remove_partial`` removes. If several processes write, the last one wins. If the target is a
    link, the file to which it points is written.
    """
    target = resolved(target)
    make_folder(target.parent)
    partial = target.with_name(f"{_PARTIAL}{os.getpid()}-{threading.get_ident()}-{target.name}")
    _remove(partial)
    try:
        yield partial
        if partial.is_dir():
            _sync(*partial.rglob("*"))
        _sync(partial)
        if partial.is_dir() and target.exists():
            _remove(target)
        partial.replace(target)
        _sync(target.parent)
    except BaseException:
        _remove(partial)
        raise


def resolved(path: Path) -> Path:
    """The path to which a link points, or the path itself; ``InputError`` for circular links."""
    if not path.is_symlink():
        return path
    try:
        target = path.resolve()
    except (OSError, RuntimeError):
        target = path
    if target.is_symlink():
        raise InputError(f"{path} is a link that leads back to itself")
    return target


def read_text(path: Path) -> str:
    """The text in a UTF-8 file, without byte order mark; ``InputError`` if it is not UTF-8."""
    with path.open("rb") as stream:
        return parse_text(stream.read(MOST_TEXT_BYTES + 1), str(path))


def parse_text(data: bytes, name: str) -> str:
    """The text in the bytes of a UTF-8 file, without byte order mark.

    Args:
        data: at most ``MOST_TEXT_BYTES`` + 1 bytes from the start of the file.
        name: of the file, for messages.

    Raises:
        InputError: a longer text, a zero byte, or bytes that are not UTF-8.
    """
    zero = data.find(b"\0")
    if zero >= 0:
        raise InputError(f"{name} is not text: it has a zero byte at {zero}")
    if len(data) > MOST_TEXT_BYTES:
        raise InputError(f"{name} is longer than {MOST_TEXT_BYTES >> 20} MiB: split the text")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name} is not UTF-8 text: {error.reason} at byte {error.start}"
        ) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def write_text(target: Path, text: str) -> None:
    """Write a text to a UTF-8 file, which is replaced atomically."""
    with atomic_write(target) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(target: Path, content: Any) -> None:
    """Write a value to a file as indented JSON; the file is replaced atomically."""
    write_text(target, json.dumps(content, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file, or the table in a .toml file; ``InputError`` if there is none."""
    parse = tomllib.loads if path.suffix == ".toml" else json.loads
    try:
        content = parse(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is not readable: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} does not contain a JSON object")
    return content


def append_jsonl(path: Path, *records: Mapping[str, Any]) -> None:
    """Append one JSON line per record, and return when they are on disk.

    A last line that a kill left incomplete is removed first.
    """
    lines = [json.dumps(record) + "\n" for record in records]
    with path.open("a+b") as stream:
        is_empty = stream.tell() == 0
        if not is_empty:
            stream.seek(-1, os.SEEK_END)
            if stream.read(1) != b"\n":
                stream.seek(0)
                stream.truncate(stream.read().rfind(b"\n") + 1)
        stream.write("".join(lines).encode())
        stream.flush()
        os.fsync(stream.fileno())


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The records of a log, in order; empty if the file does not exist.

    A last line that a kill left incomplete is skipped.

    Raises:
        InputError: another line is damaged.
    """
    if not path.exists():
        return []
    records = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("it is not a JSON object")
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} is damaged: {line[:80]!r} is not a record: {error}") from None
        records.append(record)
    return records


def make_folder(path: Path) -> None:
    """Make a folder and its parents; ``InputError`` if that is not possible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make folder {path}: {error.strerror}") from None


def check_new_folder(path: Path) -> None:
    """Raise an ``InputError`` if an output path exists and is not an empty folder."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"output folder {path} is not empty")


def claim_folder(
    path: Path, config_file: str, config: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """The content of a folder's configuration file; None if the folder was empty.

    If the folder is empty and there is a configuration, it is written. The caller must hold
    ``one_writer``, and must compare its configuration with an old one.

    Raises:
        InputError: the folder holds other files, but no configuration file.
    """
    remove_partial(path)
    file = path / config_file
    if file.exists():
        return read_json(file)
    other_files = sorted(entry.name for entry in path.iterdir() if entry.name != LOCK_FILE)
    if other_files:
        raise InputError(
            f"folder {path} is not empty and has no {config_file}: it holds {other_files[0]}"
        )
    if config is not None:
        write_json(file, config)
    return None


@contextmanager
def one_writer(folder: Path, name: str = LOCK_FILE, *, timeout: float = 0.0) -> Iterator[None]:
    """Lock a folder so that no other process writes to it during the block.

    The folder is made if it does not exist. The operating system releases the lock when the process
    ends, for whatever reason. Writers of different parts of a folder use lock files of different
    names. A folder that was made here is removed if it stays empty.

    Args:
        folder: folder to write to.
        name: name of the lock file.
        timeout: longest time to wait for another writer, in seconds.

    Raises:
        InputError: another process holds the lock, or the folder cannot be written to.
    """
    is_new = not folder.exists()
    make_folder(folder)
    lock = FileLock(folder / name, timeout=timeout)
    try:
        lock.acquire()
    except Timeout:
        raise InputError(
            f"another process is writing to {folder}: wait until it ends, or choose another folder"
        ) from None
    except OSError as error:
        raise InputError(f"cannot write to folder {folder}: {error.strerror}") from None
    try:
        yield
    finally:
        lock.release()
        if is_new and [entry.name for entry in folder.glob("*")] == [name]:
            shutil.rmtree(folder)


def remove_partial(folder: Path) -> None:
    """Remove temporary files of killed writers; the caller must hold ``one_writer``."""
    for path in folder.glob(f"{_PARTIAL}*"):
        _remove(path)


def _sync(*paths: Path) -> None:
    """Wait until the files and folders are on disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove(path: Path) -> None:
    """Remove a file, a link or a folder with its content."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
