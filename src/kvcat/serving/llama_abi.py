"""llama.cpp's C API through ctypes: its functions, its structures, and the format of its states.

The layout of the structures and of a sequence's state differs between versions, types of cache and
flash attention. So this module assumes nothing about the version: it finds fields in the engine's
defaults, and reads the layout of a state from a state that the engine saved.
"""

import ctypes
import importlib.util
import re
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvcat.errors import InputError
from kvcat.serving.prefix import Prefix
from kvcat.serving.widen import interleaved
from kvcat.types import Float, Tensor, UInt8

CACHE_TYPES = {"float32": 0, "float16": 1, "bfloat16": 30, "q8_0": 8, "q4_0": 2}
"""Types of cache that are supported, and ggml's numbers for them."""

_BLOCK = 32  # channels that share a scale
_BLOCK_BYTES = {"q8_0": 2 + 32, "q4_0": 2 + 16}
_ROUNDING = 0.3  # relative, of 4 bits at most

_STATE_MAGIC = 0x67677371  # of llama_state_seq_save_file
_LOG_LEVEL_ERROR = 4


class Parameters(ctypes.Structure):
    """Room for a structure of parameters of any version."""

    _fields_ = [("raw", ctypes.c_uint8 * 1024)]


class Batch(ctypes.Structure):
    """``llama_batch``: the number of tokens and six pointers."""

    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.c_void_p),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.c_void_p),
        ("n_seq_id", ctypes.c_void_p),
        ("seq_id", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
    ]


_LogCallback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_POINTER = ctypes.c_void_p
_TEXT = ctypes.c_char_p
_INT = ctypes.c_int32
_SIZE = ctypes.c_size_t
_BOOL = ctypes.c_bool
# the type that each function returns, and the types of its arguments
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "backend_init": (None, []),
    "log_set": (None, [_LogCallback, _POINTER]),
    "model_default_params": (Parameters, []),
    "context_default_params": (Parameters, []),
    "model_load_from_file": (_POINTER, [_TEXT, Parameters]),
    "init_from_model": (_POINTER, [_POINTER, Parameters]),
    "model_free": (None, [_POINTER]),
    "free": (None, [_POINTER]),
    "model_meta_val_str": (_INT, [_POINTER, _TEXT, _TEXT, _SIZE]),
    "model_n_layer": (_INT, [_POINTER]),
    "model_get_vocab": (_POINTER, [_POINTER]),
    "vocab_n_tokens": (_INT, [_POINTER]),
    "n_ctx": (_INT, [_POINTER]),
    "n_batch": (_INT, [_POINTER]),
    "set_n_threads": (None, [_POINTER, _INT, _INT]),
    "get_memory": (_POINTER, [_POINTER]),
    "memory_clear": (None, [_POINTER, _BOOL]),
    "memory_seq_pos_max": (_INT, [_POINTER, _INT]),
    "batch_get_one": (Batch, [_POINTER, _INT]),
    "decode": (_INT, [_POINTER, Batch]),
    "get_logits_ith": (_POINTER, [_POINTER, _INT]),
    "state_seq_load_file": (_SIZE, [_POINTER, _TEXT, _INT, _POINTER, _SIZE, _POINTER]),
    "state_seq_save_file": (_SIZE, [_POINTER, _TEXT, _INT, _POINTER, _SIZE]),
}

# llama.cpp has one log for all engines of a process
_last_error = deque(["it gives no reason"], maxlen=1)


def _keep_error(level: int, text: bytes, _: Any) -> None:
    if level == _LOG_LEVEL_ERROR and text.strip():
        _last_error.append(text.decode(errors="replace").strip()[:200])


_LOG = _LogCallback(_keep_error)


class Library:
    """llama.cpp's functions; ``library.call("n_ctx", context)`` calls ``llama_n_ctx(context)``.

    Args:
        path: shared library with llama.cpp's C API; None: that of the package ``xllamacpp``.

    Raises:
        InputError: no library, or one without these functions.
    """

    def __init__(self, path: str | Path | None):
        path = _installed_library() if path is None else path
        try:
            self._api = ctypes.CDLL(str(path))
            for name, (result, arguments) in _FUNCTIONS.items():
                function = getattr(self._api, f"llama_{name}")
                function.restype = result
                function.argtypes = arguments
        except (OSError, AttributeError) as error:
            raise InputError(f"{path} is no library with llama.cpp's C API: {error}") from None
        self.call("log_set", _LOG, None)
        self.call("backend_init")

    def call(self, name: str, *arguments: Any) -> Any:
        """The result of a function of the API."""
        return getattr(self._api, f"llama_{name}")(*arguments)

    @property
    def reason(self) -> str:
        """The last error that llama.cpp logged."""
        return _last_error[-1]


