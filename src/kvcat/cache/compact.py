"""The compact cache: few slots that stand for a long prefix."""

import hashlib
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
from kvcat.cache.forward import PrefixCache, cache_argument, guard
from kvcat.cache.layers import PrefixLayer, StaticPrefixLayer, layer_windows
from kvcat.cache.rope import Factors, check_length, rope_border
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
        any_length: bool = False,
    ) -> dict[str, Any]:
        """Keyword arguments with which ``model.generate`` or ``model`` continues the prefix.

        They are for one call: the transformers cache in them grows. A second turn is either the new tokens alone with
        that cache and a mask for all, or the conversation after the document with new ``inputs``.

        Args:
            model: the model the cache was made with.
            input_ids: tokens after the prefix; one cached example serves any number of rows.
            attention_mask: 1 for tokens, 0 for padding on the left; None: no padding.
            static_tokens: room for so many tokens after the prefix, allocated at once, as a compiled model needs it;
                None: the cache grows as they come.
            any_length: hold the rotary factors of the cache where transformers would take others for a text of this
                length (LongRoPE), in place of a refusal.

        Raises:
            InputError: another model, no tokens, a token without an embedding, tokens that begin
                with the document, a batch that does not fit, or rotary factors of another length.
        """
        self.check_tokens(model, input_ids, any_length=any_length)
        if document_digest(input_ids[:, : self.num_tokens]) == self.metadata.get("document"):
            raise InputError(
                f"input_ids begin with the document, whose {self.num_tokens} tokens the cache holds: give what follows"
            )
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(input_ids)
        mask = torch.cat([mask.new_ones(len(input_ids), self.num_tokens), mask], dim=-1)
        past = self.to_transformers(model, static_tokens=static_tokens, any_length=any_length)
        inputs = {"input_ids": input_ids, **cache_argument(past), "attention_mask": mask}
        if getattr(model.generation_config, "use_cache", None) is False:  # as a model folder may say
            inputs["use_cache"] = True
        return inputs

    def check_tokens(
        self, model: PreTrainedModel, input_ids: Int[Tensor, "batch new"], *, any_length: bool = False
    ) -> None:
        """Refuse tokens that cannot follow the prefix.

        Args:
            model: the model the cache was made with.
            input_ids: tokens after the prefix.
            any_length: do not ask whether transformers would rotate the prefix of a text of this length with other
                factors.
        """
        self.check_model(model)
        batch, new = input_ids.shape
        if new == 0:
            raise InputError("input_ids hold no token: there is nothing to go on from")
        if self.batch_size not in (1, batch):
            raise InputError(f"a cache of {self.batch_size} examples cannot serve {batch} rows of input_ids")
        check_token_ids(model, input_ids)
        factors = self.rotary_factors(model)
        if factors is None or any_length:
            return
        total = self.num_tokens + new
        check_length(model.config, factors, total)
        border: Any = rope_border(model.config)
        if factors == "long" and total <= border and "room" not in self.metadata:
            raise InputError(
                f"{model.config.model_type}: the cache has the rotary factors for more than {border} tokens, and here "
                f"are {total}: trace the document without its suffix, or with room for what follows (room=)"
            )

    def longest_text(self, model: PreTrainedModel) -> int | None:
        """Tokens of prefix and of all that follows for which the rotary factors of the cache hold; None: any number."""
        return rope_border(model.config) if self.rotary_factors(model) == "short" else None

    def rotary_factors(self, model: PreTrainedModel) -> Factors | None:
        """The factors that the keys were rotated with; None where these do not depend on the length of the text.

        Raises:
            InputError: they depend on it, and the cache does not say which it has.
        """
        if rope_border(model.config) is None:
            return None
        for factors in ("short", "long"):
            if self.metadata.get("rope") == factors:
                return factors
        raise InputError(
            f"{model.config.model_type} has rotary factors that depend on the length, and the cache does not say which "
            "it has (an earlier version of kvcat made it): make it again"
        )

    def to_transformers(
        self,
        model: PreTrainedModel,
        *,
        read_only: bool = False,
        static_tokens: int | None = None,
        any_length: bool = False,
    ) -> Cache:
        """A fresh transformers cache that starts with the compact prefix.

        With a log-bias, or slots that differ in number, the model is switched to kvcat's attention, because stock
        attention knows neither. A ``read_only`` cache, which cannot be static, stays as it is in every forward.
        Every forward of the model behind it is checked first: tokens have to follow what the cache holds. Where rotary
        factors depend on the length of the text, a text that needs others is refused, but with ``any_length``.
        """
        if static_tokens is not None and (static_tokens < 1 or read_only):
            raise InputError(f"static_tokens is {static_tokens}: room for at least 1, in a cache that is not read-only")
        factors = self.rotary_factors(model)
        if static_tokens is not None and factors is not None:
            raise InputError(f"{model.config.model_type}: its rotary factors depend on the length: leave static_tokens")
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
        past = PrefixCache(made, factors, any_length=any_length)
        guard(model, past)
        return past


def document_digest(tokens: Int[Tensor, "batch prefix"]) -> str:
    """A hash of the tokens of one document or several, which says whether others are the same."""
    return hashlib.sha256(repr(tokens.tolist()).encode()).hexdigest()[:16]
