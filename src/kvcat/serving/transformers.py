"""Compact caches for engines that know no log-bias: plain keys and values that pose as an ordinary prefix."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from kvcat.cache import CompactCache, CompactLayer
from kvcat.cache.files import write_tensors
from kvcat.cachefile import PREFIX
from kvcat.errors import InputError
from kvcat.models.rotation import KeyRotation

POSITIONS = ("rerotated", "original")


def plain_prefix(
    cache: CompactCache, model: PreTrainedModel, *, positions: str = "rerotated", drop_log_bias: bool = False
) -> CompactCache:
    """The cache as an engine without kvcat can hold it: equally many slots in all heads of a layer, and no log-bias.

    Re-rotated, the keys are turned by t - num_tokens positions, t the slots of the first layer, so that the slots look
    like the first t tokens of a text and the next token stands at t, which is the result's ``num_tokens``. At their
    original positions, the next token stands at num_tokens, and the engine must be told so.

    Args:
        cache: any compact cache whose layers hold equally many slots in every head.
        model: the model it was made with.
        positions: "rerotated" or "original".
        drop_log_bias: a log-bias is left out, which changes the answers; ``refit_without_log_bias`` first fits the
            values to that.

    Raises:
        InputError: another model, heads of unequal slots in a layer, a log-bias that may not be dropped, or keys that
            cannot be turned.
    """
    if positions not in POSITIONS:
        raise InputError(f"positions must be {' or '.join(map(repr, POSITIONS))}, not {positions!r}")
    check_plain(cache, drop_log_bias=drop_log_bias)
    cache.check_model(model)
    length = next_position(cache, positions)
    rotation = KeyRotation(model, length - cache.num_tokens) if positions == "rerotated" else None
    layers = []
    for index, layer in enumerate(cache.layers):
        assert isinstance(layer, CompactLayer)
        layers.append(CompactLayer(layer.keys if rotation is None else rotation(layer.keys, index), layer.values))
    told = {"positions": positions, "original_num_tokens": str(cache.num_tokens)}
    if cache.has_log_bias:
        told["log_bias"] = "dropped"
    return replace(cache, layers=layers, num_tokens=length, metadata={**cache.metadata, **told})


def next_position(cache: CompactCache, positions: str) -> int:
    """Where the next token stands behind an exported cache.

    Args:
        cache: any compact cache.
        positions: "rerotated" or "original".
    """
    return cache.layers[0].num_slots if positions == "rerotated" else cache.num_tokens


def check_plain(cache: CompactCache, *, drop_log_bias: bool = False) -> None:
    """Refuses a cache that no engine without kvcat can hold.

    Args:
        cache: any compact cache.
        drop_log_bias: whether a log-bias may be left out.

    Raises:
        InputError: heads of unequal slots in a layer, or a log-bias that may not be dropped.
    """
    if not all(isinstance(layer, CompactLayer) for layer in cache.layers):
        raise InputError(
            f"heads of up to {cache.num_slots} and on average {cache.mean_slots:.1f} slots: an engine holds equally "
            "many in all heads of a layer; compress with budgets=layers or budgets=equal"
        )
    if cache.has_log_bias and not drop_log_bias:
        raise InputError(
            "the cache has a log-bias, which engines do not know: compress with a method that has none, such as "
            "attention-matching,log_bias=false, refit the values without it, or drop it at a loss (--drop-log-bias)"
        )


def export_prefix(
    cache: CompactCache,
    model: PreTrainedModel,
    path: str | Path,
    *,
    positions: str = "rerotated",
    drop_log_bias: bool = False,
) -> None:
    """Writes ``plain_prefix`` as a safetensors file that any program reads.

    Tensors ``layers.0.keys``, ``layers.0.values``, ... of (batch, kv_heads, num_slots, head_dim), and these entries in
    the header's metadata, all text: format "kvcat-prefix-1", num_layers, num_slots (of the first layer), num_tokens
    (length of the text), next_position (of the first token behind the prefix), dtype, model_type, fingerprint, metadata
    (JSON), sha256.

    Args:
        cache: any compact cache whose layers hold equally many slots in every head.
        model: the model it was made with.
        path: file to write; its folder must exist.
        positions, drop_log_bias: as in ``plain_prefix``.

    Raises:
        InputError: as ``plain_prefix``, or the file cannot be written.
    """
    plain = plain_prefix(cache, model, positions=positions, drop_log_bias=drop_log_bias)
    tensors = {f"layers.{i}.{n}": t for i, layer in enumerate(plain.layers) for n, t in layer.tensors().items()}
    dtype: torch.dtype = plain.layers[0].keys.dtype
    header = {
        "num_layers": str(len(plain.layers)),
        "num_slots": str(plain.layers[0].num_slots),
        "num_tokens": str(cache.num_tokens),
        "next_position": str(plain.num_tokens),
        "dtype": str(dtype).removeprefix("torch."),
        "model_type": model.config.get_text_config(decoder=True).model_type,
        "fingerprint": cache.fingerprint,
        "metadata": json.dumps(plain.metadata, sort_keys=True),
    }
    write_tensors(Path(path), tensors, header, PREFIX)
