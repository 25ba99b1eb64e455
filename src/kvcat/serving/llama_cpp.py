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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvcat.cache.files import write_bytes
from kvcat.errors import InputError
from kvcat.serving.transformers import Prefix
from kvcat.serving.widen import interleaved
from kvcat.types import Float, Tensor

CACHE_TYPES = {"float32": 0, "float16": 1, "bfloat16": 30}
_DTYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
_MAGIC = 0x67677371  # of llama_state_seq_save_file
_INTERLEAVED = {"llama": True, "qwen2": False, "qwen3": False}  # by architecture: the order of channels in a GGUF file
_ERROR = 4


class _Parameters(ctypes.Structure):
    """Room for a struct of parameters of any version; what is set is found by the engine's own defaults."""

    _fields_ = [("raw", ctypes.c_uint8 * 1024)]


class _Batch(ctypes.Structure):
    _fields_ = [("n_tokens", ctypes.c_int32), *((name, ctypes.c_void_p) for name in "abcdef")]


_Log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_P, _I, _N = ctypes.c_void_p, ctypes.c_int32, ctypes.c_size_t
_PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "llama_backend_init": (None, []),
    "llama_log_set": (None, [_Log, _P]),
    "llama_model_default_params": (_Parameters, []),
    "llama_context_default_params": (_Parameters, []),
    "llama_model_load_from_file": (_P, [ctypes.c_char_p, _Parameters]),
    "llama_init_from_model": (_P, [_P, _Parameters]),
    "llama_model_free": (None, [_P]),
    "llama_free": (None, [_P]),
    "llama_model_meta_val_str": (_I, [_P, ctypes.c_char_p, ctypes.c_char_p, _N]),
    "llama_model_n_layer": (_I, [_P]),
    "llama_model_get_vocab": (_P, [_P]),
    "llama_vocab_n_tokens": (_I, [_P]),
    "llama_n_ctx": (ctypes.c_uint32, [_P]),
    "llama_n_batch": (ctypes.c_uint32, [_P]),
    "llama_set_n_threads": (None, [_P, _I, _I]),
    "llama_get_memory": (_P, [_P]),
    "llama_memory_clear": (None, [_P, ctypes.c_bool]),
    "llama_memory_seq_pos_max": (_I, [_P, _I]),
    "llama_batch_get_one": (_Batch, [_P, _I]),
    "llama_decode": (_I, [_P, _Batch]),
    "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), [_P, _I]),
    "llama_state_seq_load_file": (_N, [_P, ctypes.c_char_p, _I, _P, _N, ctypes.POINTER(_N)]),
    "llama_state_seq_save_file": (_N, [_P, ctypes.c_char_p, _I, _P, _N]),
}


