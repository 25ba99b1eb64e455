"""Compact caches as safetensors files with a checksum over every byte."""

import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError

from kvcat.cachefile import CACHE, KINDS, NO_DIGEST, VERSIONS, parse_header
from kvcat.errors import InputError
from kvcat.types import Tensor

_ENTRIES = ("fingerprint", "metadata", "num_layers", "num_tokens")
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_WHOLE = (torch.int64, torch.int32)


def write(path: Path, tensors: dict[str, Tensor], header: dict[str, str], kind: str = CACHE) -> None:
    """Writes tensors and header so that the path holds the old file or the whole new one, never a part.

    Args:
        path: file to write; its folder must exist.
        tensors: by name.
        header: entries beside ``format`` and ``sha256``, which are added.
        kind: of file; a compact cache is checked as it is when it is read.

    Raises:
        InputError: no such folder, no permission, the disk is full, or not a whole compact cache.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    if kind == CACHE:
        check_cache(tensors, header, "the compact cache")
    write_whole(path, *_serialise(tensors, {"format": f"{kind}-{VERSIONS[kind][1]}", **header}))


def _serialise(tensors: dict[str, Tensor], header: dict[str, str]) -> tuple[bytes, memoryview]:
    head, body = packed(tensors, {**header, "sha256": NO_DIGEST})
    whole = hashlib.sha256(head)
    whole.update(body)
    return head.replace(f'"sha256":"{NO_DIGEST}"'.encode(), f'"sha256":"{whole.hexdigest()}"'.encode()), body


def packed(tensors: dict[str, Tensor], entries: dict[str, str]) -> tuple[bytes, memoryview]:
    """A safetensors file in two parts, up to the end of its header and after it; equal contents give equal bytes.

    Args:
        tensors: by name, on the CPU and contiguous.
        entries: text by key, written in this order; safetensors itself would write them in any.
    """
    content = safetensors.torch.save(tensors)
    stop = 8 + int.from_bytes(content[:8], "little")
    described = {"__metadata__": entries, **json.loads(content[8:stop])}
    text = json.dumps(described, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text, memoryview(content)[stop:]


def write_whole(path: Path, *parts: bytes | memoryview) -> None:
    """Writes a file so that the path holds the old one or the whole new one, never a part.

    Args:
        path: file to write; its folder must exist.
        parts: its contents, one after the other.

    Raises:
        InputError: no such folder, no permission, or the disk is full.
    """
    if path.is_dir() or not path.parent.is_dir():
        raise InputError(f"cannot write {path}: {'it is a folder' if path.is_dir() else 'no such folder'}")
    needed = sum(map(len, parts))
    if shutil.disk_usage(path.parent).free < needed:
        raise InputError(f"cannot write {path}: the disk has no room for {needed} bytes")
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = Path(file.name)
            file.writelines(parts)
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
    """Tensors and header of a compact cache that ``write`` made.

    Raises:
        InputError: missing, not one of ours, of a newer kvcat, truncated, changed since it was written, or not whole.
    """
    if not path.is_file():
        raise InputError(f"no cache file {path}")
    try:
        with path.open("rb") as file:
            header = parse_header(file, path)
            if header.kind != CACHE:
                raise InputError(f"{path} is {KINDS[header.kind]}, not {KINDS[CACHE]}")
            file.seek(0)
            tensors = safetensors.torch.load(file.read())
    except SafetensorError as error:
        raise InputError(f"{path} is truncated or not a safetensors file: {error}") from error
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    check_cache(tensors, header.entries, str(path))
    return tensors, header.entries


def check_cache(tensors: dict[str, Tensor], header: dict[str, str], name: str) -> None:
    """Refuses what is not a whole compact cache: missing or strange parts, shapes that do not fit, numbers like NaN.

    Args:
        tensors: by name, ``layers.0.keys`` and so on.
        header: num_layers, num_tokens, fingerprint and metadata.
        name: of the cache, for the message.

    Raises:
        InputError: naming the part that is wrong.
    """
    num_layers, num_tokens = _check_header(header, name)
    layers: list[dict[str, Tensor]] = [{} for _ in range(num_layers)]
    for key, tensor in tensors.items():
        match = re.fullmatch(r"layers\.(0|[1-9]\d{0,5})\.(keys|values|log_bias|counts|positions)", key, re.ASCII)
        if match is None or int(match[1]) >= num_layers:
            raise InputError(f"{name} has a tensor {key!r}, which no cache of {num_layers} layers has")
        layers[int(match[1])][match[2]] = tensor
    alike = set()
    for index, layer in enumerate(layers):
        problem = _problem(layer, num_tokens)
        if problem is not None:
            raise InputError(f"{name}, layer {index}: {problem}")
        dtypes = {str(layer[part].dtype).removeprefix("torch.") for part in ("keys", "values")}
        alike |= {f"{len(layer.get('counts', layer['keys']))} examples in {dtype}" for dtype in dtypes}
    if len(alike) > 1:
        raise InputError(f"{name} has layers of {' and of '.join(sorted(alike))}")


def _check_header(header: dict[str, str], name: str) -> tuple[int, int]:
    if set(header) != set(_ENTRIES):
        wrong = ", ".join(sorted(set(header) ^ set(_ENTRIES)))
        raise InputError(f"{name} lacks a header entry or has one that no cache has: {wrong}")
    numbers = []
    for key in ("num_layers", "num_tokens"):
        if not re.fullmatch(r"[1-9]\d{0,9}", header[key], re.ASCII):
            raise InputError(f"{name}: {key} is {header[key]!r}, not a number above 0")
        numbers.append(int(header[key]))
    if not re.fullmatch("[0-9a-f]{64}", header["fingerprint"]):
        raise InputError(f"{name}: {header['fingerprint']!r} is no fingerprint of a model")
    try:
        metadata = json.loads(header["metadata"])
    except ValueError:
        metadata = None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise InputError(f"{name}: its metadata is no table of texts")
    return numbers[0], numbers[1]


def _problem(layer: dict[str, Tensor], num_tokens: int) -> str | None:
    """What is wrong with a layer's tensors; None: nothing."""
    missing = [part for part in ("keys", "values") if part not in layer]
    if missing:
        return f"no {' and no '.join(missing)}"
    for part, tensor in layer.items():
        if tensor.dtype not in (_WHOLE if part in ("counts", "positions") else _FLOATS):
            return f"{part} are {str(tensor.dtype).removeprefix('torch.')}"
        if tensor.numel() == 0:
            return f"{part} are empty, of shape {tuple(tensor.shape)}"
    return _shape_problem(layer, num_tokens) or _number_problem(layer, num_tokens)


