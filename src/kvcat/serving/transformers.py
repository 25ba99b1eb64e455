"""Compact caches for engines that know no log-bias: plain keys and values that pose as an ordinary prefix.

For a widened checkpoint (``kvcat.serving.widen``) the keys themselves hold the log-bias, and heads and layers of
unequal slots are filled up with slots that no query sees; without one, the cache must have neither.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import safetensors.torch
import torch
from safetensors import safe_open
from torch.nn.functional import pad
from transformers import PreTrainedModel

from kvcat.cache import CompactCache, CompactLayer
from kvcat.cache.files import write_tensors
from kvcat.cachefile import KINDS, PREFIX, parse_metadata, read_header
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
        cache: any compact cache; without ``head_dim``, of layers that hold equally many slots in every head.
        model: the model it was made with.
        drop_log_bias: a log-bias is left out, which changes the answers; ``refit_without_log_bias`` first fits the
            values to that.
        head_dim: of the widened checkpoint that will read the prefix: its keys hold the log-bias, and all heads of all
            layers get as many slots as the fullest.

    Raises:
        InputError: another model, a head_dim that is not larger than the cache's; without head_dim, heads of unequal
            slots in a layer, or a log-bias that may not be dropped; keys that cannot be turned.
    """
    _check(cache, drop_log_bias, head_dim)
    cache.check_model(model)
    length = cache.layers[0].num_slots if head_dim is None else cache.num_slots
    rotation, layers = KeyRotation(model, length - cache.num_tokens), []
    for index, layer in enumerate(cache.layers):
        full = layer.padded()
        bias = None if drop_log_bias and isinstance(layer, CompactLayer) else full.log_bias
        made = CompactLayer(rotation(full.keys, index), full.values, bias)
        layers.append(replace(made, log_bias=None) if head_dim is None else _wide(made, cache.num_slots, head_dim))
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
    (JSON), sha256.

    Args:
        path: file to write; its folder must exist.
        cache, model, drop_log_bias, head_dim: as in ``plain_prefix``.

    Raises:
        InputError: as ``plain_prefix``, or the file cannot be written.
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
        "fingerprint": cache.fingerprint,
        "metadata": json.dumps(plain.metadata, sort_keys=True),
    }
    write_tensors(Path(path), tensors, header, PREFIX)
    return plain


@dataclass(frozen=True)
class Prefix:
    """A file of ``export_prefix`` that engines can take; its tensors are read when they are needed.

    Args:
        path: the file.
        digest: its checksum, which tells documents apart.
        fingerprint: of the model that the cache was made with.
        chat: whether the document opens a user's turn in the tokenizer's chat template.
        num_slots: slots of every head, and the position of the next token.
        shape: layers, KV heads, channels.
    """

    path: Path
    digest: str
    fingerprint: str
    chat: bool
    num_slots: int
    shape: tuple[int, int, int]

    def load(self) -> list[tuple[Float[Tensor, "kv_heads slots head_dim"], Float[Tensor, "kv_heads slots head_dim"]]]:
        """Keys and values of every layer.

        Raises:
            InputError: the file is damaged, or another one by now.
        """
        if read_prefix(self.path) != self:
            raise InputError(f"{self.path.name} has changed since it was asked for")
        tensors = safetensors.torch.load_file(self.path)
        return [(tensors[f"layers.{i}.keys"][0], tensors[f"layers.{i}.values"][0]) for i in range(self.shape[0])]


def read_prefix(path: str | Path) -> Prefix:
    """A packed cache of one document, verified byte by byte.

    Args:
        path: file of ``export_prefix``.

    Raises:
        InputError: missing, damaged, not one of ours, of more than one example, or of layers that differ in slots.
    """
    path = Path(path)
    header = read_header(path)
    if header.kind != PREFIX:
        raise InputError(f"{path} is {KINDS[header.kind]}, not {KINDS[PREFIX]}: `kvcat pack` makes one")
    shapes = {entry.shape for entry in header.tensors.values()}
    if len(shapes) != 1 or next(iter(shapes))[0] != 1:
        raise InputError(f"{path} must hold one example, of equally many slots in every layer: pack with --head-dim")
    ((_, kv_heads, slots, head_dim),) = shapes
    with safe_open(path, "pt") as file:
        digest = file.metadata()["sha256"]
    chat = parse_metadata(header.entries["metadata"], path).get("chat") == "yes"
    shape = (len(header.tensors) // 2, kv_heads, head_dim)
    return Prefix(path, digest, header.entries["fingerprint"], chat, slots, shape)


def _check(cache: CompactCache, drop_log_bias: bool, head_dim: int | None) -> None:
    own = cache.layers[0].keys.shape[-1]
    if head_dim is not None:
        if head_dim <= own or head_dim % 2:
            raise InputError(f"head_dim must be even and larger than the {own} of the cache, not {head_dim}")
    elif not all(isinstance(layer, CompactLayer) for layer in cache.layers):
        raise InputError(
            f"heads of up to {cache.num_slots} and on average {cache.mean_slots:.1f} slots: an engine holds equally "
            "many in all heads of a layer; pack for a widened checkpoint (--head-dim), or compress with "
            "budgets=layers or budgets=equal"
        )
    elif cache.has_log_bias and not drop_log_bias:
        raise InputError(
            "the cache has a log-bias, which engines do not know: pack for a widened checkpoint (--head-dim), compress "
            "with attention-matching,log_bias=false, refit the values without it, or drop it at a loss "
            "(--drop-log-bias)"
        )


def _wide(layer: CompactLayer, slots: int, head_dim: int) -> CompactLayer:
    """Wide keys that hold the log-bias, and as many slots as the fullest head of the cache, the added ones unseen."""
    keys, values, old = layer.keys, layer.values, layer.keys.shape[-1]
    bias = keys.new_zeros(keys.shape[:3]) if layer.log_bias is None else layer.log_bias.clamp_min(UNSEEN).to(keys)
    missing = slots - layer.num_slots
    wide = pad(widen_keys(keys, head_dim), (0, 0, 0, missing))
    wide[..., old // 2] = pad(bias, (0, missing), value=UNSEEN)
    return CompactLayer(wide, pad(values, (0, head_dim - values.shape[-1], 0, missing)))
