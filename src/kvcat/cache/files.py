"""Compact caches as safetensors files with a checksum over every byte.

A file is a safetensors file: eight bytes with the length of the header, the header as JSON, the tensors' bytes. Ours
hold a ``format`` of the form NAME-VERSION and a SHA-256 over every byte of the file, taken with zeros in its own place.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from kvcat.cache.fingerprint import FORM
from kvcat.cache.slots import CompactLayer, Layer, RaggedLayer
from kvcat.errors import InputError
from kvcat.files import atomic_write
from kvcat.types import Tensor

CACHE, PREFIX, STATE = "kvcat-compact-cache", "kvcat-prefix", "kvcat-gradient-state"
_KINDS = {
    CACHE: "a compact cache of kvcat",
    PREFIX: "an exported prefix of kvcat",
    STATE: "the state of a gradient-based run of kvcat",
}
_VERSIONS = {CACHE: 2, PREFIX: 1, STATE: 3}
_NO_DIGEST = "0" * 64
_ENTRIES = {
    "num_layers": r"[1-9]\d{0,4}", "num_tokens": r"[1-9]\d{0,7}", "fingerprint": FORM, "metadata": ".*",
}  # fmt: skip
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int64, torch.int32)
_PARTS = r"layers\.(0|[1-9]\d{0,5})\.(keys|values|log_bias|counts|positions)"


def write_tensors(path: Path, tensors: dict[str, Tensor], entries: dict[str, str], kind: str) -> None:
    """Write a safetensors file of a kind (``CACHE``, ``PREFIX``, ``STATE``) with format and checksum in the header.

    The other entries of the header are written in their order: equal contents give equal bytes.
    """
    content = safetensors.torch.save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    stop = 8 + int.from_bytes(content[:8], "little")
    entries = {"format": f"{kind}-{_VERSIONS[kind]}", **entries, "sha256": _NO_DIGEST}
    # safetensors itself would write the entries in any order
    text = json.dumps(
        {"__metadata__": entries, **json.loads(content[8:stop])}, ensure_ascii=False, separators=(",", ":")
    ).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    head, body = len(text).to_bytes(8, "little") + text, memoryview(content)[stop:]
    whole = hashlib.sha256(head)
    whole.update(body)
    signed = head.replace(f'"sha256":"{_NO_DIGEST}"'.encode(), f'"sha256":"{whole.hexdigest()}"'.encode())
    write_bytes(path, signed, body)


def read_tensors(path: Path, kind: str) -> tuple[dict[str, str], dict[str, Tensor], str]:
    """Header entries without format and checksum, tensors, and checksum of a file that ``write_tensors`` wrote.

    Raises:
        InputError: missing, truncated, no safetensors file, of another kind or version, or changed.
    """
    if not path.is_file():
        raise InputError(f"no cache file {path}")
    try:
        content = path.read_bytes()
        tensors = safetensors.torch.load(content)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except (SafetensorError, KeyError) as error:  # a type of numbers that torch has not
        raise InputError(f"{path} is truncated or not a safetensors file: {error}") from None
    stop = 8 + int.from_bytes(content[:8], "little")
    entries = json.loads(content[8:stop]).get("__metadata__") or {}
    found, _, version = entries.pop("format", "").rpartition("-")
    if found != kind:
        raise InputError(f"{path} is {_KINDS[found] + ', not' if found in _KINDS else 'not'} {_KINDS[kind]}")
    if version != str(_VERSIONS[kind]):
        raise InputError(f"{path} has format {version[:9]}; this version of kvcat reads {_VERSIONS[kind]}")
    digest = entries.pop("sha256", "")
    whole = hashlib.sha256(content[:stop].replace(f'"sha256":"{digest}"'.encode(), f'"sha256":"{_NO_DIGEST}"'.encode()))
    whole.update(memoryview(content)[stop:])
    if whole.hexdigest() != digest:
        raise InputError(f"{path} is corrupt: its contents do not match its checksum")
    return entries, tensors, digest


def parse_metadata(text: str, name: object) -> dict[str, str]:
    """How a cache was made, from its header entry; ``name`` is that of the cache, for the message of ``InputError``."""
    try:
        metadata = json.loads(text)
    except (ValueError, RecursionError):
        metadata = None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise InputError(f"{name}: its metadata is no table of texts")
    return metadata


def write_bytes(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file of several parts, whole or not at all; an ``InputError`` says why it cannot."""
    try:
        with atomic_write(path) as partial, partial.open("wb") as file:
            file.writelines(parts)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error