def _shape_problem(layer: dict[str, Tensor], num_tokens: int) -> str | None:
    keys, counts = layer["keys"], layer.get("counts")
    if keys.dim() != (4 if counts is None else 2):
        return f"keys have shape {tuple(keys.shape)}"
    if counts is not None and counts.dim() != 2:
        return f"counts have shape {tuple(counts.shape)}"
    slots = keys.shape[2] if counts is None else int(counts.max())
    if counts is not None and (int(counts.min()) < 1 or int(counts.sum()) != len(keys)):
        return f"heads of {int(counts.min())} to {slots} slots do not fit keys of {len(keys)}"
    for part in ("values", "log_bias", "positions"):
        own = layer[part].shape if part in layer else None
        if own is not None and (own[:-1] if part == "values" else own) != keys.shape[:-1]:
            return f"{part} of shape {tuple(own)} do not fit keys of shape {tuple(keys.shape)}"
    if slots > num_tokens:
        return f"{slots} slots for a prefix of {num_tokens} tokens"
    return None


def _number_problem(layer: dict[str, Tensor], num_tokens: int) -> str | None:
    for part in ("keys", "values"):
        if not layer[part].isfinite().all():
            return f"{part} hold numbers that are not finite"
    if "log_bias" in layer and not (layer["log_bias"] < torch.inf).all():
        return "log_bias holds NaN or +inf"
    positions = layer.get("positions")
    if positions is not None and not (int(positions.min()) >= 0 and int(positions.max()) < num_tokens):
        return f"positions lie in {int(positions.min())}..{int(positions.max())}, the prefix in 0..{num_tokens - 1}"
    return None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
