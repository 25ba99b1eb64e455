"""Quantised slots: one layer's packed codes with their scales, offsets and log-bias.

How numbers become codes is in ``kvcat.cache.codes``.
"""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch

from kvcat.cache.codes import (
    HALF,
    KEY_GROUP,
    BeyondHalfError,
    Grid,
    PackedHead,
    check_dims,
    key_groups,
    pack,
    unpack,
    value_group,
)
from kvcat.cache.heads import HeadGrid, HeadSlots
from kvcat.cache.slots import CompactLayer, Layer, RaggedLayer, Rows, Slots, in_dtype, spans
from kvcat.types import Float, Int, Tensor, UInt8

_ROWS = ("key_codes", "value_codes", "value_scales", "value_offsets")  # one row for a packed slot
_GROUPS = ("key_scales", "key_offsets")
_FIRST = ("first_keys", "first_values")
QUANTIZED_TENSORS = ("counts", "half_bias", *_FIRST, *_ROWS, *_GROUPS)
"""Names of a layer's tensors in a file."""


@dataclass(frozen=True)
class QuantizedLayer(Slots):
    """One layer's slots in packed codes; ``unpacked`` gives unquantised keys and values.

    The packed slots of one head, all but its first ones, follow those of the previous head, example
    by example. So do the first slots, of which all heads have equally many, and the groups of keys.

    Args:
        counts: slots of every head, the first ones included; on the CPU.
        first_keys, first_values: of the first slots: the protected ones and one more, in the type
            of the model that made them; float16 if none is protected.
        key_codes, value_codes: packed codes of the other slots.
        key_scales, key_offsets: of every group of at most ``key_group`` slots, float16.
        value_scales, value_offsets: of every packed slot and group of channels, float16.
        bits: of keys and values.
        key_group: most slots of a group of keys.
        dtype: of the unpacked keys and values.
        half_bias: log-bias of all slots, the first ones included, float16; None: none.
    """

    counts: Int[Tensor, "batch kv_heads"]  # type: ignore[override]
    first_keys: Float[Tensor, "first_slots head_dim"]
    first_values: Float[Tensor, "first_slots value_dim"]
    key_codes: UInt8[Tensor, "packed key_bytes"]
    key_scales: Float[Tensor, "groups head_dim"]
    key_offsets: Float[Tensor, "groups head_dim"]
    value_codes: UInt8[Tensor, "packed value_bytes"]
    value_scales: Float[Tensor, "packed value_groups"]
    value_offsets: Float[Tensor, "packed value_groups"]
    bits: int
    key_group: int
    dtype: torch.dtype
    half_bias: Float[Tensor, " total_slots"] | None = None

    @staticmethod
    def of_heads(heads: HeadGrid, bits: int, dtype: torch.dtype) -> "QuantizedLayer":
        """A layer from its heads, which have codes, per example and KV head.

        Raises:
            BeyondHalfError: a log-bias beyond half precision.
        """
        flat = [head for of_example in heads for head in of_example]
        codes = [head.codes for head in flat if isinstance(head.codes, PackedHead)]
        biases = [head.log_bias for head in flat if head.log_bias is not None]
        counts = [[len(head) for head in of_example] for of_example in heads]
        return QuantizedLayer(
            counts=torch.tensor(counts, dtype=torch.int32),
            first_keys=torch.cat([head.first_keys for head in codes]),
            first_values=torch.cat([head.first_values for head in codes]),
            key_codes=pack(torch.cat([head.key_codes for head in codes]), bits),
            key_scales=torch.cat([head.key_grid.scales for head in codes]),
            key_offsets=torch.cat([head.key_grid.offsets for head in codes]),
            value_codes=pack(torch.cat([head.value_codes for head in codes]), bits),
            value_scales=torch.cat([head.value_grid.scales for head in codes]),
            value_offsets=torch.cat([head.value_grid.offsets for head in codes]),
            half_bias=_bias_as_half(torch.cat(biases)) if biases else None,
            bits=bits,
            key_group=KEY_GROUP,
            dtype=dtype,
        )

    @property
    def keys(self) -> Tensor:
        """Unpacked keys, as in ``unpacked``."""
        return self.unpacked().keys

    @property
    def values(self) -> Tensor:
        """Unpacked values, as in ``unpacked``."""
        return self.unpacked().values

    @property
    def log_bias(self) -> Tensor | None:
        """The log-bias, as in ``unpacked``."""
        return self.unpacked().log_bias

    @property
    def positions(self) -> None:
        """Packed slots do not record their positions."""
        return

    @property
    def has_log_bias(self) -> bool:
        """Whether the slots have a log-bias."""
        return self.half_bias is not None

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self.key_codes.device

    @property
    def dims(self) -> tuple[int, int]:
        """Channels of a key and of a value."""
        return self.first_keys.shape[1], self.first_values.shape[1]

    @property
    def num_first(self) -> int:
        """The number of first slots of every head, which have no codes."""
        return len(self.first_keys) // self.counts.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors: codes, scales, offsets, first slots, log-bias and counts."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are not None, by their names in a file."""
        tensors = {}
        for field in fields(self):
            tensor = getattr(self, field.name)
            if isinstance(tensor, Tensor):
                tensors[field.name] = tensor
        return tensors

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "QuantizedLayer":
        """On another device, unpacked in another dtype; the codes do not change.

        Raises:
            InputError: a number of the first slots that this dtype cannot hold.
        """
        for name in _FIRST:
            in_dtype(name.replace("_", " "), getattr(self, name), dtype)
        moved: dict[str, Any] = {}
        for name, tensor in self.tensors().items():
            moved[name] = tensor if name == "counts" else tensor.to(device=device)
        return replace(self, **moved, dtype=dtype or self.dtype)

    @cached_property
    def _places(self) -> list[tuple[slice, slice, slice, slice]]:
        """For every head its first slots, packed slots, groups of keys, and all its slots."""
        counts = self.counts.flatten().tolist()
        num_packed = [count - self.num_first for count in counts]
        num_groups = [len(key_groups(number, self.key_group)) for number in num_packed]
        first = spans([self.num_first] * len(counts))
        return list(zip(first, spans(num_packed), spans(num_groups), spans(counts), strict=True))

    def head(self, example: int, head: int) -> HeadSlots:
        """The unpacked slots of one KV head of one example, without positions."""
        index = example * self.counts.shape[1] + head
        first, packed, groups, slots = self._places[index]
        num_packed = packed.stop - packed.start
        sizes = torch.tensor(key_groups(num_packed, self.key_group), dtype=torch.long)
        group_of_slot = torch.arange(len(sizes)).repeat_interleave(sizes).to(self.device)
        key_grid = Grid(self.key_scales[groups], self.key_offsets[groups])
        grid_of_slot = Grid(*(tensor[group_of_slot] for tensor in key_grid))
        # offset + scale * code in bfloat16 would round twice
        precise = torch.promote_types(self.dtype, torch.float32)
        keys = grid_of_slot.numbers(unpack(self.key_codes[packed], self.bits), precise)

        value_codes = unpack(self.value_codes[packed], self.bits)
        by_group = value_codes.unflatten(-1, (self.value_scales.shape[1], -1))
        value_grid = Grid(
            self.value_scales[packed].unsqueeze(-1), self.value_offsets[packed].unsqueeze(-1)
        )
        values = value_grid.numbers(by_group, precise).flatten(-2)
        all_keys = torch.cat([self.first_keys[first].to(precise), keys])
        all_values = torch.cat([self.first_values[first].to(precise), values])
        bias = None if self.half_bias is None else self.half_bias[slots].to(precise)
        return HeadSlots(_within(all_keys, self.dtype), _within(all_values, self.dtype), bias)

    def unpacked(self) -> Layer:
        """The unquantised layer."""
        return CompactLayer.of_heads(self.heads())

    def padded(self) -> CompactLayer:
        """All heads unpacked, with as many slots as the fullest; added slots have log-bias -inf."""
        return self.unpacked().padded()

    def select(self, rows: Rows) -> "QuantizedLayer":
        """The given examples."""
        if isinstance(rows, Tensor):
            rows = rows.cpu()
        num_examples, num_heads = self.counts.shape
        chosen = torch.arange(num_examples)[rows].tolist()
        heads = [example * num_heads + head for example in chosen for head in range(num_heads)]
        places = [self._places[head] for head in heads]
        selected: dict[str, Any] = {}
        for kind, names in enumerate((_FIRST, _ROWS, _GROUPS)):
            for name in names:
                selected[name] = torch.cat([getattr(self, name)[place[kind]] for place in places])
        if self.half_bias is not None:
            selected["half_bias"] = torch.cat([self.half_bias[slots] for *_, slots in places])
        return replace(self, **selected, counts=self.counts[chosen])


