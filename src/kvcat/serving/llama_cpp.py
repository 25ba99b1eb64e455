"""Compact caches in llama.cpp, in process: load a model once, restore a document's cache, answer.

llama.cpp keeps keys after rotation and one position per cell, so a packed cache of t slots is a
sequence of t cells. The engine is the C API of the shared library in ``xllamacpp`` (prebuilt for
CPUs), or of any other library that exports it (``llama_abi``).
"""

import ctypes
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvcat.cache import check_same_model
from kvcat.cache.files import write_bytes
from kvcat.errors import InputError
from kvcat.files import check_appended_seal
from kvcat.serving.llama_abi import (
    CACHE_TYPES,
    Library,
    StateLayout,
    context_parameters,
    is_in_blocks,
    rotation_block,
)
from kvcat.serving.prefix import Prefix
from kvcat.types import Float, Tensor

# by architecture: whether a GGUF file has the two channels of a rotation next to each other
_INTERLEAVED = {"llama": True, "qwen2": False, "qwen3": False}
_PROBE_TOKENS = 8
_PROBE_CELLS = 64


class LlamaCpp:
    """A model in llama.cpp with one context, which holds one document's cache at a time.

    It runs without flash attention, which rounds to half precision on a CPU, except with the cache
    types q8_0 and q4_0, whose values llama.cpp reads with it alone. These hold 32 channels with one
    scale, so the heads of the model need a multiple of 32 channels. Newer versions of llama.cpp
    rotate keys and values before they store them in these types; restored caches are rotated alike.

    Args:
        gguf: the model; for caches with a log-bias or unequal heads, the file that ``write_gguf``
            made from a widened model.
        num_ctx: cells for slots, questions and answers.
        cache_type: type of llama.cpp's cache, "float16", "float32", "bfloat16", "q8_0" or "q4_0".
        library: shared library with llama.cpp's C API; None: that of ``xllamacpp``.

    Raises:
        InputError: no library, an unknown library or format of states, no such model, or a damaged
            file of ``write_gguf``.
    """

    layout: StateLayout
    num_ctx: int

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
            choices = ", ".join(CACHE_TYPES)
            raise InputError(f"cache_type must be one of {choices}, not {cache_type!r}")
        if not Path(gguf).is_file():
            raise InputError(f"no model file {gguf}")
        check_appended_seal(Path(gguf))
        self._library = Library(library)
        self._context: Any = None
        model_parameters = self._call("model_default_params")
        self._model = self._call("model_load_from_file", str(gguf).encode(), model_parameters)
        if not self._model:
            raise InputError(f"llama.cpp cannot load {gguf}: {self._library.reason}")
        try:
            self._open_context(num_ctx, cache_type, num_threads)
        except InputError:
            self.close()
            raise

    def _new_context(self, num_ctx: int, cache_type: str, num_threads: int) -> Any:
        defaults = self._call("context_default_params")
        parameters = context_parameters(defaults, num_ctx, cache_type)
        context = self._call("init_from_model", self._model, parameters)
        if not context:
            reason = self._library.reason
            raise InputError(f"llama.cpp makes no context of {num_ctx} cells: {reason}")
        self._call("set_n_threads", context, num_threads, num_threads)
        return context

    def _open_context(self, num_ctx: int, cache_type: str, num_threads: int) -> None:
        self._context = self._new_context(num_ctx, cache_type, num_threads)
        self.num_ctx = int(self._call("n_ctx", self._context))
        self._vocab_size = self._call("vocab_n_tokens", self._call("model_get_vocab", self._model))
        self._architecture = self._meta("general.architecture")
        self._fingerprint = self._meta("kvcat.fingerprint")
        self._num_layers = self._call("model_n_layer", self._model)
        self.layout = StateLayout.read(self._state_of(0), self._num_layers, cache_type)
        if is_in_blocks(cache_type):
            self.layout = self._with_rotation(self.layout)

    def _with_rotation(self, layout: StateLayout) -> StateLayout:
        """The layout with the rotation of keys and values that the engine applies.

        It is found by a comparison with a cache in float32, which is not rotated, so that no
        version of llama.cpp has to be known. In the first layer both hold the same.
        """
        tokens = range(0, self._vocab_size, -(-self._vocab_size // _PROBE_TOKENS))
        stored = self._first_layers(layout, tokens)
        context = self._context
        self._context = self._new_context(_PROBE_CELLS, "float32", 1)
        try:
            exact = StateLayout.read(self._state_of(0), self._num_layers, "float32")
            plain = self._first_layers(exact, tokens)
        finally:
            self._call("free", self._context)
            self._context = context
        key_block, value_block = map(rotation_block, stored, plain)
        return replace(layout, key_block=key_block, value_block=value_block)

    def _first_layers(
        self, layout: StateLayout, tokens: Sequence[int]
    ) -> tuple[Float[Tensor, "tokens channels"], Float[Tensor, "tokens channels"]]:
        """The first layer's keys and values of tokens, each alone at position 0."""
        rows = [layout.first_layer(self._state_of(token), self._num_layers) for token in tokens]
        keys, values = zip(*rows, strict=True)
        return torch.stack(keys), torch.stack(values)

    def _state_of(self, token: int) -> bytes:
        """The engine's state after one token; the context is empty then."""
        self.logits([token])
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state"
            token_ids = (ctypes.c_int32 * 1)(token)
            name = str(path).encode()
            self._call("state_seq_save_file", self._context, name, 0, token_ids, 1)
            state = path.read_bytes()
        self.clear()
        return state

    def load(self, prefix: Prefix) -> None:
        """Start again after a document's cache, with token 0 in every cell.

        Raises:
            InputError: a cache of another model, or one that does not fit.
        """
        self._check_fits(prefix)
        is_interleaved = _INTERLEAVED[self._architecture]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state"
            write_bytes(path, *self.layout.file(prefix, is_interleaved=is_interleaved))
            token_ids = (ctypes.c_int32 * self.num_ctx)()
            num_tokens = ctypes.c_size_t(0)
            name = str(path).encode()
            self.clear()
            num_bytes = self._call(
                "state_seq_load_file",
                self._context,
                name,
                0,
                token_ids,
                self.num_ctx,
                ctypes.byref(num_tokens),
            )
        if not num_bytes:
            raise InputError(f"llama.cpp rejects {prefix.path}: {self._library.reason}")

    def _check_fits(self, prefix: Prefix) -> None:
        """Reject a cache of another model, another shape, or more slots than cells."""
        if self._fingerprint:
            check_same_model("the cache", prefix.fingerprint, self._fingerprint)
        if self._architecture not in _INTERLEAVED:
            raise InputError(
                f"the order of channels of architecture {self._architecture!r} is not known"
            )
        num_layers, kv_heads, channels = prefix.shape
        width = kv_heads * channels
        if (num_layers, width) != (self._num_layers, self.layout.width):
            raise InputError(
                f"a cache of {num_layers} layers of {width} channels does not fit the engine's "
                f"{self._num_layers} layers of {self.layout.width}: pack it for this model's "
                "head_dim"
            )
        if prefix.num_slots >= self.num_ctx:
            raise InputError(
                f"{prefix.num_slots} slots do not fit into a context of {self.num_ctx} cells"
            )

    def logits(self, ids: Sequence[int]) -> Float[Tensor, " vocab"]:
        """Logits after these tokens, which are appended to the context.

        Raises:
            InputError: no tokens, ids that the model does not have, or more tokens than cells.
        """
        if not ids or not all(0 <= token < self._vocab_size for token in ids):
            raise InputError(f"ids must be one or more tokens in 0..{self._vocab_size - 1}")
        if self.position + len(ids) > self.num_ctx:
            raise InputError(
                f"{len(ids)} tokens do not fit: {self.position} of {self.num_ctx} cells are in use"
            )
        tokens_at_once = self._call("n_batch", self._context)
        for start in range(0, len(ids), tokens_at_once):
            chunk = ids[start : start + tokens_at_once]
            token_ids = (ctypes.c_int32 * len(chunk))(*chunk)
            batch = self._call("batch_get_one", token_ids, len(chunk))
            if self._call("decode", self._context, batch):
                reason = self._library.reason
                raise RuntimeError(f"llama.cpp cannot decode {len(chunk)} tokens: {reason}")
        pointer = self._call("get_logits_ith", self._context, -1)
        raw = ctypes.string_at(pointer, 4 * self._vocab_size)
        return torch.frombuffer(bytearray(raw), dtype=torch.float32)

    def generate(
        self, ids: Sequence[int], max_new_tokens: int, end: Sequence[int] = ()
    ) -> Iterator[int]:
        """The most likely next tokens, up to a token in ``end`` or until the context is full."""
        for _ in range(max_new_tokens):
            token = int(self.logits(ids).argmax())
            if token in end:
                return
            yield token
            if self.position >= self.num_ctx:
                return
            ids = [token]

    def clear(self) -> None:
        """Empty the context."""
        self._call("memory_clear", self._call("get_memory", self._context), True)

    def close(self) -> None:
        """Free the context and the model."""
        self._call("free", self._context)
        self._call("model_free", self._model)
        self._context = None
        self._model = None

    @property
    def position(self) -> int:
        """Position of the next token."""
        memory = self._call("get_memory", self._context)
        return self._call("memory_seq_pos_max", memory, 0) + 1

    def _call(self, name: str, *arguments: Any) -> Any:
        return self._library.call(name, *arguments)

    def _meta(self, key: str) -> str:
        """A text from the GGUF file's metadata; empty if the key is missing."""
        buffer = ctypes.create_string_buffer(256)
        length = self._call("model_meta_val_str", self._model, key.encode(), buffer, len(buffer))
        return buffer.value.decode() if length >= 0 else ""
