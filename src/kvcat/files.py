"""Atomic files, checksums in them, logs that survive a kill, and locks for one writer per folder.

Every file that kvcat reads again has a checksum, which is compared whenever the file is read:

- a file in memory (JSON, Parquet, safetensors) holds ``sha256:`` and the SHA-256 of its bytes,
  computed with zeros in the place of the hash (``sealed``)
- a large file that grows ends with the same, the SHA-256 of all bytes before it (``append_seal``)
- each line of a log of JSON lines ends with the CRC-32 of what is before it
- a folder of files for other programs has a list of hashes (``write_sums``)

Files without a checksum, which people and other programs write, are read too.
"""

import hashlib
import json
import os
import re
import shutil
import threading
import tomllib
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from kvcat.errors import InputError, one_line

LOCK_FILE = ".kvcat.lock"
MOST_TEXT_BYTES = 1 << 28
"""The largest size of one document's file: far more than any model reads, and fits in memory."""
SUMS_FILE = "SHA256SUMS"
CHECKSUM = "checksum"
"""The entry of a file's JSON or metadata that holds its seal."""
NO_SEAL = "sha256:" + "0" * 64
"""What ``sealed`` replaces."""
_PARTIAL = ".partial-"
_SEAL = re.compile(rb"sha256:([0-9a-f]{64})")
# these also find a checksum with a damaged byte
_JSON_SEAL = re.compile(rb'sha256:[0-9a-f]{64}"\s*\}\s*\Z')
_LINE_SUM = re.compile(rb'(?:, )?"(?:.rc32|c.c32|cr.32|crc.2|crc3.)": "(.{8})"\}\Z', re.DOTALL)
_SUM = re.compile(r"([0-9a-f]{64}) [ *](.+)")
_SHORT_WRITE = re.compile(r"\d+ requested and \d+ written")  # numpy's words, without an errno
_IS_DAMAGED = "is damaged: its content does not match its checksum"


@contextmanager
def atomic_write(target: Path) -> Iterator[Path]:
    """A temporary path that replaces the target at the end of the block.

    The block writes a file, or makes a folder and writes into it. If the block raises an error, its
    output is removed and the target is unchanged. A kill leaves the temporary path, which
    ``remove_partial`` removes. If several processes write, the last one wins. If the target is a
    link, the file to which it points is written. A file keeps its mode; new files have the mode
    that the umask gives, whatever the program that wrote them chose.

    Raises:
        InputError: the system cannot write: a full disk, a limit, no permission.
    """
    target = resolved(target)
    make_folder(target.parent)
    partial = _partial_path(target)
    try:
        _remove(partial)
        mode = target.stat().st_mode & 0o777 if target.is_file() else _usual_mode(partial)
        yield partial
        if partial.is_dir():
            files = [path for path in partial.rglob("*") if path.is_file()]
            for file in files:
                file.chmod(mode)
            _sync(*partial.rglob("*"))
        else:
            partial.chmod(mode)
        _sync(partial)
        if partial.is_dir() and target.exists():
            _remove(target)
        partial.replace(target)
        _sync(target.parent)
    except BaseException as error:
        with suppress(OSError, ValueError):  # what could not be made need not be removed
            _remove(partial)
        if isinstance(error, OSError | SafetensorError):
            raise WriteError(f"cannot write {target}: {reason(error)}") from error
        raise


def check_writable(target: Path) -> None:
    """Raise a ``WriteError`` if ``atomic_write`` cannot write to the folder of a target."""
    target = resolved(target)
    make_folder(target.parent)
    try:
        _usual_mode(_partial_path(target))
    except OSError as error:
        raise WriteError(f"cannot write {target}: {reason(error)}") from error


class WriteError(InputError):
    """A file that the system cannot write, now or for this user."""


def reason(error: BaseException) -> str:
    """Why the system cannot do something, without the number of the error."""
    if isinstance(error, OSError) and _SHORT_WRITE.fullmatch(str(error)):
        return "the disk is full, or a limit on the size of files is reached"
    return getattr(error, "strerror", None) or one_line(error)


def _partial_path(target: Path) -> Path:
    """Where this thread writes what will replace a target."""
    return target.with_name(f"{_PARTIAL}{os.getpid()}-{threading.get_ident()}-{target.name}")


