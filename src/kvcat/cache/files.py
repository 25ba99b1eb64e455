"""Compact caches as safetensors files with a checksum over every byte.

A file is a safetensors file: eight bytes with the length of the header, the header as JSON, the
tensors' bytes. kvcat's files hold a ``format`` of the form NAME-VERSION and a SHA-256 over every
byte of the file, computed with zeros in the place of the hash.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from kvcat.cache.codes import BITS
from kvcat.cache.fingerprint import FORM
from kvcat.cache.quantized import QUANTIZED_TENSORS, QuantizedLayer, quantized_problem
from kvcat.cache.slots import CompactLayer, Layer, RaggedLayer
from kvcat.cache.states import STATE_TENSORS, LayerState
from kvcat.errors import InputError
from kvcat.files import atomic_write, check_format
from kvcat.types import Tensor

CACHE = "kvcat-compact-cache"
PREFIX = "kvcat-prefix"
STATE = "kvcat-gradient-state"
SESSION = "kvcat-session"
_KINDS = {
    CACHE: "a compact cache of kvcat",
    PREFIX: "an exported prefix of kvcat",
    STATE: "the state of a gradient-based run of kvcat",
    SESSION: "a session of kvcat",
}
_VERSIONS = {CACHE: 6, PREFIX: 2, STATE: 3, SESSION: 4}
_REMEDIES = {
    CACHE: "make the cache again with `kvcat compress`",
    PREFIX: "make the file again with `kvcat pack`",
    STATE: "remove it, and the run begins again",
    SESSION: "begin the session again",
}
STATES = "states"
"""Header entry of a cache with such states: the numbers of their layers."""
_NO_DIGEST = "0" * 64
_ENTRIES = {
    "num_layers": r"[1-9]\d{0,4}",
    "num_tokens": r"[1-9]\d{0,7}",
    "fingerprint": FORM,
    "record": ".*",
}
_QUANTIZED_ENTRIES = {
    "bits": "|".join(map(str, BITS)),
    "key_group": r"[1-9]\d{0,4}",
    "dtype": "float64|float32|float16|bfloat16",
}
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int64, torch.int32)
_ORDINARY_NAMES = "keys|values|log_bias|counts|positions"
_TENSOR_NAMES = r"layers\.(0|[1-9]\d{0,5})\."
_QUANTIZED_NAMES = "|".join(QUANTIZED_TENSORS)


def write_tensors(
    path: Path, tensors: dict[str, Tensor], entries: dict[str, str], kind: str
) -> None:
    """Write a safetensors file of a kind (``CACHE``, ``PREFIX``, ``STATE``, ``SESSION``), with
    format and checksum in the header.

    The other entries of the header are written in their order: equal contents give equal bytes.
    """
    content = safetensors.torch.save(_in_memories_of_their_own(tensors))
    header_end = _header_end(content)
    tensor_entries = json.loads(content[8:header_end])
    entries = {"format": f"{kind}-{_VERSIONS[kind]}", **entries, "sha256": _NO_DIGEST}
    # safetensors itself would write the entries in any order
    header = {"__metadata__": entries, **tensor_entries}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    head = len(text).to_bytes(8, "little") + text
    body = memoryview(content)[header_end:]
    digest = hashlib.sha256(head)
    digest.update(body)
    signed = head.replace(_digest_entry(_NO_DIGEST), _digest_entry(digest.hexdigest()))
    write_bytes(path, signed, body)


def _in_memories_of_their_own(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, none of which shares memory with another: safetensors rejects that.

    The same tensor may be the keys and the values of a layer.
    """
    separate: dict[str, Tensor] = {}
    known = set()
    for name, tensor in tensors.items():
        on_cpu = tensor.detach().cpu().contiguous()
        memory = on_cpu.untyped_storage().data_ptr()
        separate[name] = on_cpu.clone() if memory in known else on_cpu
        known.add(memory)
    return separate


def _header_end(content: bytes) -> int:
    """Where the header of a safetensors file ends; its length is in the first eight bytes."""
    return 8 + int.from_bytes(content[:8], "little")


def _digest_entry(digest: str) -> bytes:
    return f'"sha256":"{digest}"'.encode()


