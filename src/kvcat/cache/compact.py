"""The compact cache: few slots that stand for a long prefix."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedModel

from kvcat.attention import enable
from kvcat.cache.files import CACHE, checked_layers, parse_metadata, read_tensors, write_tensors
from kvcat.cache.fingerprint import fingerprint_like
from kvcat.cache.layers import PrefixLayer, StaticPrefixLayer, layer_windows
from kvcat.cache.slots import CompactLayer, Layer, Rows
from kvcat.cache.token_ids import check_token_ids
from kvcat.errors import InputError
from kvcat.types import Int, Tensor


@dataclass(frozen=True)
class CompactCache:
    """A prefix of ``num_tokens`` tokens held in few KV slots per layer and head; decoding never changes it.

    Args:
        layers: one per layer of the model, of equal batch.
        num_tokens: prefix length, which is the position of the next token.
        fingerprint: identifies the weights of the model it belongs to.
        metadata: how it was made (method, keep ratio, ...), as text.
    """

    layers: Sequence[Layer]
    num_tokens: int
    fingerprint: str
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def num_slots(self) -> int:
        """KV slots per layer and head; where they differ, their average rounded up."""
        return math.ceil(round(self.mean_slots, 6))

    @property
    def max_slots(self) -> int:
        """KV slots of the fullest head."""
        return max(layer.num_slots for layer in self.layers)

    @property
    def mean_slots(self) -> float:
        """KV slots per layer and head, on average."""
        return torch.cat([layer.counts.flatten() for layer in self.layers]).double().mean().item()

    @property
    def is_uniform(self) -> bool:
        """Whether every head of every layer holds equally many slots."""
        return self.mean_slots == self.max_slots

    @property
    def batch_size(self) -> int:
        """Number of examples."""
        return self.layers[0].batch_size

    @property
    def nbytes(self) -> int:
        """Memory of keys, values and log-bias, bytes."""
        parts = (x for layer in self.layers for x in (layer.keys, layer.values, layer.log_bias))
        return sum(x.nbytes for x in parts if x is not None)

    @property
    def has_log_bias(self) -> bool:
        """Whether any layer has a log-bias."""
        return any(layer.log_bias is not None for layer in self.layers)

    def select(self, rows: Rows) -> "CompactCache":
        """The cache of the given examples."""
        return replace(self, layers=[layer.select(rows) for layer in self.layers])

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "CompactCache":
        """The cache on another device, its keys and values in another dtype; the log-bias keeps its own."""
        return replace(self, layers=[layer.to(device, dtype) for layer in self.layers])

    def save(self, path: str | Path) -> None:
        """Write a safetensors file with a checksum; the path holds the old file or the whole new one."""
        named = ((i, *pair) for i, layer in enumerate(self.layers) for pair in layer.tensors().items())
        tensors = {f"layers.{i}.{name}": tensor for i, name, tensor in named}
        entries = {
            "num_layers": str(len(self.layers)), "num_tokens": str(self.num_tokens), "fingerprint": self.fingerprint,
            "metadata": json.dumps(self.metadata, sort_keys=True),
        }  # fmt: skip
        checked_layers(entries, tensors, "the compact cache")
        write_tensors(Path(path), tensors, entries, CACHE)

    @classmethod
    def load(cls, path: str | Path, model: nn.Module | None = None) -> "CompactCache":
        """The cache that ``save`` wrote, on the device of the model that it must belong to; None skips the check.

        Raises:
            InputError: missing, truncated, corrupt, not one of ours, or of another model.
        """
        entries, tensors, _ = read_tensors(Path(path), CACHE)
        layers, metadata = checked_layers(entries, tensors, str(path)), parse_metadata(entries["metadata"], path)
        cache = cls(layers, int(entries["num_tokens"]), entries["fingerprint"], metadata)
        if model is None:
            return cache
        cache.check_model(model, str(path))
        return cache.to(next(model.parameters()).device)

    def check_model(self, model: nn.Module, name: str = "the compact cache") -> None:
        """Refuse a model with another fingerprint than the one that the cache was made with."""
        found = fingerprint_like(self.fingerprint, model)
        if found != self.fingerprint:
            both = f"its fingerprint is {self.fingerprint[:12]}, the model's {found[:12]}"
            raise InputError(f"{name} belongs to another model: {both}")

    def inputs(
        self,
        model: PreTrainedModel,
        input_ids: Int[Tensor, "batch new"],
        attention_mask: Int[Tensor, "batch new"] | None = None,
        *,
        static_tokens: int | None = None,
    ) -> dict[str, Any]:
        """Keyword arguments with which ``model.generate`` or ``model`` continues the prefix.

        Args:
            model: the model the cache was made with.
            input_ids: tokens after the prefix; one cached example serves any number of rows.
            attention_mask: 1 for tokens, 0 for padding on the left; None: no padding.
            static_tokens: room for so many tokens after the prefix, allocated at once, as a compiled model needs it;
                None: the cache grows as they come.

        Raises:
            InputError: another model, no tokens, a token without an embedding, or a batch that does not fit.
        """
        self.check_model(model)
        batch, new = input_ids.shape
        if new == 0:
            raise InputError("input_ids hold no token: there is nothing to go on from")
        if self.batch_size not in (1, batch):
            raise InputError(f"a cache of {self.batch_size} examples cannot serve {batch} rows of input_ids")
        check_token_ids(model, input_ids)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(input_ids)
        mask = torch.cat([mask.new_ones(batch, self.num_tokens), mask], dim=-1)
        past = self.to_transformers(model, static_tokens=static_tokens)
        return {"input_ids": input_ids, "past_key_values": past, "attention_mask": mask}

    def to_transformers(
        self, model: PreTrainedModel, *, read_only: bool = False, static_tokens: int | None = None
    ) -> Cache:
        """A fresh transformers cache that starts with the compact prefix.

        With a log-bias, or slots that differ in number, the model is switched to kvcat's attention, because stock
        attention knows neither. A ``read_only`` cache, which cannot be static, stays as it is in every forward.
        """
        if static_tokens is not None and (static_tokens < 1 or read_only):
            raise InputError(f"static_tokens is {static_tokens}: room for at least 1, in a cache that is not read-only")
        uniform, made = self.is_uniform, []
        if self.has_log_bias or not uniform:
            enable(model)
        for layer, window in zip(self.layers, layer_windows(model.config), strict=True):
            if not uniform and isinstance(layer, CompactLayer) and layer.log_bias is None:
                # masks are made for the first layer's slots; with a log-bias, attention takes this layer's part
                layer = replace(layer, log_bias=torch.zeros(layer.keys.shape[:3], device=layer.keys.device))
            if static_tokens is None:
                made.append(PrefixLayer(layer, self.num_tokens, window=window, read_only=read_only))
            else:
                made.append(StaticPrefixLayer(layer, self.num_tokens, capacity=static_tokens, window=window))
        return Cache(layers=made)
