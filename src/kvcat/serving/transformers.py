"""Compact caches for engines that know no log-bias: plain keys and values that pose as an ordinary prefix.

For a widened checkpoint (``kvcat.serving.widen``) the keys themselves hold the log-bias, and heads and layers of
unequal slots are filled up with slots that no query sees; without one, the cache must have neither.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel

from kvcat.cache import CompactCache, CompactLayer, fingerprint
from kvcat.cache.files import PREFIX, parse_metadata, read_tensors, write_tensors
from kvcat.errors import InputError
from kvcat.models.rotation import KeyRotation
from kvcat.serving.widen import UNSEEN, widen_keys
from kvcat.types import Float, Tensor


def plain_prefix(
    cache: CompactCache, model: PreTrainedModel, *, drop_log_bias: bool = False, head_dim: int | None = None
) -> CompactCache:
    """The cache as an engine without kvcat can hold it: equally many slots in all heads of a layer, and no log-bias.

    The keys are turned by t - num_tokens positions, t the slots of the first layer, so that the slots look like the
    first t tokens of a text and the next token stands at t, which is the result's ``num_tokens``.

    Args:
        cache: of this model.
        drop_log_bias: leave the log-bias out, which changes the answers.
        head_dim: of the widened checkpoint that will read the prefix: its keys hold the log-bias, and all heads of all
            layers get as many slots as the fullest.

    Raises:
        InputError: another model; a head_dim that does not fit, or without one, heads of unequal slots in a layer or a
            log-bias that may not be dropped; keys that cannot be turned.
    """
    _check(cache, drop_log_bias, head_dim)
    cache.check_model(model)
    length = cache.layers[0].num_slots if head_dim is None else cache.max_slots
    rotation, layers = KeyRotation(model, length - cache.num_tokens), []
    for index, layer in enumerate(cache.layers):
        full = layer.padded()
        turned = CompactLayer(rotation(full.keys, index), full.values, None if head_dim is None else full.log_bias)
        layers.append(turned if head_dim is None else _wide(turned, cache.max_slots, head_dim))
    told = {"original_num_tokens": str(cache.num_tokens)}
    if cache.has_log_bias:
        told["log_bias"] = "dropped" if drop_log_bias else "in the keys"
    return replace(cache, layers=layers, num_tokens=length, metadata={**cache.metadata, **told})


def export_prefix(
    cache: CompactCache,
    model: PreTrainedModel,
    path: str | Path,
    *,
    drop_log_bias: bool = False,
    head_dim: int | None = None,
) -> CompactCache:
    """Write ``plain_prefix``, which is returned, as a safetensors file that any program reads.

    Tensors ``layers.0.keys``, ``layers.0.values``, ... of (batch, kv_heads, num_slots, head_dim), and these entries in
    the header's metadata, all text: format "kvcat-prefix-1", num_layers, num_slots (of the first layer), num_tokens
    (length of the text), next_position (of the first token behind the prefix), dtype, model_type, fingerprint, metadata
    (JSON), sha256. ``InputError`` as of ``plain_prefix``, or if the file cannot be written.
    """
    plain = plain_prefix(cache, model, drop_log_bias=drop_log_bias, head_dim=head_dim)
    tensors = {f"layers.{i}.{n}": t for i, layer in enumerate(plain.layers) for n, t in layer.tensors().items()}
    dtype: torch.dtype = plain.layers[0].keys.dtype
    header = {
        "num_layers": str(len(plain.layers)),
        "num_slots": str(plain.layers[0].num_slots),
        "num_tokens": str(cache.num_tokens),
        "next_position": str(plain.num_tokens),
        "dtype": str(dtype).removeprefix("torch."),
        "model_type": model.config.get_text_config(decoder=True).model_type,
        "fingerprint": fingerprint(model),
        "metadata": json.dumps(plain.metadata, sort_keys=True),
    }
    write_tensors(Path(path), tensors, header, PREFIX)
    return plain


class Prefix(NamedTuple):
    """A file of ``export_prefix`` that engines can take; its tensors are read when they are needed."""

    path: Path
    digest: str  # its checksum, which tells documents apart
    fingerprint: str  # of the model that the cache was made with
    chat: bool  # whether the document opens a user's turn in the chat template
    num_slots: int  # of every head, and the position of the next token
    shape: tuple[int, int, int]  # layers, KV heads, channels

    def load(self) -> list[tuple[Float[Tensor, "kv_heads slots head_dim"], Float[Tensor, "kv_heads slots head_dim"]]]:
        """Keys and values of every layer; ``InputError`` if the file is damaged, or another one by now."""
        _, tensors, digest = read_tensors(self.path, PREFIX)
        if digest != self.digest:
            raise InputError(f"{self.path.name} has changed since it was asked for")
        return [(tensors[f"layers.{i}.keys"][0], tensors[f"layers.{i}.values"][0]) for i in range(self.shape[0])]


def read_prefix(path: str | Path) -> Prefix:
    """The packed cache of one document in a file of ``export_prefix``, verified byte by byte.

    Raises:
        InputError: missing, damaged, not one of ours, of more than one example, or of layers that differ in slots.
    """
    path = Path(path)
    entries, tensors, digest = read_tensors(path, PREFIX)
    shapes = {tuple(tensor.shape) for tensor in tensors.values()}
    names = {f"layers.{i}.{part}" for i in range(len(tensors) // 2) for part in ("keys", "values")}
    if len(shapes) != 1 or names != set(tensors) or (shape := shapes.pop())[:-3] != (1,):
        raise InputError(f"{path} must hold one example, of equally many slots in every layer: pack with --head-dim")
    chat = parse_metadata(entries.get("metadata", "{}"), path).get("chat") == "yes"
    return Prefix(path, digest, entries.get("fingerprint", ""), chat, shape[2], (len(names) // 2, shape[1], shape[3]))


def _check(cache: CompactCache, drop_log_bias: bool, head_dim: int | None) -> None:
    own = cache.layers[0].keys.shape[-1]
    if head_dim is not None:
        if drop_log_bias:
            raise InputError("a cache for a widened checkpoint keeps its log-bias: --drop-log-bias or --head-dim")
        if head_dim <= own or head_dim % 2:
            raise InputError(f"head_dim must be even and larger than the {own} of the cache, not {head_dim}")
    elif not all(isinstance(layer, CompactLayer) for layer in cache.layers):
        raise InputError(
            f"heads of up to {cache.max_slots} and on average {cache.mean_slots:.1f} slots: an engine holds equally "
            "many in all heads of a layer; pack for a widened checkpoint (--head-dim), or compress with "
            "budgets=layers or budgets=equal"
        )
    elif cache.has_log_bias and not drop_log_bias:
        raise InputError(
            "the cache has a log-bias, which engines do not know: pack for a widened checkpoint (--head-dim), compress "
            "with attention-matching,log_bias=false, or drop it at a loss (--drop-log-bias)"
        )


def _wide(layer: CompactLayer, slots: int, head_dim: int) -> CompactLayer:
    """Wide keys that hold the log-bias, and as many slots as the fullest head of the cache, the added ones unseen."""
    keys, values, old = layer.keys, layer.values, layer.keys.shape[-1]
    bias = keys.new_zeros(keys.shape[:3]) if layer.log_bias is None else layer.log_bias.clamp_min(UNSEEN).to(keys)
    missing = slots - layer.num_slots
    wide = pad(widen_keys(keys, head_dim), (0, 0, 0, missing))
    wide[..., old // 2] = pad(bias, (0, missing), value=UNSEEN)
    return CompactLayer(wide, pad(values, (0, head_dim - values.shape[-1], 0, missing)))
