"""Files that are complete or absent, logs that survive a kill, and one writer per folder."""

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
_PARTIAL = ".partial-"


@contextmanager
def atomic_write(target: Path) -> Iterator[Path]:
    """A temporary path that becomes the target at the end of the block.

    The block writes a file, or makes a folder and writes into it. If the block raises, its output
    is removed and the old target stays. A kill leaves only the temporary path, which
    ``remove_partial`` removes. If several processes write, the last one wins. If the target is a
    link, the file that it points to is written.
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
    """The path that a link points to, or the path itself; ``InputError`` for links in a circle."""
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
    """A UTF-8 text file without a byte order mark; ``InputError`` if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start}"
        ) from None


def write_json(target: Path, content: Any) -> None:
    """Write a value as indented JSON, completely or not at all."""
    with atomic_write(target) as partial:
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file, or the table in a .toml file; ``InputError`` if there is none."""
    parse = tomllib.loads if path.suffix == ".toml" else json.loads
    try:
        content = parse(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is not readable: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} holds no JSON object")
    return content


def append_jsonl(path: Path, *records: Mapping[str, Any]) -> None:
    """Append one JSON line per record and return when they are on disk.

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
    """The records of a log, in order; none if there is no such file.

    A last line that a kill left incomplete is left out.

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
                raise ValueError("it is no JSON object")
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} is damaged: {line[:80]!r} is no record: {error}") from None
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
    """The content of the folder's configuration file; None if the folder was empty.

    Call it under ``one_writer``. The configuration, if any, is written to an empty folder. The
    caller compares it with an old one.

    Raises:
        InputError: the folder holds other files but no such configuration.
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
    """Lock a folder, made if absent, so that no other process writes to it during the block.

    However the process ends, the operating system releases the lock. Writers of different parts of
    a folder use lock files of different names. A folder that was made here and stays empty is
    removed.

    Args:
        folder: to write to.
        name: name of the lock file.
        timeout: seconds to wait for another writer.

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
    """Remove the temporary files of killed writers from a folder; call it under ``one_writer``."""
    for path in folder.glob(f"{_PARTIAL}*"):
        _remove(path)


def _sync(*paths: Path) -> None:
    """Wait until files and folders are on disk."""
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
