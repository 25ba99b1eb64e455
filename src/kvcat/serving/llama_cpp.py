"""Compact caches in llama.cpp, in process: load a model once, restore a document's cache, answer.

llama.cpp keeps keys after rotation and one position per cell, so a packed cache of t slots is a sequence of t cells.
The format of a sequence's state differs between versions, types of cache and flash attention. So nothing is assumed:
the engine at hand saves the state of one token, and its version and layout are read from that. The engine is the C API
of the shared library in ``xllamacpp`` (prebuilt for CPUs), or of any other library that exports it.
"""

import ctypes
import importlib.util
import re
import struct
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvcat.cache import are_comparable
from kvcat.cache.files import write_bytes
from kvcat.errors import InputError
from kvcat.serving.transformers import Prefix
from kvcat.serving.widen import interleaved
from kvcat.types import Float, Tensor

CACHE_TYPES = {"float32": 0, "float16": 1, "bfloat16": 30}  # and ggml's numbers
_MAGIC = 0x67677371  # of llama_state_seq_save_file
_INTERLEAVED = {"llama": True, "qwen2": False, "qwen3": False}  # by architecture: the order of channels in a GGUF file
_ERROR = 4


class _Parameters(ctypes.Structure):
    """Room for a struct of parameters of any version; what is set is found by the engine's own defaults."""

    _fields_ = [("raw", ctypes.c_uint8 * 1024)]


class _Batch(ctypes.Structure):
    _fields_ = [("n_tokens", ctypes.c_int32), *((name, ctypes.c_void_p) for name in "abcdef")]


_Log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_KINDS = {
    "-": None, "p": ctypes.c_void_p, "i": ctypes.c_int32, "n": ctypes.c_size_t, "s": ctypes.c_char_p,
    "?": ctypes.c_bool, "log": _Log, "params": _Parameters, "batch": _Batch,
}  # fmt: skip
_PROTOTYPES = """
backend_init -, log_set - log p, model_default_params params, context_default_params params,
model_load_from_file p s params, init_from_model p p params, model_free - p, free - p, model_meta_val_str i p s s n,
model_n_layer i p, model_get_vocab p p, vocab_n_tokens i p, n_ctx i p, n_batch i p, set_n_threads - p i i,
get_memory p p, memory_clear - p ?, memory_seq_pos_max i p i, batch_get_one batch p i, decode i p batch,
get_logits_ith p p i, state_seq_load_file n p s i p n p, state_seq_save_file n p s i p n
"""  # name, what it returns, what it takes


@dataclass(frozen=True)
class Layout:
    """How the engine at hand lays out the state of a sequence, read from the state of one token."""

    version: int
    streams: int  # of cells; the sequence lies in the first
    cell: bytes  # what follows the position of a cell
    after: bytes  # what stands between the cells and the first layer's keys
    cache_type: str
    width: int  # channels of all KV heads together

    @classmethod
    def read(cls, state: bytes, num_layers: int, cache_type: str) -> "Layout":
        """The layout of the file that the engine saved for one token; ``InputError`` if it is not understood.

        A cell is its position, the number of its sequences, and more in some versions; then come a 1, since values lie
        channel after channel, the number of layers, and more in some versions. The split is taken with which the
        layers' blocks of one cell fill the file.
        """
        magic, version, tokens = struct.unpack_from("<III", state)
        start, number, size = 12 + 4 * tokens, CACHE_TYPES[cache_type], getattr(torch, cache_type).itemsize
        (streams,) = struct.unpack_from("<I", state, start)
        at, end = state.find(struct.pack("<II", 1, num_layers), start + 16, start + 60), len(state) - 4 * (streams - 1)
        for first in range(at + 8, at + 48, 4) if magic == _MAGIC and at > 0 else ():
            width, rest = divmod(end - first - 24 * num_layers, 2 * size * num_layers)
            if rest == 0 and width > 0 and state.startswith(struct.pack("<iQ", number, width * size), first):
                middle = first + num_layers * (12 + width * size)
                if state.startswith(struct.pack("<iII", number, size, width), middle):
                    return cls(version, streams, state[start + 12 : at], state[at:first], cache_type, width)
        raise InputError(f"llama.cpp's sequence states of version {version} are laid out in a way that is not known")

    def file(self, prefix: Prefix, *, is_interleaved: bool) -> Iterator[bytes]:
        """A packed cache as the parts of a file that the engine loads; ``InputError`` for numbers too large for it."""
        slots, number, dtype = prefix.num_slots, CACHE_TYPES[self.cache_type], getattr(torch, self.cache_type)
        yield struct.pack("<III", _MAGIC, self.version, slots) + bytes(4 * slots)
        yield struct.pack("<II", self.streams, slots)
        yield b"".join(struct.pack("<i", position) + self.cell for position in range(slots))
        yield self.after
        layers = prefix.load()
        for keys, _ in layers:
            yield struct.pack("<iQ", number, self.width * dtype.itemsize)
            yield _raw(_rows(interleaved(keys) if is_interleaved else keys), dtype)
        for _, values in layers:
            yield struct.pack("<iII", number, dtype.itemsize, self.width)
            yield _raw(_rows(values).mT, dtype)
        yield bytes(4 * (self.streams - 1))