def _usual_mode(unused: Path) -> int:
    """The mode that the umask gives to a new file, found with a file at a path that is unused."""
    os.close(os.open(unused, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    mode = unused.stat().st_mode & 0o777
    unused.unlink()
    return mode


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


def expanded(path: str | Path) -> Path:
    """The path with a home folder in place of ``~`` or ``~user``, as a shell writes it.

    A name of no user stays as it is.
    """
    return Path(os.path.expanduser(path))


def full_path(path: str | Path) -> Path:
    """The absolute path without links; ``InputError`` for circular links."""
    try:
        return expanded(path).resolve()
    except (OSError, RuntimeError):
        raise InputError(f"{path} is a link that leads back to itself") from None


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


def sealed(content: bytes) -> bytes:
    """The content with its checksum in the place of the last ``NO_SEAL``."""
    start = content.rindex(NO_SEAL.encode())
    seal = f"sha256:{hashlib.sha256(content).hexdigest()}".encode()
    return content[:start] + seal + content[start + len(seal) :]


def check_seal(content: bytes, name: object) -> None:
    """Raise an ``InputError`` if a content is not what ``sealed`` returned.

    Args:
        content: bytes of a file.
        name: name of the file.
    """
    seals = list(_SEAL.finditer(content))
    if not seals:
        raise InputError(f"{name} is damaged: it has no checksum")
    start, end = seals[-1].span()
    unsealed = content[:start] + NO_SEAL.encode() + content[end:]
    if sealed(unsealed) != content:
        raise InputError(f"{name} {_IS_DAMAGED}")


def append_seal(path: Path) -> None:
    """Append the checksum of a file's bytes to it; formats with offsets ignore further bytes."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    with path.open("ab") as file:
        file.write(f"sha256:{digest}".encode())


def check_appended_seal(path: Path) -> None:
    """Raise an ``InputError`` if a file ends with a checksum that its bytes do not have."""
    size = path.stat().st_size - len(NO_SEAL)
    if size < 0:
        return
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(size)
        seal = _SEAL.fullmatch(file.read())
        if seal is None:
            return
        file.seek(0)
        while size:
            block = file.read(min(size, 1 << 20))
            digest.update(block)
            size -= len(block)
    if digest.hexdigest().encode() != seal[1]:
        raise InputError(f"{path} {_IS_DAMAGED}: write it again")


def write_sums(folder: Path) -> None:
    """Write the list of the SHA-256 of a folder's files, which ``sha256sum --check`` reads too."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SUMS_FILE)
    lines = [f"{file_digest(file)}  {file.relative_to(folder).as_posix()}\n" for file in files]
    (folder / SUMS_FILE).write_text("".join(lines), encoding="utf-8")


def check_sums(folder: Path, *, leave_out: str = "") -> None:
    """Raise an ``InputError`` if a folder has a list of hashes and a file is not as in the list.

    Args:
        folder: with or without such a list.
        leave_out: files of these names, a pattern, are not read.
    """
    sums = folder / SUMS_FILE
    if not sums.is_file():
        return
    for line in read_text(sums).splitlines():
        match = _SUM.fullmatch(line)
        if match is None:
            raise InputError(f"{sums} is damaged: {line[:80]!r} is not the checksum of a file")
        file = folder / match[2]
        if leave_out and file.match(leave_out):
            continue
        if file.is_file() and file_digest(file) != match[1]:
            raise InputError(
                f"{file} is damaged: it does not match {SUMS_FILE}; write the folder again, or "
                f"remove {SUMS_FILE} if you changed the file on purpose"
            )


def file_digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(target: Path, content: Mapping[str, Any]) -> None:
    """Write an object as indented JSON with a checksum; the file is replaced atomically."""
    with atomic_write(target) as partial:
        partial.write_bytes(json_bytes(content))


def json_bytes(content: Mapping[str, Any]) -> bytes:
    """An object as a file of indented JSON with a checksum."""
    text = json.dumps({**content, CHECKSUM: NO_SEAL}, indent=2) + "\n"
    return sealed(text.encode())


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file, or the table in a .toml file; ``InputError`` if there is none."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} is not readable: {reason(error)}") from None
    return parse_json(content, path)


def parse_json(content: bytes, path: Path | str) -> dict[str, Any]:
    """The JSON object in a file's content without its checksum, or the table of a .toml file.

    Raises:
        InputError: it is none, or does not match its checksum.
    """
    parse = tomllib.loads if str(path).endswith(".toml") else json.loads
    try:
        parsed = parse(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not readable: {one_line(error)}") from None
    if not isinstance(parsed, dict):
        raise InputError(f"{path} does not contain a JSON object")
    if CHECKSUM in parsed or _JSON_SEAL.search(content):
        try:
            check_seal(content, path)
        except InputError as error:
            entry = f'the entry "{CHECKSUM}"'
            raise InputError(f"{error}; if you changed it on purpose, remove {entry}") from None
        del parsed[CHECKSUM]
    return parsed


def append_jsonl(path: Path, *records: Mapping[str, Any]) -> None:
    """Append one JSON line per record, each with a checksum, and return when they are on disk.

    A last line that a kill left incomplete is removed first.
    """
    try:
        with path.open("a+b") as stream:
            is_empty = stream.tell() == 0
            if not is_empty:
                stream.seek(-1, os.SEEK_END)
                if stream.read(1) != b"\n":
                    stream.seek(0)
                    stream.truncate(stream.read().rfind(b"\n") + 1)
            stream.write(jsonl_bytes(*records))
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise WriteError(f"cannot write {path}: {reason(error)}") from error


def jsonl_bytes(*records: Mapping[str, Any]) -> bytes:
    """One JSON line per record; its last entry is the CRC-32 of what is before it."""
    bodies = [json.dumps(record)[:-1].encode() for record in records]
    return b"".join(body + _line_end(body) + b"\n" for body in bodies)


def _line_end(body: bytes) -> bytes:
    """The end of a line, after its other entries: its checksum."""
    comma = b"" if body == b"{" else b", "
    return comma + b'"crc32": "%08x"}' % zlib.crc32(body)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The records of a log, in order; empty if the file does not exist.

    A last line that a kill left incomplete is skipped.

    Raises:
        InputError: another line is damaged.
    """
    if not path.exists():
        return []
    return parse_jsonl(path.read_bytes(), path)


def parse_jsonl(content: bytes, path: Path | str) -> list[dict[str, Any]]:
    """The records in the content of a log, without their checksums.

    If one line has a checksum, all need one.

    Raises:
        InputError: as ``read_jsonl``.
    """
    *lines, torn = content.split(b"\n")
    sums = [_LINE_SUM.search(line) for line in lines]
    # a kill leaves the beginning of a line, not a whole line with another byte in place of its end
    if _LINE_SUM.search(torn[:-1]):
        lines.append(torn)
        sums.append(None)
    is_checked = any(sums)
    records = []
    for line, line_sum in zip(lines, sums, strict=True):
        try:
            if is_checked and not _has_sum(line, line_sum):
                raise ValueError("it does not match its checksum")
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("it is not a JSON object")
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} is damaged: {line[:80]!r} is not a record: {error}") from None
        if is_checked:
            del record["crc32"]
        records.append(record)
    return records


def check_format(name: object, file_format: object, known: object, remedy: str) -> None:
    """Raise an ``InputError`` for a file of a format that this version does not read.

    Args:
        name: of the file or folder.
        file_format: the one that it names.
        known: the format that is read.
        remedy: what to do.
    """
    if file_format != known:
        raise InputError(
            f"{name} has format {str(file_format)[:80]}, and this version of kvcat reads {known}: "
            f"{remedy}"
        )


def check_record(types: Mapping[str, tuple[type, ...]], record: Mapping[str, Any]) -> None:
    """Raise a ``ValueError`` for a record that lacks an entry, has another one or a wrong type.

    Args:
        types: types that each entry may have.
        record: of a log or a table, which may have very many.
    """
    if record.keys() != types.keys():
        wrong = sorted(record.keys() ^ types.keys())[0]
        raise ValueError(f"it {'lacks' if wrong in types else 'has an unknown'} {wrong!r}")
    for name, allowed in types.items():
        if type(record[name]) not in allowed:
            raise ValueError(f"its {name} is {str(record[name])[:80]!r}")


def _has_sum(line: bytes, line_sum: re.Match[bytes] | None) -> bool:
    """Whether a line has the checksum that was recognised in it."""
    if line_sum is None:
        return False
    body = line[: line_sum.start()]
    return line == body + _line_end(body)


def make_folder(path: Path) -> None:
    """Make a folder and its parents; ``InputError`` if that is not possible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise _is_file(path) from None
    except OSError as error:
        raise InputError(f"cannot make folder {path}: {error.strerror}") from None


def check_no_links(folder: Path) -> None:
    """Raise an ``InputError`` if something in a folder is a link.

    Somebody else may have made the folder: through a link, other files would be written or removed.
    The folder itself may be a link.
    """
    for place, folders, files in os.walk(folder):
        for name in sorted([*folders, *files]):
            check_no_link(Path(place, name), folder)


def check_no_link(path: Path, folder: Path) -> None:
    """Raise an ``InputError`` if a path in a folder is a link."""
    if path.is_symlink():
        raise InputError(
            f"{path} is a link, and kvcat follows none in {folder}: put what it points to in its "
            "place, or let the whole folder be a link"
        )


def check_no_file(folder: Path) -> None:
    """Raise an ``InputError`` if an output folder's path is that of something else."""
    if folder.exists() and not folder.is_dir():
        raise _is_file(folder)


def _is_file(path: Path) -> InputError:
    """The error for a file where a folder will be written."""
    return InputError(f"{path} is a file: name a folder to write")


def check_new_folder(path: Path) -> None:
    """Raise an ``InputError`` if an output path exists and is not an empty folder."""
    check_no_file(path)
    if path.exists() and any(path.iterdir()):
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
    check_no_links(path)
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
        name: name of the lock file.
        timeout: longest time to wait for another writer, in seconds.

    Raises:
        InputError: another process holds the lock, or the folder cannot be written to.
    """
    is_new = not folder.exists()
    make_folder(folder)
    check_no_link(folder / name, folder)
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


def remove_partial(folder: Path, name: str | None = None) -> None:
    """Remove temporary files of killed writers; the caller must hold the lock of what they wrote.

    Args:
        folder: of the files.
        name: of the target that they were to replace; None: of all.
    """
    for path in folder.glob(f"{_PARTIAL}*"):
        *_, target = path.name.split("-", 3)  # as in ``_partial_path``
        if name in (None, target):
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
