"""Compact caches as safetensors files with a checksum."""

import errno
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError, safe_open

from kvcat.cache.fingerprint import hash_tensor
from kvcat.errors import InputError
from kvcat.types import Tensor

_FORMAT = "kvcat-compact-cache-1"


def checksum(tensors: dict[str, Tensor], header: dict[str, str]) -> str:
    """SHA-256 over the header's entries and every tensor's name, dtype, shape and bytes."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        hash_tensor(digest, name, tensors[name])
    return digest.hexdigest()


def write(path: Path, tensors: dict[str, Tensor], header: dict[str, str]) -> None:
    """Writes tensors and header so that the path holds the old file or the whole new one, never a part.

    Raises:
        InputError: no such folder, no permission, or the disk is full.
    """
    header = {"format": _FORMAT, **header}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header["sha256"] = checksum(tensors, header)
    if path.is_dir() or not path.parent.is_dir():
        raise InputError(f"cannot write {path}: {'it is a folder' if path.is_dir() else 'no such folder'}")
    needed = sum(tensor.nbytes for tensor in tensors.values())
    if shutil.disk_usage(path.parent).free < needed:
        raise InputError(f"cannot write {path}: the disk has no room for {needed} bytes")
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = Path(file.name)
            file.write(safetensors.torch.save(tensors, header))
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
        raise InputError(f"cannot write {path}: {reason}") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and header of a file that ``write`` made.

    Raises:
        InputError: missing, not one of ours, truncated, or changed since it was written.
    """
    if not path.is_file():
        raise InputError(f"no cache file {path}")
    try:
        with safe_open(path, framework="pt") as file:
            header = dict(file.metadata() or {})
            if header.get("format") != _FORMAT:
                raise InputError(f"{path} is not a compact cache of kvcat")
            # mapped memory would follow later writes to the file
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is truncated or not a safetensors file: {error}") from error
    if header.pop("sha256", "") != checksum(tensors, header):
        raise InputError(f"{path} is corrupt: its contents do not match its checksum")
    return tensors, header


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
