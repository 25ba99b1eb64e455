"""Compact caches as safetensors files with a checksum over every byte."""

import errno
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError

from kvcat.cachefile import CACHE, KINDS, NO_DIGEST, VERSIONS, parse_header, parse_metadata
from kvcat.errors import InputError
from kvcat.files import atomic_write
from kvcat.types import Tensor

_ENTRIES = ("fingerprint", "metadata", "num_layers", "num_tokens")
_MOST_TOKENS = 2**24
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int64, torch.int32)
_PARTS = r"layers\.(0|[1-9]\d{0,5})\.(keys|values|log_bias|counts|positions)"


def write_cache(
    path: Path, layers: Sequence[dict[str, Tensor]], num_tokens: int, fingerprint: str, metadata: dict[str, str]
) -> None:
    """Write a compact cache, checked as it is when it is read.

    Args:
        path: file to write; its folder must exist.
        layers: each layer's tensors by field name.
        num_tokens: prefix length.
        fingerprint: of the model's weights.
        metadata: how it was made.

    Raises:
        InputError: no such folder, no permission, the disk is full, or not a whole compact cache.
    """
    tensors = {f"layers.{i}.{name}": tensor for i, layer in enumerate(layers) for name, tensor in layer.items()}
    header = {
        "num_layers": str(len(layers)),
        "num_tokens": str(num_tokens),
        "fingerprint": fingerprint,
        "metadata": json.dumps(metadata, sort_keys=True),
    }
    _check_tensors(_check_header(list(tensors), header, "the compact cache"), tensors, "the compact cache")
    write_tensors(path, tensors, header, CACHE)


def read_cache(path: Path) -> tuple[list[dict[str, Tensor]], int, str, dict[str, str]]:
    """Layers' tensors, prefix length, fingerprint and metadata of a file of ``write_cache``.

    Raises:
        InputError: missing, not one of ours, of another version, truncated, changed, or not whole.
    """
    if not path.is_file():
        raise InputError(f"no cache file {path}")
    try:
        with path.open("rb") as file:
            header = parse_header(file, path)
            if header.kind != CACHE:
                raise InputError(f"{path} is {KINDS[header.kind]}, not {KINDS[CACHE]}")
            num_layers, num_tokens = _check_header(list(header.tensors), header.entries, str(path))
            file.seek(0)
            tensors = safetensors.torch.load(file.read())
    except SafetensorError as error:
        raise InputError(f"{path} is truncated or not a safetensors file: {error}") from error
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    layers = _check_tensors((num_layers, num_tokens), tensors, str(path))
    return layers, num_tokens, header.entries["fingerprint"], parse_metadata(header.entries["metadata"], path)


def write_tensors(path: Path, tensors: dict[str, Tensor], header: dict[str, str], kind: str) -> None:
    """Write a safetensors file with format and checksum; equal contents give equal bytes.

    Args:
        path: file to write; its folder must exist.
        tensors: by name.
        header: entries beside ``format`` and ``sha256``, written in this order.
        kind: ``CACHE`` or ``PREFIX`` of ``kvcat.cachefile``.

    Raises:
        InputError: no such folder, no permission, or the disk is full.
    """
    content = safetensors.torch.save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    stop = 8 + int.from_bytes(content[:8], "little")
    entries = {"format": f"{kind}-{VERSIONS[kind]}", **header, "sha256": NO_DIGEST}
    # safetensors itself would write the entries in any order
    text = json.dumps(
        {"__metadata__": entries, **json.loads(content[8:stop])}, ensure_ascii=False, separators=(",", ":")
    ).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    head, body = len(text).to_bytes(8, "little") + text, memoryview(content)[stop:]
    whole = hashlib.sha256(head)
    whole.update(body)
    signed = head.replace(f'"sha256":"{NO_DIGEST}"'.encode(), f'"sha256":"{whole.hexdigest()}"'.encode())
    write_bytes(path, signed, body)


def write_bytes(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file whole or not at all.

    Args:
        path: file to write; its folder must exist.
        parts: its contents, one after the other.

    Raises:
        InputError: no such folder, no permission, or the disk is full.
    """
    if path.is_dir() or not path.parent.is_dir():
        raise InputError(f"cannot write {path}: {'it is a folder' if path.is_dir() else 'no such folder'}")
    try:
        with atomic_write(path) as partial, partial.open("wb") as file:
            file.writelines(parts)
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
        raise InputError(f"cannot write {path}: {reason}") from error


def _check_header(names: Sequence[str], header: dict[str, str], name: str) -> tuple[int, int]:
    """Numbers of layers and tokens, once the entries and the tensors' names are those of a cache."""
    if set(header) != set(_ENTRIES):
        wrong = ", ".join(sorted(set(header) ^ set(_ENTRIES)))
        raise InputError(f"{name} lacks a header entry or has one that no cache has: {wrong}")
    for key, most in (("num_layers", max(1, len(names))), ("num_tokens", _MOST_TOKENS)):
        if not re.fullmatch(r"[1-9]\d{0,9}", header[key], re.ASCII) or int(header[key]) > most:
            raise InputError(f"{name}: {key} is {header[key][:40]!r}, not a number from 1 to {most}")
    num_layers = int(header["num_layers"])
    for key in names:
        match = re.fullmatch(_PARTS, key, re.ASCII)
        if match is None or int(match[1]) >= num_layers:
            raise InputError(f"{name} has a tensor {key!r}, which no cache of {num_layers} layers has")
    if not re.fullmatch("[0-9a-f]{64}", header["fingerprint"]):
        raise InputError(f"{name}: {header['fingerprint']!r} is no fingerprint of a model")
    parse_metadata(header["metadata"], name)
    return num_layers, int(header["num_tokens"])


def _check_tensors(sizes: tuple[int, int], tensors: dict[str, Tensor], name: str) -> list[dict[str, Tensor]]:
    """The tensors by layer, once shapes, types and numbers are those of a cache."""
    num_layers, num_tokens = sizes
    layers: list[dict[str, Tensor]] = [{} for _ in range(num_layers)]
    for key, tensor in tensors.items():
        _, index, part = key.split(".")
        layers[int(index)][part] = tensor
    alike = set()
    for index, layer in enumerate(layers):
        if problem := _problem(layer, num_tokens):
            raise InputError(f"{name}, layer {index}: {problem}")
        dtypes = {str(layer[part].dtype).removeprefix("torch.") for part in ("keys", "values")}
        alike |= {f"{len(layer.get('counts', layer['keys']))} examples in {dtype}" for dtype in dtypes}
    if len(alike) > 1:
        raise InputError(f"{name} has layers of {' and of '.join(sorted(alike))}")
    return layers


def _problem(layer: dict[str, Tensor], num_tokens: int) -> str | None:
    """What is wrong with a layer's tensors; None: nothing."""
    if missing := [part for part in ("keys", "values") if part not in layer]:
        return f"no {' and no '.join(missing)}"
    for part, tensor in layer.items():
        if tensor.dtype not in (_INTEGERS if part in ("counts", "positions") else _FLOATS):
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
    return f"{slots} slots for a prefix of {num_tokens} tokens" if slots > num_tokens else None


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