@dataclass(frozen=True)
class Layout:
    """How the engine at hand lays out the state of a sequence, read from the state of one token.

    Args:
        version: of the file's format.
        streams: number of streams of cells, the first of which holds the sequence.
        cell: what follows the position in the description of a cell.
        after: what stands between the cells and the first layer's keys.
        behind: what follows the last layer's values.
        key_type, value_type: ggml's numbers of the types.
        key_width, value_width: channels of all KV heads together.
        transposed: whether values lie channel after channel (without flash attention).
        num_layers: layers with keys and values.
    """

    version: int
    streams: int
    cell: bytes
    after: bytes
    behind: bytes
    key_type: int
    value_type: int
    key_width: int
    value_width: int
    transposed: bool
    num_layers: int

    @classmethod
    def read(cls, state: bytes, num_layers: int) -> "Layout":
        """The layout of the file that the engine saved for one token.

        Raises:
            InputError: a quantised cache, or a format that is not understood.
        """
        magic, version, tokens = struct.unpack_from("<III", state)
        start = 12 + 4 * tokens
        streams, cells = struct.unpack_from("<II", state, start)
        for size in range(4, 40, 4):  # a cell: its position, the number of its sequences, ...
            at = start + 12 + size
            if magic != _MAGIC or cells != 1:
                break
            transposed, layers = struct.unpack_from("<II", state, at)
            for extra in range(0, 40, 4):
                first = at + 8 + extra
                found = cls._blocks(state, first, num_layers, bool(transposed))
                if transposed in (0, 1) and layers == num_layers and found:
                    cell, after = state[start + 12 : at], state[at:first]
                    return cls(version, streams, cell, after, state[found[4] :], *found[:4], bool(transposed), layers)
        raise InputError(
            f"sequence states of version {version} are not understood, or the engine's cache is quantised: use a cache "
            f"of {', '.join(CACHE_TYPES)}"
        )

    @staticmethod
    def _blocks(state: bytes, first: int, num_layers: int, transposed: bool) -> tuple[int, int, int, int, int] | None:
        """Types and widths of keys and values, and where the layers end, if they begin here."""
        kinds, at = [], first
        try:
            for part in ("keys", "values"):
                seen = set()
                for _ in range(num_layers):
                    if part == "values" and transposed:
                        kind, size, width = struct.unpack_from("<iII", state, at)
                        fits = kind in _DTYPES and size == _DTYPES[kind].itemsize
                    else:
                        kind, row = struct.unpack_from("<iQ", state, at)
                        fits = kind in _DTYPES and 0 < row < 2**20 and row % _DTYPES[kind].itemsize == 0
                        width = row // _DTYPES[kind].itemsize if fits else 0
                    if not fits:
                        return None
                    at += 12 + width * _DTYPES[kind].itemsize
                    seen.add((kind, width))
                kinds.append(seen)
        except struct.error:
            return None
        if at > len(state) or any(len(seen) != 1 for seen in kinds):
            return None
        (key_type, key_width), (value_type, value_width) = (seen.pop() for seen in kinds)
        return key_type, value_type, key_width, value_width, at

    def state(self, prefix: Prefix, *, is_interleaved: bool) -> bytes:
        """A packed cache as the state of a sequence, without the file's head.

        Args:
            prefix: of the engine's number of layers and width.
            is_interleaved: whether the engine's rotation turns neighbouring channels.

        Raises:
            InputError: a prefix of another shape, or numbers too large for the cache's type.
        """
        width = prefix.keys[0].shape[0] * prefix.keys[0].shape[2]
        if (len(prefix.keys), width) != (self.num_layers, self.key_width) or width != self.value_width:
            raise InputError(
                f"a cache of {len(prefix.keys)} layers of {width} channels does not fit the engine's {self.num_layers} "
                f"layers of {self.key_width}: pack it for this model's head_dim"
            )
        slots = prefix.num_slots
        parts = [struct.pack("<II", self.streams, slots)]
        parts += [struct.pack("<i", position) + self.cell for position in range(slots)]
        parts.append(self.after)
        kind = _DTYPES[self.key_type]
        for keys in prefix.keys:
            ordered = interleaved(keys) if is_interleaved else keys
            parts += [struct.pack("<iQ", self.key_type, width * kind.itemsize), _raw(_rows(ordered), kind)]
        kind = _DTYPES[self.value_type]
        for values in prefix.values:
            if self.transposed:
                parts += [struct.pack("<iII", self.value_type, kind.itemsize, width), _raw(_rows(values).mT, kind)]
            else:
                parts += [struct.pack("<iQ", self.value_type, width * kind.itemsize), _raw(_rows(values), kind)]
        return b"".join([*parts, self.behind])