def _installed_library() -> Path:
    """The library of the package ``xllamacpp``."""
    spec = importlib.util.find_spec("xllamacpp")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    libraries = sorted(file for folder in folders for file in Path(folder).glob("xllamacpp*.so"))
    if not libraries:
        raise InputError("llama.cpp is not installed: pip install 'kvcat[llama-cpp]'")
    return libraries[0]


def context_parameters(defaults: Parameters, num_ctx: int, cache_type: str) -> Parameters:
    """The defaults with a number of cells and a type of cache.

    Flash attention is on for the types in blocks, whose values llama.cpp does not read without it,
    and off for the others. In every version, the fields are found by the values around them.

    Raises:
        InputError: these values are missing.
    """
    raw = bytes(defaults.raw)
    # cells, tokens of a batch, tokens of a part of a batch
    has_sizes = raw.startswith(struct.pack("<III", 512, 2048, 512))
    # scaling of positions, pooling, kind of attention, flash attention: all -1
    automatic = re.search(rb"\xff{16}", raw)
    # types of keys and of values: both float16
    types = None
    if automatic is not None:
        types = re.search(rb"(?:\x01\x00\x00\x00){2}", raw[automatic.end() :])
    if not has_sizes or automatic is None or types is None:
        raise InputError("this version of llama.cpp has other parameters than expected")
    flash_attention_at = automatic.end() - 4
    types_at = automatic.end() + types.start()
    number = CACHE_TYPES[cache_type]
    changed = bytearray(raw)
    struct.pack_into("<I", changed, 0, num_ctx)
    struct.pack_into("<i", changed, flash_attention_at, int(is_in_blocks(cache_type)))
    struct.pack_into("<ii", changed, types_at, number, number)
    return Parameters.from_buffer(changed)


def is_in_blocks(cache_type: str) -> bool:
    """Whether channels share scales in blocks of 32 (q8_0, q4_0)."""
    return cache_type in _BLOCK_BYTES