def read_tensors(path: Path, kind: str) -> tuple[dict[str, str], dict[str, Tensor], str]:
    """Header entries without format and checksum, tensors, and checksum of a file that
    ``write_tensors`` wrote.

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
    except (SafetensorError, KeyError) as error:  # KeyError: a type of numbers that torch lacks
        raise InputError(f"{path} is truncated or not a safetensors file: {error}") from None
    header_end = _header_end(content)
    entries = json.loads(content[8:header_end]).get("__metadata__") or {}
    file_kind, _, version = entries.pop("format", "").rpartition("-")
    if file_kind != kind:
        what = f"{_KINDS[file_kind]}, not" if file_kind in _KINDS else "not"
        raise InputError(f"{path} is {what} {_KINDS[kind]}")
    check_format(path, version, str(_VERSIONS[kind]), _REMEDIES[kind])
    recorded = entries.pop("sha256", "")
    unsigned = content[:header_end].replace(_digest_entry(recorded), _digest_entry(_NO_DIGEST))
    digest = hashlib.sha256(unsigned)
    digest.update(memoryview(content)[header_end:])
    if digest.hexdigest() != recorded:
        raise InputError(f"{path} is corrupt: its contents do not match its checksum")
    return entries, tensors, recorded


def write_bytes(path: Path, *pieces: bytes | memoryview) -> None:
    """Write a file from consecutive pieces, whole or not at all; ``InputError`` if it cannot."""
    with atomic_write(path) as partial, partial.open("wb") as file:
        file.writelines(pieces)


def quantized_entries(layer: QuantizedLayer) -> dict[str, str]:
    """Header entries of a cache of such layers."""
    return {
        "bits": str(layer.bits),
        "key_group": str(layer.key_group),
        "dtype": str(layer.dtype).removeprefix("torch."),
    }


def checked_layers(
    entries: dict[str, str], tensors: dict[str, Tensor], name: str
) -> tuple[Sequence[Layer | QuantizedLayer], dict[int, LayerState]]:
    """The layers of a file with these header entries and tensors, and the states by layer.

    Raises:
        InputError: an entry or a tensor that is missing, unknown, or not as in a cache.
    """
    _check_entries(entries, name)
    states, tensors = _checked_states(entries, tensors, name)
    num_layers = int(entries["num_layers"])
    num_tokens = int(entries["num_tokens"])
    is_quantized = "bits" in entries
    names = _QUANTIZED_NAMES if is_quantized else _ORDINARY_NAMES
    layers: list[dict[str, Any]] = [{} for _ in range(num_layers)]
    for key, tensor in tensors.items():
        match = re.fullmatch(f"{_TENSOR_NAMES}({names})", key, re.ASCII)
        if match is None or int(match[1]) >= num_layers:
            raise InputError(
                f"{name} has a tensor {key!r}, which no cache of {num_layers} layers has"
            )
        layers[int(match[1])][match[2]] = tensor
    if is_quantized:
        return _quantized_layers(entries, layers, name), states
    layouts = set()
    for index, layer in enumerate(layers):
        for problem in _problems(layer, num_tokens):
            raise InputError(f"{name}, layer {index}: {problem}")
        num_examples = len(layer.get("counts", layer["keys"]))
        for tensor_name in ("keys", "values"):
            layouts.add(f"{num_examples} examples in {_dtype_name(layer[tensor_name])}")
    if len(layouts) > 1:
        raise InputError(f"{name} has layers of {' and of '.join(sorted(layouts))}")
    made = [
        RaggedLayer(**layer) if "counts" in layer else CompactLayer(**layer) for layer in layers
    ]
    return made, states


def _checked_states(
    entries: dict[str, str], tensors: dict[str, Tensor], name: str
) -> tuple[dict[int, LayerState], dict[str, Tensor]]:
    """The states of a file by layer, and the other tensors."""
    expected = [int(word) for word in entries.get(STATES, "").split()]
    by_layer: dict[int, dict[str, Tensor]] = {}
    others = {}
    for key, tensor in tensors.items():
        match = re.fullmatch(rf"states\.(0|[1-9]\d{{0,5}})\.({STATE_TENSORS})", key, re.ASCII)
        if match is None:
            others[key] = tensor
            continue
        by_layer.setdefault(int(match[1]), {})[match[2]] = tensor
        for problem in _number_problems(key, tensor):
            raise InputError(f"{name}: {problem}")
    num_layers = int(entries["num_layers"]) + len(expected)
    if sorted(by_layer) != expected or any(number >= num_layers for number in expected):
        raise InputError(f"{name} has states of layers {sorted(by_layer)}, not of {expected}")
    for number, state_tensors in by_layer.items():
        if len({"keys", "values"} & set(state_tensors)) == 1:
            raise InputError(f"{name}, state of layer {number}: no keys or no values")
    states = {number: LayerState(state_tensors) for number, state_tensors in by_layer.items()}
    return states, others


def _quantized_layers(
    entries: dict[str, str], layers: list[dict[str, Any]], name: str
) -> list[QuantizedLayer]:
    """The quantised layers of a file, from the tensors of each."""
    bits = int(entries["bits"])
    key_group = int(entries["key_group"])
    dtype = getattr(torch, entries["dtype"])
    made = []
    for index, tensors in enumerate(layers):
        problem = quantized_problem(tensors, bits, key_group, int(entries["num_tokens"]))
        if problem is not None:
            raise InputError(f"{name}, layer {index}: {problem}")
        made.append(QuantizedLayer(**tensors, bits=bits, key_group=key_group, dtype=dtype))
    if len({layer.batch_size for layer in made}) > 1:
        raise InputError(f"{name} has layers of different numbers of examples")
    return made


def _check_entries(entries: dict[str, str], name: str) -> None:
    """Reject header entries that are missing, unknown or malformed."""
    forms = _ENTRIES | (_QUANTIZED_ENTRIES if "bits" in entries else {})
    if STATES in entries:
        forms = {**forms, STATES: r"\d{1,5}( \d{1,5})*"}
    unexpected = set(entries) ^ set(forms)
    if unexpected:
        listed = ", ".join(sorted(unexpected))
        raise InputError(f"{name} lacks a header entry or has one that no cache has: {listed}")
    for key, form in forms.items():
        if not re.fullmatch(form, entries[key], re.ASCII | re.DOTALL):
            raise InputError(f"{name}: {key} is {entries[key][:40]!r}")


def _problems(layer: dict[str, Tensor], num_tokens: int) -> Iterator[str]:
    """Problems of a layer's tensors; stop at the first, later checks assume that it is absent."""
    if not {"keys", "values"} <= set(layer):
        yield "no keys or no values"
    for tensor_name, tensor in layer.items():
        yield from _number_problems(tensor_name, tensor)
    yield from _shape_problems(layer, num_tokens)
    if "positions" in layer:
        low, high = layer["positions"].aminmax()
        if low < 0 or high >= num_tokens:
            yield f"positions lie in {int(low)}..{int(high)}, the prefix in 0..{num_tokens - 1}"