def checked_layers(entries: dict[str, str], tensors: dict[str, Tensor], name: str) -> list[Layer]:
    """The layers that a file of these entries and tensors holds, once all of it is what a cache holds."""
    if wrong := set(entries) ^ set(_ENTRIES):
        raise InputError(f"{name} lacks a header entry or has one that no cache has: {', '.join(sorted(wrong))}")
    for key, form in _ENTRIES.items():
        if not re.fullmatch(form, entries[key], re.ASCII | re.DOTALL):
            raise InputError(f"{name}: {key} is {entries[key][:40]!r}")
    parse_metadata(entries["metadata"], name)
    num_layers, num_tokens = int(entries["num_layers"]), int(entries["num_tokens"])
    layers: list[dict[str, Any]] = [{} for _ in range(num_layers)]
    for key, tensor in tensors.items():
        match = re.fullmatch(_PARTS, key, re.ASCII)
        if match is None or int(match[1]) >= num_layers:
            raise InputError(f"{name} has a tensor {key!r}, which no cache of {num_layers} layers has")
        layers[int(match[1])][match[2]] = tensor
    alike = set()
    for index, layer in enumerate(layers):
        for problem in _problems(layer, num_tokens):
            raise InputError(f"{name}, layer {index}: {problem}")
        dtypes = {str(layer[part].dtype).removeprefix("torch.") for part in ("keys", "values")}
        alike |= {f"{len(layer.get('counts', layer['keys']))} examples in {dtype}" for dtype in dtypes}
    if len(alike) > 1:
        raise InputError(f"{name} has layers of {' and of '.join(sorted(alike))}")
    return [RaggedLayer(**x) if "counts" in x else CompactLayer(**x) for x in layers]


def _problems(layer: dict[str, Tensor], num_tokens: int) -> Iterator[str]:
    """What is wrong with a layer's tensors; whoever goes on after one may meet an error."""
    if not {"keys", "values"} <= set(layer):
        yield "no keys or no values"
    for part, tensor in layer.items():
        if tensor.dtype not in (_INTEGERS if part in ("counts", "positions") else _FLOATS) or tensor.numel() == 0:
            yield f"{part} are {str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
        if not (tensor < torch.inf if part == "log_bias" else tensor.isfinite()).all():
            yield f"{part} hold numbers that are not finite"
    keys, counts = layer["keys"], layer.get("counts")
    if keys.dim() != (4 if counts is None else 2) or (counts is not None and counts.dim() != 2):
        yield f"keys have shape {tuple(keys.shape)}" + ("" if counts is None else f", counts {tuple(counts.shape)}")
    slots = keys.shape[2] if counts is None else int(counts.max())
    if counts is not None and (int(counts.min()) < 1 or int(counts.sum()) != len(keys)):
        yield f"heads of {int(counts.min())} to {slots} slots do not fit keys of {len(keys)}"
    for part in {"values", "log_bias", "positions"} & set(layer):
        own = layer[part].shape
        if (own[:-1] if part == "values" else own) != keys.shape[:-1]:
            yield f"{part} of shape {tuple(own)} do not fit keys of shape {tuple(keys.shape)}"
    if slots > num_tokens:
        yield f"{slots} slots for a prefix of {num_tokens} tokens"
    low, high = layer["positions"].aminmax() if "positions" in layer else (0, 0)
    if not (low >= 0 and high < num_tokens):
        yield f"positions lie in {int(low)}..{int(high)}, the prefix in 0..{num_tokens - 1}"
