"""What a file of tensors says of itself, read and verified without loading torch.

A file is a safetensors file: eight bytes with the length of the header, the header as JSON, the tensors' bytes. Ours
hold a ``format`` of the form NAME-VERSION and a SHA-256 over every byte of the file, taken with zeros in its own place.
"""

import hashlib
import io
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcat.errors import InputError

CACHE, PREFIX = "kvcat-compact-cache", "kvcat-prefix"
KINDS = {CACHE: "a compact cache of kvcat", PREFIX: "an exported prefix of kvcat"}
VERSIONS = {CACHE: (1, 2), PREFIX: (1, 1)}
NO_DIGEST = "0" * 64
_LONGEST_HEADER = 2**27
_BLOCK = 2**22
_TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64"}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor as the header describes it.

    Args:
        dtype: safetensors' name: F32, BF16, ...
        shape: its axes.
        start: offset of its first byte in the file.
        stop: one past its last byte.
    """

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
    """The header of a file of ours.

    Args:
        kind: ``CACHE`` or ``PREFIX``.
        version: of the format.
        entries: text by key, without ``format`` and ``sha256``.
        tensors: by name.
        file_size: bytes.
    """

    kind: str
    version: int
    entries: dict[str, str]
    tensors: dict[str, TensorEntry]
    file_size: int


def read_header(path: Path, *, verify: bool = True) -> FileHeader:
    """The header of a compact cache or an exported prefix.

    Args:
        path: file to read.
        verify: whether the bytes of the whole file are compared with its checksum.

    Raises:
        InputError: missing, truncated, no safetensors file, not ours, of a newer kvcat, or changed since written.
    """
    if not path.is_file():
        raise InputError(f"no cache file {path}")
    try:
        with path.open("rb") as file:
            return parse_header(file, path, verify=verify)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error


def parse_header(file: io.BufferedIOBase, path: Path, *, verify: bool = True) -> FileHeader:
    """As ``read_header``, from an open file.

    Args:
        file: at its beginning.
        path: its name, for messages.
        verify: as there.

    Raises:
        InputError: as there, but for a missing file.
    """
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
    kind, version = _format(entries.pop("format", ""), path)
    end = max((tensor.stop for tensor in tensors.values()), default=8 + length)
    if end != size:
        raise InputError(f"{broken}: its header describes {end} bytes, it has {size}")
    told = entries.pop("sha256", "")
    if verify:
        old = (kind, version) == (CACHE, 1)
        found = _digest_of_version_1(file, tensors, entries) if old else digest(file, text, told)
        if told != found:
            raise InputError(f"{path} is corrupt: its contents do not match its checksum")
    return FileHeader(kind, version, entries, tensors, size)


def _entry(facts: dict[str, Any], offset: int) -> TensorEntry:
    start, stop = (int(at) for at in facts["data_offsets"])
    if not 0 <= start <= stop:
        raise ValueError(f"a tensor from byte {start} to {stop}")
    return TensorEntry(str(facts["dtype"]), tuple(int(n) for n in facts["shape"]), offset + start, offset + stop)


def _format(told: str, path: Path) -> tuple[str, int]:
    match = re.fullmatch(r"(kvcat-[a-z-]+)-(\d{1,9})", told, re.ASCII)
    if match is None or match[1] not in KINDS:
        raise InputError(f"{path} is not {KINDS[CACHE]}")
    (oldest, newest), version = VERSIONS[match[1]], int(match[2])
    if version > newest:
        known = f"{oldest}..{newest}" if oldest < newest else f"{newest}"
        raise InputError(f"{path} was written by a newer kvcat, format {version}; this version reads {known}")
    if version < oldest:
        raise InputError(f"{path} has format {version}, which no kvcat wrote")
    return match[1], version


def digest(file: io.BufferedIOBase, header: bytes, told: str) -> str:
    """SHA-256 of the whole file, with zeros where its own checksum stands.

    Args:
        file: open for reading, anywhere.
        header: the header's bytes.
        told: the checksum that the header holds.
    """
    result = hashlib.sha256(len(header).to_bytes(8, "little"))
    result.update(header.replace(f'"sha256":"{told}"'.encode(), f'"sha256":"{NO_DIGEST}"'.encode()))
    file.seek(8 + len(header))
    while block := file.read(_BLOCK):
        result.update(block)
    return result.hexdigest()


def _digest_of_version_1(file: io.BufferedIOBase, tensors: dict[str, TensorEntry], entries: dict[str, str]) -> str:
    """SHA-256 over the header's entries and every tensor's name, dtype, shape and bytes."""
    entries = {"format": f"{CACHE}-1", **entries}
    result = hashlib.sha256(json.dumps(entries, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        result.update(f"{name} torch.{_TORCH_NAMES.get(tensor.dtype, tensor.dtype)} {tensor.shape}\n".encode())
        file.seek(tensor.start)
        for done in range(0, tensor.nbytes, _BLOCK):
            result.update(file.read(min(_BLOCK, tensor.nbytes - done)))
    return result.hexdigest()