def _number_problems(name: str, tensor: Tensor) -> Iterator[str]:
    dtypes = _INTEGERS if name in ("counts", "positions") else _FLOATS
    if tensor.dtype not in dtypes or tensor.numel() == 0:
        yield f"{name} are {_dtype_name(tensor)} of shape {tuple(tensor.shape)}"
    # a log-bias of -inf marks a slot that no query sees
    is_usable = tensor < torch.inf if name == "log_bias" else tensor.isfinite()
    if not is_usable.all():
        yield f"{name} hold numbers that are not finite"


def _shape_problems(layer: dict[str, Tensor], num_tokens: int) -> Iterator[str]:
    keys = layer["keys"]
    counts = layer.get("counts")
    if counts is None:
        if keys.dim() != 4:
            yield f"keys have shape {tuple(keys.shape)}"
        most_slots = keys.shape[2]
    else:
        if keys.dim() != 2 or counts.dim() != 2:
            yield f"keys have shape {tuple(keys.shape)}, counts {tuple(counts.shape)}"
        most_slots = int(counts.max())
        fewest_slots = int(counts.min())
        if fewest_slots < 1 or int(counts.sum()) != len(keys):
            yield f"heads of {fewest_slots} to {most_slots} slots do not fit keys of {len(keys)}"
    for name in {"values", "log_bias", "positions"} & set(layer):
        shape = layer[name].shape
        slots_shape = shape[:-1] if name == "values" else shape
        if slots_shape != keys.shape[:-1]:
            yield f"{name} of shape {tuple(shape)} do not fit keys of shape {tuple(keys.shape)}"
    if most_slots > num_tokens:
        yield f"{most_slots} slots for a prefix of {num_tokens} tokens"


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
