"""The compact cache: a small number of slots in place of a long prefix."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedModel

from kvcat.attention import enable
from kvcat.cache.codes import parse_bits
from kvcat.cache.files import (
    CACHE,
    STATES,
    checked_layers,
    quantized_entries,
    read_tensors,
    write_tensors,
)
from kvcat.cache.fingerprint import fingerprint
from kvcat.cache.first_tokens import first_slots
from kvcat.cache.forward import PrefixCache, cache_argument, check_no_padding, guard
from kvcat.cache.heads import HeadGrid, HeadSlots
from kvcat.cache.layers import PrefixLayer, StaticPrefixLayer, layer_windows
from kvcat.cache.quantized import QuantizedLayer, quantized_layer
from kvcat.cache.ranges import num_positions, slot_positions
from kvcat.cache.record import CacheRecord
from kvcat.cache.recurrence import continue_states
from kvcat.cache.rope import Factors, check_length, rope_border
from kvcat.cache.slots import CompactLayer, Layer, Rows, chosen_examples, rounded_mean
from kvcat.cache.states import LayerState, RecurrentState, WindowState
from kvcat.cache.token_ids import check_batch_of_ids, check_token_ids
from kvcat.errors import InputError, check_kind, whole
from kvcat.types import Int, Tensor


@dataclass(frozen=True)
class CompactCache:
    """A prefix of ``num_tokens`` tokens, held in a small number of KV slots per layer and head.

    Decoding never changes it. Its size has three names, here and wherever slots are counted:
    ``num_slots``, the average over heads and layers, rounded up, is what a compressor was asked for
    (``num_slots=``); ``mean_slots`` is that average exactly; ``max_slots`` is the fullest head's.
    They are equal unless heads hold different numbers of slots.

    Args:
        layers: one per layer of the model that is compacted, of equal batch. These are all layers,
            except those in ``states``.
        num_tokens: prefix length, which is the position of the next token.
        fingerprint: identifies the weights of the model it belongs to.
        record: how it was made, and of which tokens.
        states: of the layers that are not compacted, by number of the layer: recurrent states, and
            sliding windows shorter than the text. They are not compressed.
    """

    layers: Sequence[Layer | QuantizedLayer]
    num_tokens: int
    fingerprint: str
    record: CacheRecord = field(default_factory=CacheRecord)
    states: Mapping[int, LayerState] = field(default_factory=dict)

    @property
    def metadata(self) -> dict[str, str]:
        """What people read about the cache, by name: its record and its size, as texts."""
        sizes = {
            "num_slots": str(self.num_slots),
            "mean_slots": f"{self.mean_slots:.6g}",
            "keep_ratio": f"{self.mean_slots / self.num_tokens:.6g}",
        }
        if self.bits is not None:
            sizes["bits"] = str(self.bits)
        return sizes | self.record.texts()

    @property
    def layer_numbers(self) -> list[int]:
        """The number in the model of each of ``layers``."""
        total = len(self.layers) + len(self.states)
        return [number for number in range(total) if number not in self.states]

    @property
    def num_slots(self) -> int:
        """KV slots per layer and head, on average, rounded up."""
        return rounded_mean([layer.counts for layer in self.layers])

    @property
    def max_slots(self) -> int:
        """KV slots of the fullest head, which is the length of a padded layer."""
        return max(layer.max_slots for layer in self.layers)

    @property
    def mean_slots(self) -> float:
        """KV slots per layer and head, on average, exact."""
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
        """Memory in bytes: keys, values and log-bias, or all tensors of a quantised cache, and
        the states that are not compressed.
        """
        of_slots = sum(layer.nbytes for layer in self.layers)
        return of_slots + sum(state.nbytes for state in self.states.values())

    @property
    def has_log_bias(self) -> bool:
        """Whether any layer has a log-bias."""
        return any(layer.has_log_bias for layer in self.layers)

    @property
    def bits(self) -> int | None:
        """Bits of keys and values in packed codes; None for an unquantised cache."""
        first = self.layers[0]
        return first.bits if isinstance(first, QuantizedLayer) else None

    @property
    def dtype(self) -> torch.dtype:
        """Type of the keys and values, unpacked."""
        first = self.layers[0]
        return first.dtype if isinstance(first, QuantizedLayer) else first.keys.dtype

    def quantize(self, bits: int | str) -> "CompactCache":
        """The quantised cache: packed codes, with scales in half precision.

        Every number is rounded to the nearest code; the first slot of each head that is not
        protected, and the log-bias, are rounded to half precision. Protected slots stay exact.
        Positions are not kept. In 4 bits ``AttentionMatching`` loses less when it knows the bits
        before it fits (option ``bits``).

        Args:
            bits: 8 or 4.

        Raises:
            InputError: other bits, a cache that is quantised already, protected slots that come
                after others, heads whose codes do not fill whole bytes, or numbers beyond half
                precision.
        """
        wanted = parse_bits(bits)
        if self.bits is not None:
            raise InputError(f"the cache is in {self.bits} bits already")
        if self.record.protected_later:
            raise InputError(
                "the cache has protected slots after others, of a later document or of a session's "
                "last tokens, which quantisation would round"
            )
        num_protected = num_positions(self.record.protected)
        ordinary = self.ordinary_layers()
        layers = [quantized_layer(layer, wanted, num_protected) for layer in ordinary]
        heads = [layer.heads() for layer in ordinary]
        slots = first_slots(heads, num_protected) or self.record.first_slots
        return replace(self, layers=layers, record=replace(self.record, first_slots=slots))

    def unpacked(self) -> "CompactCache":
        """The unquantised cache; itself if it is not quantised."""
        if self.bits is None:
            return self
        return replace(self, layers=self.ordinary_layers())

    def ordinary_layers(self) -> list[Layer]:
        """The unquantised layers."""
        return [
            layer.unpacked() if isinstance(layer, QuantizedLayer) else layer
            for layer in self.layers
        ]

    def heads_of_layers(self) -> list[HeadGrid]:
        """The heads of every layer, unquantised; they know the positions of their slots also where
        there is one for every token.
        """
        layers = [layer.heads() for layer in self.ordinary_layers()]
        if self.mean_slots != self.num_tokens:
            return layers
        positions = slot_positions(self.record.protected, self.num_tokens)
        for layer in layers:
            for row in layer:
                for number, head in enumerate(row):
                    if head.positions is None:
                        row[number] = replace(head, positions=positions.to(head.keys.device))
        return layers

    def followed_by(self, later: "CompactCache") -> "CompactCache":
        """The cache of the prefix and of tokens after it, unquantised.

        Args:
            later: slots of these tokens, whose keys are at their positions after the prefix, for as
                many examples. Its protected ranges count from the first of them.
        """
        layers = []
        for first, second in zip(self.heads_of_layers(), later.heads_of_layers(), strict=True):
            heads = [
                [
                    HeadSlots.joined([head, after.moved(self.num_tokens)])
                    for head, after in zip(*rows, strict=True)
                ]
                for rows in zip(first, second, strict=True)
            ]
            layers.append(CompactLayer.of_heads(heads))
        ranges = (*later.record.protected, *later.record.protected_later)
        moved = [(self.num_tokens + start, self.num_tokens + stop) for start, stop in ranges]
        record = replace(
            self.record.longer(self.num_tokens, later.record.first_ids),
            protected_later=(*self.record.protected_later, *moved),
            appended=self.record.appended + later.num_tokens,
        )
        num_tokens = self.num_tokens + later.num_tokens
        return replace(self, layers=layers, num_tokens=num_tokens, record=record)

    def select(self, rows: Rows) -> "CompactCache":
        """The cache of the given examples.

        Raises:
            InputError: no example, or one that the cache does not have.
        """
        chosen = chosen_examples(rows, self.batch_size)
        layers = [layer.select(chosen) for layer in self.layers]
        states = {number: state.select(chosen) for number, state in self.states.items()}
        record = self.record.of_examples(chosen)
        return replace(self, layers=layers, states=states, record=record)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "CompactCache":
        """The cache on another device, its keys and values in another dtype.

        The dtype of the log-bias does not change.

        Raises:
            InputError: a number that this dtype cannot hold.
        """
        states = {number: state.to(device, dtype) for number, state in self.states.items()}
        layers = [layer.to(device, dtype) for layer in self.layers]
        return replace(self, layers=layers, states=states)

    def entries(self) -> dict[str, str]:
        """What a file says about the slots, next to their tensors."""
        entries = {
            "num_layers": str(len(self.layers)),
            "num_tokens": str(self.num_tokens),
            "fingerprint": self.fingerprint,
            "record": self.record.to_json(),
        }
        first = self.layers[0]
        return entries | quantized_entries(first) if isinstance(first, QuantizedLayer) else entries

    def save(self, path: str | Path) -> None:
        """Write a safetensors file with a checksum.

        At any time the path holds the old file or the whole new one.
        """
        check_kind((str, PathLike), "a path", path=path)
        tensors = {}
        for number, layer in enumerate(self.layers):
            for name, tensor in layer.tensors().items():
                tensors[f"layers.{number}.{name}"] = tensor
        for number, state in self.states.items():
            for name, tensor in state.tensors.items():
                tensors[f"states.{number}.{name}"] = tensor
        entries = self.entries()
        if self.states:
            entries[STATES] = " ".join(str(number) for number in sorted(self.states))
        checked_layers(entries, tensors, "the compact cache")
        write_tensors(Path(path), tensors, entries, CACHE)

    @classmethod
    def load(cls, path: str | Path, model: nn.Module | None = None) -> "CompactCache":
        """The cache that ``save`` wrote.

        Args:
            model: the model that the cache must belong to. The cache moves to its device. None: no
                check.

        Raises:
            InputError: a file that is missing, truncated, corrupt, not from kvcat, or of another
                model.
        """
        check_kind((str, PathLike), "a path", path=path)
        cache, _ = read_cache(Path(path))
        if model is None:
            return cache
        cache.check_model(model, str(path))
        return cache.to(next(model.parameters()).device)

    def check_model(self, model: nn.Module, name: str = "the compact cache") -> None:
        """Raise ``InputError`` if the model's fingerprint is not the cache's."""
        model_fingerprint = fingerprint(model)
        if model_fingerprint != self.fingerprint:
            made_with = self.record.model or "unknown"
            config: Any = getattr(model, "config", None)
            used = getattr(config, "name_or_path", "") or type(model).__name__
            model_dtype = next(model.parameters()).dtype
            types = [str(each).removeprefix("torch.") for each in (self.dtype, model_dtype)]
            remedy = ""
            if types[0] != types[1]:
                remedy = f"; the cache is in {types[0]}, and this model in {types[1]}"
            raise InputError(
                f"{name} belongs to another model: it was made with {made_with} (fingerprint "
                f"{self.fingerprint[:12]}), and this is {used} ({model_fingerprint[:12]}){remedy}"
            )

    def check_document(self, tokens: Int[Tensor, "batch prefix"], name: str) -> None:
        """Raise ``InputError`` if tokens are not those of the documents in the cache, where it
        records these.

        Args:
            tokens: one row for each example, or several.
            name: of the cache, for the message.
        """
        are_same = self.record.same_documents(tokens)
        if are_same is not None and not all(are_same):
            raise InputError(
                f"{name} belongs to another text: row {are_same.index(False)} of the tokens differs"
            )

    def inputs(
        self,
        model: PreTrainedModel,
        input_ids: Int[Tensor, "batch new"],
        attention_mask: Int[Tensor, "batch new"] | None = None,
        *,
        static_tokens: int | None = None,
        any_length: bool = False,
        packed: bool = False,
    ) -> dict[str, Any]:
        """Keyword arguments with which ``model.generate`` or ``model`` continues the prefix.

        They are for one call, because the transformers cache in them grows. For a second turn,
        either pass the new tokens alone with that cache and a mask for all tokens, or pass the
        whole conversation after the document with new ``inputs``.

        Args:
            model: the model the cache was made with.
            input_ids: tokens after the prefix; one cached example serves any number of rows.
            attention_mask: 1 for tokens, 0 for padding on the left; None: no padding. With
                ``states`` there is none.
            static_tokens: allocate room for this many tokens after the prefix at once, as a
                compiled model needs it; None: the cache grows with each token.
            any_length: where transformers would use other rotary factors for a text of this length
                (LongRoPE), use the factors of the cache instead of raising an error.
            packed: a quantised cache stays packed in memory, and every attention unpacks one
                head at a time; else it is unpacked once, here.

        Raises:
            InputError: another model, no tokens, a token without an embedding, a mask of another
                shape, tokens that begin with the document, padding where layers have a state, a
                batch that does not fit, or a text that needs other rotary factors than the cache
                has.
        """
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            raise InputError(
                f"attention_mask has shape {tuple(attention_mask.shape)}, input_ids "
                f"{tuple(input_ids.shape)}: give a mask of the tokens after the prefix alone"
            )
        self.check_tokens(model, input_ids, any_length=any_length)
        self.check_is_no_document(input_ids, attention_mask)
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        elif self.states:
            check_no_padding(attention_mask)
        # as long as the text: transformers counts positions by the mask, and the layers cut it to
        # their slots (``PrefixLayer.get_mask_sizes``)
        new_mask = attention_mask.to(input_ids)
        prefix_mask = new_mask.new_ones(len(input_ids), self.num_tokens)
        mask = torch.cat([prefix_mask, new_mask], dim=-1)
        past = self.to_transformers(
            model, static_tokens=static_tokens, any_length=any_length, packed=packed
        )
        inputs = {"input_ids": input_ids, **cache_argument(past), "attention_mask": mask}
        # the generation settings of a model folder may switch caches off
        if getattr(model.generation_config, "use_cache", None) is False:
            inputs["use_cache"] = True
        return inputs

    def check_is_no_document(
        self,
        input_ids: Int[Tensor, "batch new"],
        attention_mask: Int[Tensor, "batch new"] | None = None,
    ) -> None:
        """Raise ``InputError`` for a row whose tokens, without padding, begin with the document."""
        if input_ids.shape[1] < self.num_tokens:
            return
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        is_padding = attention_mask == 0
        tokens_first = is_padding.to(torch.int8).argsort(dim=1, stable=True)
        tokens = input_ids.gather(1, tokens_first)[:, : self.num_tokens]
        is_long = ((~is_padding).sum(1) >= self.num_tokens).tolist()
        are_same = self.record.same_documents(tokens) or [False] * len(tokens)
        if any(same and long for same, long in zip(are_same, is_long, strict=True)):
            raise InputError(
                f"input_ids begin with the document, whose {self.num_tokens} tokens the cache "
                "holds: pass only the tokens after it"
            )

    def check_tokens(
        self,
        model: PreTrainedModel,
        input_ids: Int[Tensor, "batch new"],
        *,
        any_length: bool = False,
    ) -> None:
        """Raise ``InputError`` for tokens that cannot follow the prefix.

        Args:
            model: the model the cache was made with.
            input_ids: tokens after the prefix.
            any_length: accept a text of a length for which transformers would use other rotary
                factors than the cache has.
        """
        self.check_model(model)
        check_batch_of_ids(input_ids)
        batch, num_new = input_ids.shape
        if num_new == 0:
            raise InputError("input_ids hold no token: give at least one that follows the prefix")
        if self.batch_size not in (1, batch):
            raise InputError(
                f"a cache of {self.batch_size} examples cannot serve {batch} rows of input_ids"
            )
        check_token_ids(model, input_ids)
        factors = self.rotary_factors(model)
        if factors is None or any_length:
            return
        # queries are rotated with the cache's factors; transformers would choose them by the length
        total = self.num_tokens + num_new
        check_length(model.config, factors, total)
        border: Any = rope_border(model.config)
        if factors == "long" and total <= border and self.record.room is None:
            raise InputError(
                f"{model.config.model_type}: the cache has the rotary factors for more than "
                f"{border} tokens, and here are {total}: trace the document without its suffix, "
                "or with room for the text that follows (room=)"
            )

    def longest_text(self, model: PreTrainedModel) -> int | None:
        """The most tokens of prefix and following text that the cache allows, by its rotary factors
        and by the sliding windows of its compacted layers; None: no limit.
        """
        windows = layer_windows(model.config)
        limits = [windows[number] for number in self.layer_numbers]
        if self.rotary_factors(model) == "short":
            limits.append(rope_border(model.config))
        return min((limit for limit in limits if limit is not None), default=None)

    def rotary_factors(self, model: PreTrainedModel) -> Factors | None:
        """The factors that the keys were rotated with.

        None for a model whose factors do not depend on the length of the text.

        Raises:
            InputError: they depend on it, and the cache does not record which it has.
        """
        if rope_border(model.config) is None:
            return None
        if self.record.rope is not None:
            return self.record.rope
        raise InputError(
            f"{model.config.model_type} has rotary factors that depend on the length, and the "
            "cache does not say which it has: make it again"
        )

    def to_transformers(
        self,
        model: PreTrainedModel,
        *,
        read_only: bool = False,
        static_tokens: int | None = None,
        any_length: bool = False,
        packed: bool = False,
    ) -> Cache:
        """A fresh transformers cache that starts with the compact prefix.

        If the cache has a log-bias, or heads with different numbers of slots, the model gets
        kvcat's attention, because stock attention supports neither. Every forward of the model with
        the result is checked first: its tokens must follow those that the cache holds.

        Args:
            model: the model the cache was made with.
            read_only: no forward changes the result; not for a static cache.
            static_tokens: as in ``inputs``.
            any_length: as in ``inputs``.
            packed: as in ``inputs``.

        Raises:
            InputError: ``static_tokens`` below 1, for a read-only cache, or for a model whose
                rotary factors depend on the length; ``packed`` for an unquantised cache, or
                together with ``static_tokens``.
        """
        if packed and (self.bits is None or static_tokens is not None):
            reason = (
                "static_tokens need ordinary keys" if self.bits else "the cache is not in codes"
            )
            raise InputError(f"packed=True is not possible: {reason}")
        factors = self.rotary_factors(model)
        if static_tokens is not None:
            self._check_static(model, static_tokens, factors, read_only=read_only)
        # without these, the slots are ordinary keys and values to any attention
        if self.has_log_bias or not self.is_uniform or packed:
            enable(model)
        windows = layer_windows(model.config)
        # fingerprints are not compared here: a model with fewer layers would leave slots out
        if len(windows) != len(self.layers) + len(self.states):
            raise InputError(
                f"a cache of {len(self.layers) + len(self.states)} layers does not fit the "
                f"{len(windows)} of {type(model).__name__}"
            )
        prefix = iter(self.layers if packed else self._biased_layers())
        layers: list[Any] = []
        for number, window in enumerate(windows):
            if number in self.states:
                state = self.states[number]
                if window is None:
                    layers.append(RecurrentState(state, read_only=read_only))
                else:
                    layers.append(
                        WindowState(state, self.num_tokens, window=window, read_only=read_only)
                    )
            elif static_tokens is None:
                prefix_layer = PrefixLayer(
                    next(prefix), self.num_tokens, window=window, read_only=read_only
                )
                layers.append(prefix_layer)
            else:
                static_layer = StaticPrefixLayer(
                    next(prefix), self.num_tokens, capacity=static_tokens, window=window
                )
                layers.append(static_layer)
        past = PrefixCache(layers, self.num_tokens, factors, any_length=any_length)
        # for good: nothing says when the last forward with this cache has run
        continue_states(model)
        guard(model, past)
        return past

    def _check_static(
        self,
        model: PreTrainedModel,
        static_tokens: int,
        factors: Factors | None,
        *,
        read_only: bool,
    ) -> None:
        """Raise ``InputError`` if a static cache is impossible."""
        if self.states:
            raise InputError(
                f"{model.config.model_type}: layers with a sliding window or a recurrent state "
                "have no static cache: leave out static_tokens"
            )
        if whole("static_tokens", static_tokens) < 1 or read_only:
            raise InputError(
                f"static_tokens is {static_tokens}: room for at least 1, in a cache that is not "
                "read-only"
            )
        if factors is not None:
            raise InputError(
                f"{model.config.model_type}: its rotary factors depend on the length: leave out "
                "static_tokens"
            )

    def _biased_layers(self) -> list[Layer]:
        """The ordinary layers, each with a log-bias if the numbers of slots differ.

        transformers makes its mask for the slots of the first layer. Only in a layer with a
        log-bias does attention cut the mask to the slots of that layer.
        """
        ordinary = self.ordinary_layers()
        if self.is_uniform:
            return ordinary
        layers: list[Layer] = []
        for layer in ordinary:
            if isinstance(layer, CompactLayer) and layer.log_bias is None:
                zeros = torch.zeros(layer.keys.shape[:3], device=layer.keys.device)
                layer = replace(layer, log_bias=zeros)
            layers.append(layer)
        return layers


def read_cache(path: Path) -> tuple[CompactCache, str]:
    """The cache in a file of ``CompactCache.save``, and the file's checksum.

    Raises:
        InputError: as ``CompactCache.load``.
    """
    entries, tensors, digest = read_tensors(path, CACHE)
    layers, states = checked_layers(entries, tensors, str(path))
    record = CacheRecord.from_json(entries["record"], path)
    num_tokens = int(entries["num_tokens"])
    return CompactCache(layers, num_tokens, entries["fingerprint"], record, states), digest