class LlamaCpp:
    """A model in llama.cpp with one context, which holds one document's cache at a time.

    It runs without flash attention, which rounds to half precision on a CPU.

    Args:
        gguf: the model, for caches with a log-bias or unequal heads made by ``write_gguf`` from a widened model.
        num_ctx: cells for slots, questions and answers.
        cache_type: of llama.cpp's cache, "float16", "float32" or "bfloat16".
        num_threads: of the computation.
        library: shared library with llama.cpp's C API; None takes that of ``xllamacpp``.

    Raises:
        InputError: no library, a library or a state format that is not understood, or no such model.
    """

    def __init__(
        self,
        gguf: str | Path,
        *,
        num_ctx: int = 4096,
        cache_type: str = "float16",
        num_threads: int = 1,
        library: str | Path | None = None,
    ):
        if cache_type not in CACHE_TYPES:
            raise InputError(f"cache_type must be one of {', '.join(CACHE_TYPES)}, not {cache_type!r}")
        if not Path(gguf).is_file():
            raise InputError(f"no model file {gguf}")
        self._library = _load_library(library)
        self._call("log_set", _LOG, None)
        self._call("backend_init")
        self._model = self._call("model_load_from_file", str(gguf).encode(), self._call("model_default_params"))
        if not self._model:
            raise InputError(f"llama.cpp cannot load {gguf}: {_reasons[-1]}")
        self._context = None
        try:
            self._open_context(num_ctx, cache_type, num_threads)
        except InputError:
            self.close()
            raise

    def _open_context(self, num_ctx: int, cache_type: str, num_threads: int) -> None:
        defaults = self._call("context_default_params")
        parameters = _context_parameters(defaults, num_ctx, CACHE_TYPES[cache_type])
        self._context = self._call("init_from_model", self._model, parameters)
        if not self._context:
            raise InputError(f"llama.cpp makes no context of {num_ctx} cells: {_reasons[-1]}")
        self._call("set_n_threads", self._context, num_threads, num_threads)
        self.num_ctx = int(self._call("n_ctx", self._context))
        self._vocab = self._call("vocab_n_tokens", self._call("model_get_vocab", self._model))
        self._architecture, self._fingerprint = self._meta("general.architecture"), self._meta("kvcat.fingerprint")
        self._num_layers = self._call("model_n_layer", self._model)
        self.logits([0])
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state"
            self._call("state_seq_save_file", self._context, str(path).encode(), 0, (ctypes.c_int32 * 1)(0), 1)
            self.layout = Layout.read(path.read_bytes(), self._num_layers, cache_type)
        self.clear()

    def load(self, prefix: Prefix) -> None:
        """Begin anew behind a document's cache, token 0 in every cell; ``InputError`` if it does not fit."""
        if self._fingerprint and not are_comparable(self._fingerprint, prefix.fingerprint):
            raise InputError(f"{prefix.path} or the GGUF file is of an older kvcat: `kvcat widen` and pack again")
        if self._fingerprint not in ("", prefix.fingerprint):
            raise InputError(
                f"the cache belongs to another model: its fingerprint is {prefix.fingerprint[:12]}, the GGUF file's "
                f"{self._fingerprint[:12]}"
            )
        if self._architecture not in _INTERLEAVED:
            raise InputError(f"the order of channels of architecture {self._architecture!r} is not known")
        layers, kv_heads, channels = prefix.shape
        if (layers, kv_heads * channels) != (self._num_layers, self.layout.width):
            raise InputError(
                f"a cache of {layers} layers of {kv_heads * channels} channels does not fit the engine's "
                f"{self._num_layers} layers of {self.layout.width}: pack it for this model's head_dim"
            )
        if prefix.num_slots >= self.num_ctx:
            raise InputError(f"{prefix.num_slots} slots do not fit into a context of {self.num_ctx} cells")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state"
            write_bytes(path, *self.layout.file(prefix, is_interleaved=_INTERLEAVED[self._architecture]))
            tokens, count = (ctypes.c_int32 * self.num_ctx)(), ctypes.c_size_t(0)
            arguments = (str(path).encode(), 0, tokens, self.num_ctx, ctypes.byref(count))
            self.clear()
            if not self._call("state_seq_load_file", self._context, *arguments):
                raise InputError(f"llama.cpp refuses {prefix.path}: {_reasons[-1]}")

    def logits(self, ids: Sequence[int]) -> Float[Tensor, " vocab"]:
        """Logits after the tokens, which follow what the context holds; ``InputError`` for ids that do not fit."""
        if not ids or not all(0 <= token < self._vocab for token in ids):
            raise InputError(f"ids must be one or more tokens in 0..{self._vocab - 1}")
        if self.position + len(ids) > self.num_ctx:
            raise InputError(f"{len(ids)} tokens do not fit behind {self.position} of {self.num_ctx} cells")
        step = self._call("n_batch", self._context)
        for start in range(0, len(ids), step):
            part = (ctypes.c_int32 * len(ids[start : start + step]))(*ids[start : start + step])
            if self._call("decode", self._context, self._call("batch_get_one", part, len(part))):
                raise RuntimeError(f"llama.cpp cannot decode {len(part)} tokens: {_reasons[-1]}")
        row = ctypes.string_at(self._call("get_logits_ith", self._context, -1), 4 * self._vocab)
        return torch.frombuffer(bytearray(row), dtype=torch.float32)

    def generate(self, ids: Sequence[int], max_new_tokens: int, end: Sequence[int] = ()) -> Iterator[int]:
        """The most likely continuation of the tokens, up to a token of ``end`` or a full context."""
        for _ in range(max_new_tokens):
            token = int(self.logits(ids).argmax())
            if token in end:
                return
            yield token
            if self.position >= self.num_ctx:
                return
            ids = [token]

    def clear(self) -> None:
        """Forget what the context holds."""
        self._call("memory_clear", self._call("get_memory", self._context), True)

    def close(self) -> None:
        """Free the context and the model."""
        self._call("free", self._context)
        self._call("model_free", self._model)
        self._context = self._model = None

    @property
    def position(self) -> int:
        """Where the next token stands."""
        return self._call("memory_seq_pos_max", self._call("get_memory", self._context), 0) + 1

    def _call(self, name: str, *arguments: Any) -> Any:
        return getattr(self._library, f"llama_{name}")(*arguments)

    def _meta(self, key: str) -> str:
        buffer = ctypes.create_string_buffer(256)
        found = self._call("model_meta_val_str", self._model, key.encode(), buffer, len(buffer))
        return buffer.value.decode() if found >= 0 else ""


