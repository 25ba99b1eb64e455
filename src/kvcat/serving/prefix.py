"""Compact caches as plain keys and values, which look like an ordinary prefix to an engine.

Engines do not support a log-bias. The keys for a widened checkpoint (``kvcat.serving.widen``) hold
the log-bias themselves, and heads and layers with fewer slots are filled up with slots that no
query sees. Without a widened checkpoint, the cache must have no log-bias and equally many slots in
all heads of a layer.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel

from kvcat.cache import (
    CacheRecord,
    CompactCache,
    CompactLayer,
    fingerprint,
)
from kvcat.cache.files import PREFIX, read_tensors, write_tensors
from kvcat.errors import InputError, whole
from kvcat.models import attention_sinks
from kvcat.models.rotation import KeyRotation
from kvcat.serving.widen import UNSEEN, widen_keys
from kvcat.types import Float, Tensor

LayerStates = tuple[
    Float[Tensor, "kv_heads slots head_dim"], Float[Tensor, "kv_heads slots head_dim"]
]
"""Keys and values of a layer."""


def plain_prefix(
    cache: CompactCache,
    model: PreTrainedModel,
    *,
    drop_log_bias: bool = False,
    head_dim: int | None = None,
) -> CompactCache:
    """The cache for engines without kvcat: equally many slots in all heads of a layer, no log-bias.

    With t the slots of the first layer, the keys are rotated by t - num_tokens positions. The slots
    then look like the first t tokens of a text. The next token has position t, which is the
    result's ``num_tokens``.

    Args:
        cache: a cache of this model.
        drop_log_bias: leave the log-bias out, which changes the answers.
        head_dim: head size of the widened checkpoint that will read the prefix. The prefix's keys
            then hold the log-bias, and all heads of all layers get as many slots as the fullest.

    Raises:
        InputError: another model; a head_dim that does not fit; keys that cannot be rotated; or,
            without a head_dim, heads of unequal slots in a layer, or a log-bias that may not be
            dropped.
    """
    if cache.states:
        raise InputError(
            f"{type(model).__name__}: engines have no place for the states of sliding windows and "
            "recurrent layers that are kept whole"
        )
    if any(sinks is not None for sinks in attention_sinks(model)):
        raise InputError(f"{type(model).__name__}: attention sinks are not supported in engines")
    cache = cache.unpacked()
    _check(cache, drop_log_bias, head_dim)
    cache.check_model(model)
    length = cache.layers[0].max_slots if head_dim is None else cache.max_slots
    rotation = KeyRotation(model, length - cache.num_tokens)
    layers = []
    for index, layer in enumerate(cache.layers):
        full = layer.padded()
        keys = rotation(full.keys, index)
        if head_dim is None:
            layers.append(CompactLayer(keys, full.values, None))
        else:
            rotated = CompactLayer(keys, full.values, full.log_bias)
            layers.append(wide_layer(rotated, cache.max_slots, head_dim))
    options = {**cache.record.options, "original_num_tokens": str(cache.num_tokens)}
    if cache.has_log_bias:
        options["log_bias"] = "dropped" if drop_log_bias else "in the keys"
    record = replace(cache.record, options=options)
    return replace(cache, layers=layers, num_tokens=length, record=record)


def export_prefix(
    cache: CompactCache,
    model: PreTrainedModel,
    path: str | Path,
    *,
    drop_log_bias: bool = False,
    head_dim: int | None = None,
) -> CompactCache:
    """``plain_prefix``, written as a safetensors file that any program can read.

    The file holds the tensors ``layers.0.keys``, ``layers.0.values``, ... of shape (batch,
    kv_heads, num_slots, head_dim). The header's metadata has these entries, all of them text:

    - format: "kvcat-prefix-2"
    - num_layers
    - num_slots: of the first layer
    - num_tokens: length of the text
    - next_position: of the first token after the prefix
    - dtype, model_type, fingerprint, record (JSON of ``CacheRecord``), sha256

    Raises:
        InputError: as ``plain_prefix``, or the file cannot be written.
    """
    plain = plain_prefix(cache, model, drop_log_bias=drop_log_bias, head_dim=head_dim)
    tensors: dict[str, Tensor] = {}
    for index, layer in enumerate(plain.layers):
        for name, tensor in layer.tensors().items():
            tensors[f"layers.{index}.{name}"] = tensor
    dtype: torch.dtype = plain.layers[0].keys.dtype
    header = {
        "num_layers": str(len(plain.layers)),
        "num_slots": str(plain.layers[0].max_slots),
        "num_tokens": str(cache.num_tokens),
        "next_position": str(plain.num_tokens),
        "dtype": str(dtype).removeprefix("torch."),
        "model_type": model.config.get_text_config(decoder=True).model_type,
        "fingerprint": fingerprint(model),
        "record": plain.record.to_json(),
    }
    write_tensors(Path(path), tensors, header, PREFIX)
    return plain


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """A file of ``export_prefix`` that engines can use; ``load`` reads its tensors.

    Args:
        path: of the file.
        digest: its checksum.
        fingerprint: of the model that the cache was made with.
        chat: whether the document opens a user's turn in the chat template.
        chat_template: digest of that template; empty: not known.
        num_slots: of every head, and the position of the next token.
        shape: layers, KV heads, channels.
    """

    path: Path
    digest: str
    fingerprint: str
    chat: bool
    chat_template: str = ""
    num_slots: int
    shape: tuple[int, int, int]

    def load(self) -> list[LayerStates]:
        """Keys and values of every layer.

        Raises:
            InputError: the file is damaged or has changed.
        """
        _, tensors, digest = read_tensors(self.path, PREFIX)
        if digest != self.digest:
            raise InputError(f"{self.path.name} has changed since it was requested")
        num_layers = self.shape[0]
        return [
            (tensors[f"layers.{index}.keys"][0], tensors[f"layers.{index}.values"][0])
            for index in range(num_layers)
        ]


def read_prefix(path: str | Path) -> Prefix:
    """The packed cache of one document in a file of ``export_prefix``, verified byte by byte.

    Raises:
        InputError: a file that is missing, damaged, or not of ``export_prefix``; more than one
            example, or layers that differ in slots.
    """
    path = Path(path)
    entries, tensors, digest = read_tensors(path, PREFIX)
    num_layers = len(tensors) // 2
    names = {f"layers.{i}.{kind}" for i in range(num_layers) for kind in ("keys", "values")}
    shapes = {tuple(tensor.shape) for tensor in tensors.values()}
    shape = list(next(iter(shapes), ()))  # batch, kv_heads, slots, head_dim
    if len(shapes) != 1 or names != set(tensors) or shape[:-3] != [1]:
        raise InputError(
            f"{path} must hold one example, of equally many slots in every layer: "
            "pack with --head-dim"
        )
    record = CacheRecord.from_json(entries.get("record", "{}"), path)
    _, num_kv_heads, num_slots, head_dim = shape
    return Prefix(
        path=path,
        digest=digest,
        fingerprint=entries.get("fingerprint", ""),
        chat=bool(record.chat),
        chat_template=record.chat_template,
        num_slots=num_slots,
        shape=(num_layers, num_kv_heads, head_dim),
    )


def _check(cache: CompactCache, drop_log_bias: bool, head_dim: int | None) -> None:
    """Reject an unquantised cache that no engine can read in the requested form."""
    narrow = cache.layers[0].keys.shape[-1]
    if head_dim is not None:
        if drop_log_bias:
            raise InputError(
                "a cache for a widened checkpoint keeps its log-bias: --drop-log-bias or --head-dim"
            )
        if whole("head_dim", head_dim) <= narrow or head_dim % 2:
            raise InputError(
                f"head_dim must be even and larger than the {narrow} of the cache, not {head_dim}"
            )
    elif not all(isinstance(layer, CompactLayer) for layer in cache.layers):
        raise InputError(
            f"heads of up to {cache.max_slots} and on average {cache.mean_slots:.1f} slots: an "
            "engine holds equally many in all heads of a layer; pack for a widened checkpoint "
            "(--head-dim), or compress with budgets=equal"
        )
    elif cache.has_log_bias and not drop_log_bias:
        raise InputError(
            "the cache has a log-bias, which engines do not support: pack for a widened checkpoint "
            "(--head-dim), compress with attention-matching,log_bias=false, or drop it at a loss "
            "(--drop-log-bias)"
        )


def wide_layer(layer: CompactLayer, num_slots: int, head_dim: int) -> CompactLayer:
    """The layer with wide keys that hold the log-bias, and ``num_slots`` slots in every head.

    No query sees the added slots.
    """
    keys = layer.keys  # (batch, kv_heads, slots, narrow)
    narrow = keys.shape[-1]
    missing = num_slots - layer.max_slots
    bias = keys.new_zeros(keys.shape[:3])
    if layer.log_bias is not None:
        bias.copy_(layer.log_bias.clamp_min(UNSEEN))
    wide_keys = pad(widen_keys(keys, head_dim), (0, 0, missing, 0))
    wide_keys[..., narrow // 2] = pad(bias, (missing, 0), value=UNSEEN)
    wide_values = pad(layer.values, (0, head_dim - layer.values.shape[-1], missing, 0))
    return CompactLayer(wide_keys, wide_values)