class LlamaCpp:
    """A model in llama.cpp with one context, which holds one document's cache at a time.

    Args:
        gguf: the model, for caches with a log-bias or unequal heads made by ``write_gguf`` from a widened model.
        num_ctx: cells for slots, questions and answers.
        cache_type: of llama.cpp's cache, "float16", "float32" or "bfloat16".
        flash_attention: whether to use it; on a CPU it rounds to half precision.
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
        flash_attention: bool = False,
        num_threads: int = 1,
        library: str | Path | None = None,
    ):
        if cache_type not in CACHE_TYPES:
            raise InputError(f"cache_type must be one of {', '.join(CACHE_TYPES)}, not {cache_type!r}")
        if not Path(gguf).is_file():
            raise InputError(f"no model file {gguf}")
        self._model = self._context = None
        self._api, self._errors = _load_library(library), []
        self._log = _Log(self._note)
        self._api.llama_log_set(self._log, None)
        self._api.llama_backend_init()
        self._model = self._api.llama_model_load_from_file(str(gguf).encode(), self._api.llama_model_default_params())
        if not self._model:
            raise InputError(f"llama.cpp cannot load {gguf}: {self._why()}")
        parameters = _context_parameters(
            self._api.llama_context_default_params(), num_ctx, CACHE_TYPES[cache_type], flash_attention
        )
        self._context = self._api.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise InputError(f"llama.cpp makes no context of {num_ctx} cells: {self._why()}")
        self._api.llama_set_n_threads(self._context, num_threads, num_threads)
        self._vocab = self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(self._model))
        self.architecture, self.fingerprint = self._meta("general.architecture"), self._meta("kvcat.fingerprint")
        self.layout = self._read_layout()

    def load(self, prefix: Prefix) -> None:
        """Begin anew behind a document's cache.

        Args:
            prefix: of ``read_prefix``.

        Raises:
            InputError: a cache of another model or shape, or too little room.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.write_state(prefix, Path(folder) / "state")
            self.load_state(Path(folder) / "state")

    def load_state(self, path: str | Path) -> None:
        """Begin anew behind the cache in a file of ``write_state``.

        Args:
            path: the file.

        Raises:
            InputError: no such file, or one that llama.cpp refuses: of another model, type of cache or layout, damaged,
                or with too little room.
        """
        if not Path(path).is_file():
            raise InputError(f"no sequence state {path}")
        self.clear()
        tokens, count = (ctypes.c_int32 * self.num_ctx)(), _N(0)
        name = str(path).encode()
        if not self._api.llama_state_seq_load_file(self._context, name, 0, tokens, self.num_ctx, ctypes.byref(count)):
            raise InputError(f"llama.cpp refuses {path}: {self._why()}")

    def write_state(self, prefix: Prefix, path: str | Path, *, placeholder: int = 0) -> None:
        """Write a document's cache as a file that ``llama_state_seq_load_file`` of this engine reads.

        Args:
            prefix: of ``read_prefix``.
            path: file to write.
            placeholder: token id that the file gives for every cell.

        Raises:
            InputError: a cache of another model or shape, too little room, or the file cannot be written.
        """
        slots = prefix.num_slots
        if slots >= self.num_ctx:
            raise InputError(f"{slots} slots do not fit into a context of {self.num_ctx} cells")
        head = struct.pack(f"<III{slots}i", _MAGIC, self.layout.version, slots, *[placeholder] * slots)
        write_bytes(Path(path), head, self._state(prefix))

    def logits(self, ids: Sequence[int]) -> Float[Tensor, " vocab"]:
        """Logits after the tokens, which follow what the context holds.

        Raises:
            InputError: no tokens, ids outside the vocabulary, or no room left.
        """
        if not ids or not all(0 <= token < self._vocab for token in ids):
            raise InputError(f"ids must be one or more tokens in 0..{self._vocab - 1}")
        if self.position + len(ids) > self.num_ctx:
            raise InputError(f"{len(ids)} tokens do not fit behind {self.position} of {self.num_ctx} cells")
        step = self._api.llama_n_batch(self._context)
        for start in range(0, len(ids), step):
            part = ids[start : start + step]
            tokens = (ctypes.c_int32 * len(part))(*part)
            if self._api.llama_decode(self._context, self._api.llama_batch_get_one(tokens, len(part))):
                raise RuntimeError(f"llama.cpp cannot decode {len(part)} tokens: {self._why()}")
        row = self._api.llama_get_logits_ith(self._context, -1)
        return torch.frombuffer(bytearray(ctypes.string_at(row, 4 * self._vocab)), dtype=torch.float32)

    def generate(self, ids: Sequence[int], max_new_tokens: int, end: Sequence[int] = ()) -> Iterator[int]:
        """The most likely continuation, token by token.

        Args:
            ids: what follows the document.
            max_new_tokens: most tokens to make; fewer where the context is full.
            end: tokens that end an answer.
        """
        for _ in range(max_new_tokens):
            token = int(self.logits(ids).argmax())
            if token in end:
                return
            yield token
            ids = [token]
            if self.position >= self.num_ctx:
                return

    def clear(self) -> None:
        """Forget what the context holds."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)

    def close(self) -> None:
        """Free the context and the model."""
        if self._context:
            self._api.llama_free(self._context)
        if self._model:
            self._api.llama_model_free(self._model)
        self._context = self._model = None

    @property
    def position(self) -> int:
        """Where the next token stands."""
        return self._api.llama_memory_seq_pos_max(self._api.llama_get_memory(self._context), 0) + 1

    @property
    def num_ctx(self) -> int:
        """Cells of the context."""
        return int(self._api.llama_n_ctx(self._context))

    def _state(self, prefix: Prefix) -> bytes:
        if self.fingerprint not in ("", prefix.fingerprint):
            raise InputError(
                f"the cache belongs to another model: its fingerprint is {prefix.fingerprint[:12]}, the GGUF file's "
                f"{self.fingerprint[:12]}"
            )
        if self.architecture not in _INTERLEAVED:
            raise InputError(f"the order of channels of architecture {self.architecture!r} is not known")
        return self.layout.state(prefix, is_interleaved=_INTERLEAVED[self.architecture])

    def _read_layout(self) -> Layout:
        self.logits([0])
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state"
            token = (ctypes.c_int32 * 1)(0)
            self._api.llama_state_seq_save_file(self._context, str(path).encode(), 0, token, 1)
            state = path.read_bytes()
        self.clear()
        return Layout.read(state, self._api.llama_model_n_layer(self._model))

    def _meta(self, key: str) -> str:
        buffer = ctypes.create_string_buffer(256)
        found = self._api.llama_model_meta_val_str(self._model, key.encode(), buffer, len(buffer))
        return buffer.value.decode() if found >= 0 else ""

    def _note(self, level: int, text: bytes, _: Any) -> None:
        if level == _ERROR and text.strip():
            self._errors.append(text.decode(errors="replace").strip())

    def _why(self) -> str:
        return self._errors[-1][:200] if self._errors else "it gives no reason"


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
        for name, (result, arguments) in _PROTOTYPES.items():
            getattr(api, name).restype, getattr(api, name).argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise InputError(f"{library} is no library with llama.cpp's C API: {error}") from None
    return api


def _context_parameters(defaults: _Parameters, num_ctx: int, cache_type: int, flash: bool) -> _Parameters:
    """The defaults with what we choose, each field found by the values around it, whatever the version.

    Raises:
        InputError: the defaults are not laid out as expected.
    """
    raw = bytes(defaults.raw)
    numbers = re.search(rb"^(?:\x00\x02\x00\x00)(?:\x00\x08\x00\x00)(?:\x00\x02\x00\x00)\x01\x00\x00\x00", raw)
    automatic = re.search(rb"\xff{16}", raw)  # scaling of positions, pooling, kind of attention, flash attention
    types = re.search(rb"(?:\x01\x00\x00\x00){2}", raw[automatic.end() :]) if automatic else None
    if numbers is None or automatic is None or types is None:
        raise InputError("this version of llama.cpp has other parameters than expected")
    changed = bytearray(raw)
    struct.pack_into("<I", changed, 0, num_ctx)
    struct.pack_into("<i", changed, automatic.end() - 4, int(flash))
    struct.pack_into("<ii", changed, automatic.end() + types.start(), cache_type, cache_type)
    return _Parameters.from_buffer(changed)


def _rows(states: Float[Tensor, "kv_heads slots head_dim"]) -> Float[Tensor, "slots channels"]:
    return states.transpose(0, 1).flatten(1)


def _raw(states: Tensor, dtype: torch.dtype) -> bytes:
    stored = states.to(dtype).contiguous()
    if not stored.isfinite().all():
        raise InputError(f"the cache holds numbers up to {states.abs().max():.3g}, too large for {dtype}")
    return stored.flatten().view(torch.uint8).numpy().tobytes()
