"""The header of a cache file, read and verified without loading torch.

A file is a safetensors file: eight bytes with the length of the header, the header as JSON, the tensors' bytes. Ours
hold a ``format`` of the form NAME-VERSION and a SHA-256 over every byte of the file, taken with zeros in its own place.
"""

import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

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


class TensorEntry(NamedTuple):
    """One tensor as the header describes it: safetensors' name of its type (F32, ...), shape, bytes of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Size, bytes."""
        return self.stop - self.start


class FileHeader(NamedTuple):
    """The header of a file of ours; ``file_size`` is in bytes."""

    kind: str
    digest: str  # the checksum
    entries: dict[str, str]  # without format and checksum
    tensors: dict[str, TensorEntry]
    file_size: int


def read_header(path: Path, *kinds: str) -> FileHeader:
    """The header of a file of one of these kinds, once the whole file agrees with its checksum.

    Raises:
        InputError: missing, truncated, no safetensors file, not of the first kind, of another version, or changed.
    """
    if not path.is_file():
        raise InputError(f"no cache file {path}")
    try:
        with path.open("rb") as file:
            return parse_header(file, path, *kinds)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error


def parse_header(file: io.BufferedIOBase, path: Path, *kinds: str) -> FileHeader:
    """As ``read_header``, from an open file whose name is ``path``."""
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
    kind = _kind(entries.pop("format", ""), path, kinds)
    end = max((tensor.stop for tensor in tensors.values()), default=8 + length)
    if end != size:
        raise InputError(f"{broken}: its header describes {end} bytes, it has {size}")
    whole, own = hashlib.sha256(length.to_bytes(8, "little")), entries.pop("sha256", "")
    whole.update(text.replace(f'"sha256":"{own}"'.encode(), f'"sha256":"{NO_DIGEST}"'.encode()))
    while block := file.read(_BLOCK):
        whole.update(block)
    if whole.hexdigest() != own:
        raise InputError(f"{path} is corrupt: its contents do not match its checksum")
    return FileHeader(kind, own, entries, tensors, size)


def parse_metadata(text: str, name: object) -> dict[str, str]:
    """How a cache was made, from its header entry; ``name`` is that of the cache, for the message of ``InputError``."""
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


def _kind(stated: str, path: Path, kinds: tuple[str, ...]) -> str:
    kind, _, version = stated.rpartition("-")
    if kind not in kinds:
        raise InputError(f"{path} is {KINDS[kind] + ', not' if kind in KINDS else 'not'} {KINDS[kinds[0]]}")
    if version != str(VERSIONS[kind]):
        raise InputError(f"{path} has format {version[:9]}; this version of kvcat reads {VERSIONS[kind]}")
    return kind
