"""Compact caches in llama.cpp: the state of one sequence, as its own programs save and restore it.

llama.cpp keeps keys after rotation and one position per cell, so that a compact cache of t equal slots is a sequence of
t cells. Format: ``llama_state_seq_save_file`` of llama.cpp, version 3 (``LLAMA_STATE_SEQ_VERSION``); its loader refuses
other versions, and states of another number of layers, heads or another type.
"""

import ctypes
import importlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from kvcat.cache import CompactCache
from kvcat.cache.files import write_bytes
from kvcat.errors import InputError
from kvcat.serving.transformers import check_plain, plain_prefix
from kvcat.types import Float, Tensor

MAGIC, VERSION = 0x67677371, 3
GGML_TYPES = {"float32": (0, torch.float32), "float16": (1, torch.float16), "bfloat16": (30, torch.bfloat16)}
# whether GGUF files of the model pair neighbouring channels in a rotation, where transformers pairs the two halves
INTERLEAVED = {"llama": True, "qwen2": False, "qwen3": False}


def write_llama_cpp(
    cache: CompactCache,
    model: PreTrainedModel,
    path: str | Path,
    *,
    positions: str = "rerotated",
    drop_log_bias: bool = False,
    dtype: str = "float16",
    flash_attention: bool = True,
    num_streams: int = 1,
    placeholder: int = 0,
) -> None:
    """Writes a compact cache of one example as a sequence state that llama.cpp loads.

    Re-rotated, the cells stand at positions 0..t-1 and the next token at t, as after an ordinary prompt of t tokens. At
    their original positions they stand at T-t..T-1, and the next token at T; the positions of the cells only say which
    tokens see them, and every later token sees all.

    Args:
        cache: of one example, equally many slots in all heads and layers, and no log-bias.
        model: the model it was made with; llama.cpp runs the GGUF file that was converted from it.
        path: file to write; its folder must exist.
        positions: "rerotated" or "original".
        drop_log_bias: as in ``plain_prefix``.
        dtype: of llama.cpp's cache: "float16" (its default), "float32" or "bfloat16" (type_k, type_v; --cache-type-k).
        flash_attention: whether llama.cpp runs with flash attention, which decides how it lays out values.
        num_streams: 1, or the number of sequences (n_seq_max, --parallel) where its cache is not unified.
        placeholder: token id that the file gives for every cell; programs that compare prompts with what is cached
            expect it t times before the text that goes on.

    Raises:
        InputError: as ``plain_prefix``; more than one example, layers of unequal slots, a type of model or dtype that
            is not supported, or keys too large for the dtype.
    """
    kind = model.config.get_text_config(decoder=True).model_type
    if kind not in INTERLEAVED:
        raise InputError(f"no layout of llama.cpp's cache is known for {kind} models; for: {', '.join(INTERLEAVED)}")
    if dtype not in GGML_TYPES:
        raise InputError(f"dtype must be one of {', '.join(GGML_TYPES)}, not {dtype!r}")
    if cache.batch_size != 1:
        raise InputError(f"llama.cpp takes one sequence a file, not {cache.batch_size} examples: select one")
    check_plain(cache, drop_log_bias=drop_log_bias)
    if not cache.is_uniform:
        counts = [layer.num_slots for layer in cache.layers]
        raise InputError(
            f"layers of {min(counts)} to {max(counts)} slots: llama.cpp holds equally many cells in every layer; "
            "compress with budgets=equal"
        )
    if num_streams < 1:
        raise InputError(f"num_streams must be at least 1, not {num_streams}")
    plain = plain_prefix(cache, model, positions=positions, drop_log_bias=drop_log_bias)
    slots, first = plain.num_slots, plain.num_tokens - plain.num_slots
    prompt = struct.pack(f"<III{slots}i", MAGIC, VERSION, slots, *[placeholder] * slots)
    cells = b"".join(struct.pack("<iIi", first + i, 1, 0) for i in range(slots))
    head = struct.pack("<II", num_streams, slots) + cells + struct.pack("<II", not flash_attention, len(plain.layers))
    keys = [_keys(layer.keys[0], interleaved=INTERLEAVED[kind]) for layer in plain.layers]
    values = [layer.values[0].transpose(0, 1).flatten(1) for layer in plain.layers]
    parts = [prompt, head, *_rows(keys, dtype), *(_rows if flash_attention else _columns)(values, dtype)]
    write_bytes(Path(path), *parts, bytes(4 * (num_streams - 1)))


def load_llama_cpp(context: Any, path: str | Path, sequence: int = 0) -> int:
    """Loads a file of ``write_llama_cpp`` into a running llama.cpp through llama-cpp-python; returns the next position.

    Args:
        context: ``llama_context_p``; of a ``llama_cpp.Llama`` it is ``llm.ctx``.
        path: the file.
        sequence: id of the sequence that starts with the cache.

    Raises:
        InputError: no llama-cpp-python, one with another version of the format, no such file, or a file that
            llama.cpp refuses (it says why in its log).
    """
    try:
        api: Any = importlib.import_module("llama_cpp")
    except ImportError:
        raise InputError("llama-cpp-python is not installed: pip install llama-cpp-python") from None
    if api.LLAMA_STATE_SEQ_VERSION != VERSION:
        raise InputError(f"llama.cpp has sequence states of version {api.LLAMA_STATE_SEQ_VERSION}, kvcat of {VERSION}")
    if not Path(path).is_file():
        raise InputError(f"no sequence state {path}")
    room, count = int(api.llama_n_ctx(context)), ctypes.c_size_t(0)
    tokens = (api.llama_token * room)()
    if not api.llama_state_seq_load_file(context, str(path).encode(), sequence, tokens, room, ctypes.byref(count)):
        raise InputError(f"llama.cpp refuses {path}: another model, cache type, flash attention or too little room")
    return int(api.llama_memory_seq_pos_max(api.llama_get_memory(context), sequence)) + 1


def _keys(keys: Float[Tensor, "kv_heads slots head_dim"], *, interleaved: bool) -> Float[Tensor, "slots channels"]:
    if interleaved:
        keys = keys.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return keys.transpose(0, 1).flatten(1)


def _rows(layers: list[Float[Tensor, "slots channels"]], dtype: str) -> Iterator[bytes]:
    """Per layer: type, bytes of a row, and one row per cell."""
    number, kind = GGML_TYPES[dtype]
    for states in layers:
        yield struct.pack("<iQ", number, states.shape[1] * kind.itemsize) + _raw(states, kind)


def _columns(layers: list[Float[Tensor, "slots channels"]], dtype: str) -> Iterator[bytes]:
    """Per layer: type, bytes of a number, number of channels, and one row per channel."""
    number, kind = GGML_TYPES[dtype]
    for states in layers:
        yield struct.pack("<iII", number, kind.itemsize, states.shape[1]) + _raw(states.mT, kind)


def _raw(states: Tensor, dtype: torch.dtype) -> bytes:
    stored = states.detach().cpu().to(dtype).contiguous()
    if not stored.isfinite().all():
        raise InputError(f"the cache holds numbers up to {states.abs().max():.3g}, too large for {dtype}")
    return stored.flatten().view(torch.uint8).numpy().tobytes()