@dataclass(frozen=True)
class StateLayout:
    """The layout of an engine's sequence states, read from the state of one token.

    Args:
        version: version of the format.
        num_streams: number of streams of cells; the sequence is in the first.
        cell_tail: the bytes after the position of a cell.
        header: the bytes between the cells and the first layer's keys.
        cache_type: one of ``CACHE_TYPES``.
        width: channels of all KV heads together.
        key_block, value_block: channels that the engine rotates together before it stores them
            (``rotated``); 1: it does not.
    """

    version: int
    num_streams: int
    cell_tail: bytes
    header: bytes
    cache_type: str
    width: int
    key_block: int = 1
    value_block: int = 1

    @classmethod
    def read(cls, state: bytes, num_layers: int, cache_type: str) -> "StateLayout":
        """The layout of the file that an engine saved for one token.

        A cell is its position, the number of its sequences, and further fields in some versions. A
        1 follows if values are stored channel after channel, else (with flash attention) a 0, then
        the number of layers, and further fields in some versions. The header ends where the layers'
        blocks of one cell fill the remaining file exactly.

        Raises:
            InputError: no end of the header fits.
        """
        magic, version, num_tokens = struct.unpack_from("<III", state)
        cells_at = 12 + 4 * num_tokens
        (num_streams,) = struct.unpack_from("<I", state, cells_at)
        by_channel = int(not is_in_blocks(cache_type))
        begin = struct.pack("<II", by_channel, num_layers)
        header_at = state.find(begin, cells_at + 16, cells_at + 60)
        layers_end = len(state) - 4 * (num_streams - 1)
        if magic == _STATE_MAGIC and header_at > 0:
            for keys_at in range(header_at + 8, header_at + 48, 4):
                width = _width(state, keys_at, layers_end, num_layers, cache_type)
                if width is not None:
                    return cls(
                        version,
                        num_streams,
                        cell_tail=state[cells_at + 12 : header_at],
                        header=state[header_at:keys_at],
                        cache_type=cache_type,
                        width=width,
                    )
        raise InputError(
            f"llama.cpp's sequence states of version {version} have a layout that is not known"
        )

    def file(self, prefix: Prefix, *, is_interleaved: bool) -> Iterator[bytes]:
        """A packed cache as consecutive pieces of a file that the engine loads.

        Args:
            prefix: the packed cache.
            is_interleaved: the engine has the two channels of a rotation next to each other.

        Raises:
            InputError: numbers too large for the type of the cache.
        """
        num_slots = prefix.num_slots
        type_number = CACHE_TYPES[self.cache_type]
        token_ids = bytes(4 * num_slots)
        yield struct.pack("<III", _STATE_MAGIC, self.version, num_slots) + token_ids
        yield struct.pack("<II", self.num_streams, num_slots)
        yield b"".join(struct.pack("<i", cell) + self.cell_tail for cell in range(num_slots))
        yield self.header
        layers = prefix.load()
        for keys, _ in layers:
            yield struct.pack("<iQ", type_number, _row_bytes(self.width, self.cache_type))
            ordered = interleaved(keys) if is_interleaved else keys
            yield _raw_bytes(rotated(_by_slot(ordered), self.key_block), self.cache_type)
        for _, values in layers:
            yield _values_header(self.width, self.cache_type)
            rows = rotated(_by_slot(values), self.value_block)
            by_channel = rows if is_in_blocks(self.cache_type) else rows.mT
            yield _raw_bytes(by_channel, self.cache_type)
        other_streams = bytes(4 * (self.num_streams - 1))
        yield other_streams

    def first_layer(
        self, state: bytes, num_layers: int
    ) -> tuple[Float[Tensor, " channels"], Float[Tensor, " channels"]]:
        """The keys and values of the first layer in the state of one token, as they are stored."""
        (num_tokens,) = struct.unpack_from("<I", state, 8)
        row_bytes = _row_bytes(self.width, self.cache_type)
        keys_at = 12 + 4 * num_tokens + 12 + len(self.cell_tail) + len(self.header)
        values_at = keys_at + num_layers * (12 + row_bytes)
        values_at += len(_values_header(self.width, self.cache_type))
        keys = state[keys_at + 12 : keys_at + 12 + row_bytes]
        values = state[values_at : values_at + row_bytes]
        return _numbers(keys, self.cache_type), _numbers(values, self.cache_type)


def rotated(states: Float[Tensor, "slots channels"], block: int) -> Float[Tensor, "slots channels"]:
    """States as llama.cpp stores them where it rotates every ``block`` neighbouring channels.

    Since April 2026 it does so for quantised caches, which outliers would spoil, if the heads are
    large enough. The rotation is a Walsh-Hadamard matrix of n = block rows and columns, H_ij =
    (-1)^popcount(i & j) / sqrt(n), in steps: (x, y) becomes (x + y, x - y) / sqrt(2). Queries and
    outputs are rotated as well, so that attention does not change.
    """
    size = 1
    while size < block:
        # (slots, pairs of groups, 2, channels of a group)
        first, second = states.unflatten(-1, (-1, 2, size)).unbind(-2)
        states = torch.stack([first + second, first - second], dim=-2).flatten(-3) / 2**0.5
        size *= 2
    return states


def rotation_block(
    stored: Float[Tensor, "slots channels"], plain: Float[Tensor, "slots channels"]
) -> int:
    """The ``block`` of the rotation by which an engine made its stored states.

    Args:
        stored: the states of some tokens in the engine's cache.
        plain: those of the same tokens in a cache that is not rotated.

    Raises:
        InputError: no block makes them.
    """
    width = stored.shape[-1]
    errors: dict[int, float] = {}
    block = 1
    while width % block == 0:
        made = rotated(plain, block)
        errors[block] = float((made - stored).norm() / plain.norm().clamp_min(1e-30))
        block *= 2
    best = min(errors, key=errors.__getitem__)
    if errors[best] > _ROUNDING:
        raise InputError(
            "llama.cpp changes keys and values before it quantises them, in a way that "
            'is not known: use cache_type="float16"'
        )
    return best