def quantized_layer(
    layer: CompactLayer | RaggedLayer, bits: int, num_protected: int
) -> QuantizedLayer:
    """The quantised layer, every number rounded to the nearest code.

    Args:
        num_protected: of the slots of every head, the first of which are protected.

    Raises:
        InputError: channels that do not fill whole bytes.
        BeyondHalfError: numbers beyond half precision.
    """
    check_dims(layer.keys.shape[-1], layer.values.shape[-1], bits)
    heads = layer.heads()
    for row in heads:
        for number, head in enumerate(row):
            codes = PackedHead.nearest(head.keys, head.values, bits, num_protected=num_protected)
            row[number] = replace(head, codes=codes)
    return QuantizedLayer.of_heads(heads, bits, layer.keys.dtype)


def quantized_problem(
    tensors: dict[str, Tensor], bits: int, key_group: int, num_tokens: int
) -> str | None:
    """What is wrong with the tensors of a quantised layer; None if nothing is."""
    missing = set(QUANTIZED_TENSORS) - {"half_bias"} - set(tensors)
    if missing:
        return f"no {', '.join(sorted(missing))}"
    for name, tensor in tensors.items():
        wanted = torch.int32 if name == "counts" else torch.uint8 if "codes" in name else HALF
        if tensor.dtype != wanted and not (name in _FIRST and tensor.is_floating_point()):
            return f"{name} are {str(tensor.dtype).removeprefix('torch.')}"
        is_usable = tensor < torch.inf if name == "half_bias" else tensor.isfinite()
        if not is_usable.all():
            return f"{name} hold numbers that are not finite"
    counts = tensors["counts"]
    if counts.dim() != 2 or not counts.numel() or not counts.min() >= 1:
        return f"counts have shape {tuple(counts.shape)}, or a head has no slot"
    if counts.max() > num_tokens:
        return f"{int(counts.max())} slots for a prefix of {num_tokens} tokens"
    num_first = max(1, len(tensors["first_keys"]) // counts.numel())
    if counts.min() < num_first:
        return f"a head has {int(counts.min())} slots, and {num_first} first ones"
    for name, shape in _shapes(tensors, bits, key_group, num_first).items():
        if name in tensors and tuple(tensors[name].shape) != shape:
            return f"{name} have shape {tuple(tensors[name].shape)}, not {shape}"
    return None


def _shapes(
    tensors: dict[str, Tensor], bits: int, key_group: int, num_first: int
) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's tensors, from its counts and its first slots, ``num_first`` a head."""
    counts = tensors["counts"].flatten().tolist()
    of_first = num_first * len(counts)
    num_packed = sum(counts) - of_first
    num_groups = sum(len(key_groups(count - num_first, key_group)) for count in counts)
    head_dim = tensors["first_keys"].shape[-1]
    value_dim = tensors["first_values"].shape[-1]
    num_value_groups = value_dim // value_group(value_dim)
    return {
        "first_keys": (of_first, head_dim),
        "first_values": (of_first, value_dim),
        "key_codes": (num_packed, head_dim * bits // 8),
        "value_codes": (num_packed, value_dim * bits // 8),
        "key_scales": (num_groups, head_dim),
        "key_offsets": (num_groups, head_dim),
        "value_scales": (num_packed, num_value_groups),
        "value_offsets": (num_packed, num_value_groups),
        "half_bias": (sum(counts),),
    }


def _bias_as_half(log_bias: Float[Tensor, " total_slots"]) -> Float[Tensor, " total_slots"]:
    """A log-bias in half precision, where -inf stays: it hides a slot."""
    half = log_bias.to(HALF)
    if (half.isinf() & (log_bias > -torch.inf)).any():
        raise BeyondHalfError(
            f"a log-bias of up to {log_bias[log_bias > -torch.inf].abs().max():.3g} does not fit "
            "in 16 bits: leave out the bits"
        )
    return half


def _within(states: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers in a type; those just beyond its range become its largest."""
    largest = torch.finfo(dtype).max
    return states.clamp(-largest, largest).to(dtype)
