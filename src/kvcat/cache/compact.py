"""The compact cache: few slots that stand for a long prefix."""

import importlib
import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedModel

from kvcat.cache import storage
from kvcat.cache.fingerprint import fingerprint
from kvcat.cache.layers import PrefixLayer, bias_channels
from kvcat.cache.windows import layer_windows
from kvcat.errors import InputError
from kvcat.types import Float, Int, Tensor


@dataclass(frozen=True)
class CompactLayer:
    """Keys and values of one layer's slots, and what is added to the scores of each slot.

    Args:
        keys: keys after rotation at their original positions.
        values: values.
        log_bias: nats added to the scaled score of each slot; None adds none.
    """

    keys: Float[Tensor, "batch kv_heads slots head_dim"]
    values: Float[Tensor, "batch kv_heads slots value_dim"]
    log_bias: Float[Tensor, "batch kv_heads slots"] | None = None

    def tensors(self) -> dict[str, Tensor]:
        """The tensors there are, by field name."""
        fields = {"keys": self.keys, "values": self.values, "log_bias": self.log_bias}
        return {name: tensor for name, tensor in fields.items() if tensor is not None}


@dataclass(frozen=True)
class CompactCache:
    """A prefix of ``num_tokens`` tokens held in ``num_slots`` KV slots per layer and head.

    Decoding never changes it: every conversion to a transformers cache is fresh, so that one compact cache answers any
    number of questions.

    Args:
        layers: one per layer of the model, equal batch and number of slots.
        num_tokens: prefix length, which is the position of the next token.
        fingerprint: identifies the weights of the model it belongs to.
        metadata: how it was made (method, keep ratio, ...), as text.
    """

    layers: list[CompactLayer]
    num_tokens: int
    fingerprint: str
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def num_slots(self) -> int:
        """KV slots per layer and head."""
        return self.layers[0].keys.shape[-2]

    @property
    def batch_size(self) -> int:
        """Number of examples."""
        return self.layers[0].keys.shape[0]

    @property
    def nbytes(self) -> int:
        """Memory of all tensors, bytes."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.tensors().values())

    @property
    def has_log_bias(self) -> bool:
        """Whether any layer has a log-bias."""
        return any(layer.log_bias is not None for layer in self.layers)

    def select(self, rows: Int[Tensor, " rows"] | list[int] | slice) -> "CompactCache":
        """The cache of the given examples.

        Args:
            rows: indices of examples, or a slice of them.
        """
        layers = [CompactLayer(**{n: t[rows] for n, t in layer.tensors().items()}) for layer in self.layers]
        return replace(self, layers=layers)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "CompactCache":
        """The cache on another device, its keys and values in another floating dtype (the log-bias keeps its own).

        Args:
            device: target device; None keeps it.
            dtype: target dtype; None keeps it.
        """
        layers = [
            CompactLayer(
                layer.keys.to(device=device, dtype=dtype),
                layer.values.to(device=device, dtype=dtype),
                None if layer.log_bias is None else layer.log_bias.to(device=device),
            )
            for layer in self.layers
        ]
        return replace(self, layers=layers)

    def save(self, path: str | Path) -> None:
        """Writes a safetensors file with a checksum; the path holds the old file or the whole new one.

        Args:
            path: file to write; its folder must exist.

        Raises:
            InputError: no such folder, no permission, or the disk is full.
        """
        tensors = {f"layers.{i}.{n}": t for i, layer in enumerate(self.layers) for n, t in layer.tensors().items()}
        header = {
            "num_layers": str(len(self.layers)),
            "num_tokens": str(self.num_tokens),
            "fingerprint": self.fingerprint,
            "metadata": json.dumps(self.metadata, sort_keys=True),
        }
        storage.write(Path(path), tensors, header)

    @classmethod
    def load(cls, path: str | Path, model: nn.Module | None = None) -> "CompactCache":
        """The cache that ``save`` wrote, on the model's device if a model is given.

        Args:
            path: file to read.
            model: the model it must belong to; None skips the check.

        Raises:
            InputError: missing, truncated, corrupt, not one of ours, or of another model.
        """
        tensors, header = storage.read(Path(path))
        layers = []
        for index in range(int(header["num_layers"])):
            prefix = f"layers.{index}."
            layers.append(
                CompactLayer(**{n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})
            )
        cache = cls(layers, int(header["num_tokens"]), header["fingerprint"], json.loads(header["metadata"]))
        if model is None:
            return cache
        cache.check_model(model, str(path))
        return cache.to(next(model.parameters()).device)

    def check_model(self, model: nn.Module, name: str = "the compact cache") -> None:
        """Refuses a model that the cache was not made with.

        Raises:
            InputError: the model's weights have another fingerprint.
        """
        found = fingerprint(model)
        if found != self.fingerprint:
            raise InputError(
                f"{name} belongs to another model: its fingerprint is {self.fingerprint[:12]}, the model's {found[:12]}"
            )

    def inputs(
        self,
        model: PreTrainedModel,
        input_ids: Int[Tensor, "batch new"],
        attention_mask: Int[Tensor, "batch new"] | None = None,
    ) -> dict[str, Any]:
        """Keyword arguments with which ``model.generate`` or ``model`` goes on from the prefix.

        ``input_ids``, a fresh ``past_key_values``, and an ``attention_mask`` over ``num_tokens`` and the new tokens.
        With a log-bias the model is switched to kvcat's attention function.

        Args:
            model: the model the cache was made with.
            input_ids: tokens after the prefix; one cached example serves any number of rows.
            attention_mask: 1 for tokens, 0 for padding on the left; None: no padding.

        Raises:
            InputError: another model, no tokens, or a batch that does not fit.
        """
        self.check_model(model)
        batch, new = input_ids.shape
        if new == 0:
            raise InputError("input_ids hold no token: there is nothing to go on from")
        if self.batch_size not in (1, batch):
            raise InputError(f"a cache of {self.batch_size} examples cannot serve {batch} rows of input_ids")
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(input_ids)
        mask = torch.cat([mask.new_ones(batch, self.num_tokens), mask], dim=-1)
        return {"input_ids": input_ids, "past_key_values": self.to_transformers(model), "attention_mask": mask}

    def to_transformers(self, model: PreTrainedModel, *, read_only: bool = False) -> Cache:
        """A fresh transformers cache that starts with the compact prefix.

        With a log-bias the model is switched to kvcat's attention function, because stock attention knows no bias.

        Args:
            model: the model the cache was made with.
            read_only: forwards leave the cache as it is.
        """
        scales = attention_scales(model)
        windows = layer_windows(model.config)
        extended = self.has_log_bias
        if extended:
            # attention stands above this room in the import order
            importlib.import_module("kvcat.attention").enable(model)
        prefix_layers: list[Any] = []
        for index, layer in enumerate(self.layers):
            keys = layer.keys
            if extended:
                keys = bias_channels(keys, layer.log_bias, scales.get(index, 1 / math.sqrt(keys.shape[-1])))
            prefix_layers.append(
                PrefixLayer(
                    keys,
                    layer.values,
                    self.num_tokens,
                    extended=extended,
                    window=windows[index],
                    read_only=read_only,
                )
            )
        return Cache(layers=prefix_layers)


def attention_scales(model: nn.Module) -> dict[int, float]:
    """The factor on q.k of every attention layer that states one, by layer index."""
    stated = [(getattr(m, "layer_idx", None), getattr(m, "scaling", None)) for m in model.modules()]
    return {i: scale for i, scale in stated if isinstance(i, int) and isinstance(scale, float)}
