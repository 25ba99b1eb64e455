"""The header of a cache file, read and verified without loading torch.

A file is a safetensors file: eight bytes with the length of the header, the header as JSON, the tensors'
bytes. Ours hold a ``format`` of the form NAME-VERSION and a SHA-256 over every byte of the file, taken
with zeros in its own place.
"""

import hashlib
import io
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcat.errors import InputError

CACHE, PREFIX, STATE = "kvcat-compact-cache", "kvcat-prefix", "kvcat-gradient-state"
KINDS = {
    CACHE: "a compact cache of kvcat",
    PREFIX: "an exported prefix of kvcat",
    STATE: "the state of a gradient-based run of kvcat",
}
VERSIONS = {CACHE: 2, PREFIX: 1, STATE: 3}
NO_DIGEST = "0" * 64
_LONGEST_HEADER = 2**24
_BLOCK = 2**22


@dataclass(frozen=True)
class TensorEntry:
    """One tensor as the header describes it: safetensors' name of its type (F32, ...), shape, bytes of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Size, bytes."""
        return self.stop - self.start


@dataclass(frozen=True)
class FileHeader:
    """The header of a file of ours; ``entries`` are without ``format`` and ``sha256``, ``file_size`` is in bytes."""

    kind: str
    version: int
    entries: dict[str, str]
    tensors: dict[str, TensorEntry]
    file_size: int


def read_header(path: Path, *, verify: bool = True) -> FileHeader:
    """The header of a compact cache or an exported prefix; ``verify`` compares the whole file with its checksum.

    Raises:
        InputError: missing, truncated, no safetensors file, not ours, of another version, or changed.
    """
    if not path.is_file():
        raise InputError(f"no cache file {path}")
    try:
        with path.open("rb") as file:
            return parse_header(file, path, verify=verify)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error


def parse_header(
    file: io.BufferedIOBase, path: Path, *, verify: bool = True, kinds: Sequence[str] = (CACHE, PREFIX)
) -> FileHeader:
    """As ``read_header``, of the given kinds, from an open file whose name is ``path``."""
    broken = f"{path} is truncated or not a safetensors file"
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
        raise InputError(f"{broken}: {size} bytes hold no header of {length}")
    text = file.read(length)
    try:
        header = json.loads(text)
        entries = {str(key): str(value) for key, value in header.pop("__metadata__", {}).items()}
        tensors = {name: _entry(facts, 8 + length) for name, facts in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{broken}: its header cannot be read ({type(error).__name__})") from None
    kind, version = _format(entries.pop("format", ""), path, kinds)
    end = max((tensor.stop for tensor in tensors.values()), default=8 + length)
    if end != size:
        raise InputError(f"{broken}: its header describes {end} bytes, it has {size}")
    stated = entries.pop("sha256", "")
    if verify and stated != _digest(file, text, stated):
        raise InputError(f"{path} is corrupt: its contents do not match its checksum")
    return FileHeader(kind, version, entries, tensors, size)


def parse_metadata(text: str, name: object) -> dict[str, str]:
    """How a cache was made, from its header entry; ``name`` is that of the cache, for the message.

    Raises:
        InputError: no flat table of texts.
    """
    try:
        metadata = json.loads(text)
    except (ValueError, RecursionError):
        metadata = None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise InputError(f"{name}: its metadata is no table of texts")
    return metadata


def _entry(facts: dict[str, Any], offset: int) -> TensorEntry:
    start, stop = (int(at) for at in facts["data_offsets"])
    if not 0 <= start <= stop:
        raise ValueError(f"a tensor from byte {start} to {stop}")
    return TensorEntry(str(facts["dtype"]), tuple(int(n) for n in facts["shape"]), offset + start, offset + stop)


def _format(stated: str, path: Path, kinds: Sequence[str]) -> tuple[str, int]:
    match = re.fullmatch(r"(kvcat-[a-z-]+)-(\d{1,9})", stated, re.ASCII)
    if match is None or match[1] not in KINDS:
        raise InputError(f"{path} is not {KINDS[kinds[0]]}")
    kind, version = match[1], int(match[2])
    if kind not in kinds:
        raise InputError(f"{path} is {KINDS[kind]}, not {KINDS[kinds[0]]}")
    if version != VERSIONS[kind]:
        age = "was written by a newer kvcat," if version > VERSIONS[kind] else "has"
        raise InputError(f"{path} {age} format {version}; this version reads {VERSIONS[kind]}")
    return kind, version


def _digest(file: io.BufferedIOBase, header: bytes, stated: str) -> str:
    """SHA-256 of the whole file, with zeros where its own checksum stands."""
    result = hashlib.sha256(len(header).to_bytes(8, "little"))
    result.update(header.replace(f'"sha256":"{stated}"'.encode(), f'"sha256":"{NO_DIGEST}"'.encode()))
    file.seek(8 + len(header))
    while block := file.read(_BLOCK):
        result.update(block)
    return result.hexdigest()