def _width(
    state: bytes, keys_at: int, layers_end: int, num_layers: int, cache_type: str
) -> int | None:
    """Channels of all KV heads if the first layer's keys begin at ``keys_at``; None if they do not.

    A layer's keys and values of one cell have 24 bytes of headers.
    """
    type_number = CACHE_TYPES[cache_type]
    num_bytes = layers_end - keys_at - 24 * num_layers
    row_bytes, remainder = divmod(num_bytes, 2 * num_layers)
    unit, unit_bytes = _unit(cache_type)
    if remainder or row_bytes <= 0 or row_bytes % unit_bytes:
        return None
    width = row_bytes // unit_bytes * unit
    values_at = keys_at + num_layers * (12 + row_bytes)
    keys_header = struct.pack("<iQ", type_number, row_bytes)
    values_header = _values_header(width, cache_type)
    if state.startswith(keys_header, keys_at) and state.startswith(values_header, values_at):
        return width
    return None


def _by_slot(states: Float[Tensor, "kv_heads slots head_dim"]) -> Float[Tensor, "slots channels"]:
    return states.transpose(0, 1).flatten(1)


def _unit(cache_type: str) -> tuple[int, int]:
    """Channels that are stored together, and their bytes."""
    if is_in_blocks(cache_type):
        return _BLOCK, _BLOCK_BYTES[cache_type]
    return 1, getattr(torch, cache_type).itemsize


def _row_bytes(width: int, cache_type: str) -> int:
    """Bytes of all channels of a cell."""
    unit, unit_bytes = _unit(cache_type)
    return width // unit * unit_bytes


def _values_header(width: int, cache_type: str) -> bytes:
    """What precedes a layer's values, which are stored channel after channel or cell after cell."""
    number = CACHE_TYPES[cache_type]
    if is_in_blocks(cache_type):
        return struct.pack("<iQ", number, _row_bytes(width, cache_type))
    return struct.pack("<iII", number, _row_bytes(1, cache_type), width)


def _raw_bytes(states: Tensor, cache_type: str) -> bytes:
    """The bytes of states, row after row.

    Raises:
        InputError: numbers too large for the type.
    """
    if is_in_blocks(cache_type):
        return _blocks(states, cache_type).numpy().tobytes()
    dtype = getattr(torch, cache_type)
    stored = states.to(dtype).contiguous()
    if not stored.isfinite().all():
        raise _too_large(states, cache_type)
    return stored.flatten().view(torch.uint8).numpy().tobytes()


def _blocks(states: Tensor, cache_type: str) -> UInt8[Tensor, "blocks bytes"]:
    """States in ggml's blocks of 32 channels: a scale of 16 bits, then the codes.

    q8_0: code = round(x / scale), scale = |largest| / 127. q4_0: code = x / scale + 8 in 0 .. 15,
    scale = largest / -8; byte j has code j in its low half and code j + 16 in its high half.
    """
    blocks = states.float().reshape(-1, _BLOCK)
    largest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    scales = largest.abs() / 127 if cache_type == "q8_0" else largest / -8
    stored_scales = scales.half()
    if not stored_scales.isfinite().all():
        raise _too_large(states, cache_type)
    steps = blocks / torch.where(scales == 0, 1.0, scales)
    if cache_type == "q8_0":
        codes = steps.round().to(torch.int8).view(torch.uint8)
    else:
        numbers = (steps + 8.5).floor().clamp(0, 15).to(torch.uint8)
        codes = numbers[:, :16] | (numbers[:, 16:] << 4)
    return torch.cat([stored_scales.view(torch.uint8), codes], dim=1)


def _numbers(stored: bytes, cache_type: str) -> Float[Tensor, " channels"]:
    """The numbers of stored channels, in float32."""
    codes = torch.frombuffer(bytearray(stored), dtype=torch.uint8)
    if not is_in_blocks(cache_type):
        return codes.view(getattr(torch, cache_type)).float()
    blocks = codes.view(-1, _BLOCK_BYTES[cache_type])
    scales = blocks[:, :2].clone().view(torch.float16).float()
    codes = blocks[:, 2:]
    if cache_type == "q8_0":
        numbers = codes.clone().view(torch.int8).float()
    else:
        numbers = torch.cat([codes & 15, codes >> 4], dim=1).float() - 8
    return (scales * numbers).flatten()


def _too_large(states: Tensor, cache_type: str) -> InputError:
    return InputError(
        f"the cache holds numbers up to {states.abs().max():.3g}, too large for {cache_type}"
    )