def _note(level: int, text: bytes, _: Any) -> None:
    if level == _ERROR and text.strip():
        _reasons.append(text.decode(errors="replace").strip()[:200])


_LOG, _reasons = _Log(_note), deque(["it gives no reason"], maxlen=1)  # llama.cpp has one log for all engines


def _load_library(library: str | Path | None) -> Any:
    if library is None:
        spec = importlib.util.find_spec("xllamacpp")
        folders = list(spec.submodule_search_locations or ()) if spec else []
        found = sorted(file for folder in folders for file in Path(folder).glob("xllamacpp*.so"))
        if not found:
            raise InputError("llama.cpp is not installed: pip install 'kvcat[llama-cpp]'")
        library = found[0]
    try:
        api = ctypes.CDLL(str(library))
        for prototype in _PROTOTYPES.split(","):
            name, result, *arguments = prototype.split()
            function = getattr(api, f"llama_{name}")
            function.restype, function.argtypes = _KINDS[result], [_KINDS[kind] for kind in arguments]
    except (OSError, AttributeError) as error:
        raise InputError(f"{library} is no library with llama.cpp's C API: {error}") from None
    return api


def _context_parameters(defaults: _Parameters, num_ctx: int, cache_type: int) -> _Parameters:
    """The defaults with our choice, no flash attention; fields are found by the values around them in any version."""
    raw = bytes(defaults.raw)
    sizes = raw.startswith(struct.pack("<III", 512, 2048, 512))  # context, batch, part of a batch
    automatic = re.search(rb"\xff{16}", raw)  # scaling of positions, pooling, kind of attention, flash attention
    types = re.search(rb"(?:\x01\x00\x00\x00){2}", raw[automatic.end() :]) if automatic else None
    if not sizes or automatic is None or types is None:
        raise InputError("this version of llama.cpp has other parameters than expected")
    changed = bytearray(raw)
    struct.pack_into("<I", changed, 0, num_ctx)
    struct.pack_into("<i", changed, automatic.end() - 4, 0)
    struct.pack_into("<ii", changed, automatic.end() + types.start(), cache_type, cache_type)
    return _Parameters.from_buffer(changed)


def _rows(states: Float[Tensor, "kv_heads slots head_dim"]) -> Float[Tensor, "slots channels"]:
    return states.transpose(0, 1).flatten(1)


def _raw(states: Tensor, dtype: torch.dtype) -> bytes:
    stored = states.to(dtype).contiguous()
    if not stored.isfinite().all():
        raise InputError(f"the cache holds numbers up to {states.abs().max():.3g}, too large for {dtype}")
    return stored.flatten().view(torch.uint8).numpy().tobytes()
