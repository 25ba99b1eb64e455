"""Quantised numbers: codes, and the scales and offsets that turn them into numbers.

A number x becomes the code round((x - offset) / scale) in 0 .. 2^bits - 1, and the code represents
offset + scale * code. Keys share scale and offset per channel, over groups of slots of one head;
values per slot, over groups of channels. Scales, offsets and log-bias are in half precision.

The first slots of every head have no codes. The first slot that is not protected is stored in half
precision: it is the attention sink of most models, its key is far from all others, and most of the
attention goes to it. Within a group it would make the steps of all other keys several times as
large. Protected slots come before it. They are exact: where there are any, all first slots are
stored in the type of the model.
"""

from itertools import pairwise
from numbers import Integral
from typing import Any, NamedTuple

import torch

from kvcat.errors import InputError
from kvcat.types import Float, Tensor, UInt8, at_least_float32

BITS = (8, 4)
"""Bits of a code that are supported."""
KEY_GROUP = 64
"""Most slots that share scales of their keys."""
VALUE_GROUP = 64
"""Most channels of a value that share a scale."""
HALF = torch.float16
"""Type of scales, offsets and log-bias, and of a first slot that is not protected."""


class BeyondHalfError(InputError):
    """Numbers do not fit in half precision, so that a cache cannot be quantised."""


def parse_bits(bits: int | str) -> int:
    """The number of bits of a cache's keys and values, from a number or its text.

    Raises:
        InputError: another number.
    """
    number: Any = int(bits) if isinstance(bits, str) and bits.isdecimal() else bits
    if isinstance(number, bool) or not isinstance(number, Integral) or int(number) not in BITS:
        raise InputError(f"bits must be 8 or 4, not {bits!r}")
    return int(number)


class Grid(NamedTuple):
    """Scales and offsets of the codes of a tensor, which broadcast to it; in half precision."""

    scales: Float[Tensor, "..."]
    offsets: Float[Tensor, "..."]

    @classmethod
    def over(cls, states: Float[Tensor, "..."], dim: int, bits: int) -> "Grid":
        """The narrowest grid of 2^bits steps from the least to the largest number along ``dim``.

        The offset is rounded down and the scale up, so that every number is within half a step of a
        code.

        Raises:
            BeyondHalfError: numbers beyond half precision.
        """
        # (..., 1 along dim, ...)
        low, high = states.aminmax(dim=dim, keepdim=True)
        # both are stored in 16 bits: the rounded ones have to reach both ends
        offsets = -_half_at_least(-low)
        scales = _half_at_least((high - offsets.to(high)) / (2**bits - 1))
        if not (offsets.isfinite().all() and scales.isfinite().all()):
            largest = states.abs().max()
            raise BeyondHalfError(
                f"keys or values up to {largest:.3g} do not fit the scales of 16 bits: "
                "leave out the bits"
            )
        return cls(scales, offsets)

    def codes(self, states: Float[Tensor, "..."], bits: int) -> UInt8[Tensor, "..."]:
        """The nearest code of every number, as uint8."""
        scales = self.scales.to(states)
        # a scale of 0: all numbers are equal, and code 0 is the offset itself
        steps = (states - self.offsets.to(states)) / torch.where(scales > 0, scales, 1.0)
        return steps.round_().clamp_(0, 2**bits - 1).to(torch.uint8)

    def numbers(self, codes: UInt8[Tensor, "..."], dtype: torch.dtype) -> Float[Tensor, "..."]:
        """The numbers that codes represent."""
        return self.offsets.to(dtype) + self.scales.to(dtype) * codes.to(dtype)


def pack(codes: UInt8[Tensor, "*rows channels"], bits: int) -> UInt8[Tensor, "*rows bytes"]:
    """The codes in bytes: with 4 bits, an even channel in the low half and the next in the high."""
    if bits == 8:
        return codes
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: UInt8[Tensor, "*rows bytes"], bits: int) -> UInt8[Tensor, "*rows channels"]:
    """The codes that ``pack`` packed."""
    if bits == 8:
        return packed
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def key_groups(num_packed: int, group: int = KEY_GROUP) -> list[int]:
    """Slots of each group of keys of a head with so many packed slots: about equally many."""
    num_groups = -(-num_packed // group)
    if num_groups == 0:
        return []
    ends = [number * num_packed // num_groups for number in range(num_groups + 1)]
    return [stop - start for start, stop in pairwise(ends)]


def value_group(value_dim: int) -> int:
    """Channels that share a scale of a value: a divisor of ``value_dim``, at most VALUE_GROUP."""
    return next(size for size in range(VALUE_GROUP, 0, -1) if value_dim % size == 0)


class PackedHead(NamedTuple):
    """The quantised slots of one head, not yet packed.

    Args:
        first_keys, first_values: of the first slots, in the type in which they are stored.
        key_codes, value_codes: of the other slots, one code a number, uint8.
        key_grid: (groups, head_dim).
        value_grid: (packed, groups of channels).
    """

    first_keys: Float[Tensor, "first head_dim"]
    first_values: Float[Tensor, "first value_dim"]
    key_codes: UInt8[Tensor, "packed head_dim"]
    key_grid: Grid
    value_codes: UInt8[Tensor, "packed value_dim"]
    value_grid: Grid

    @classmethod
    def nearest(
        cls,
        keys: Float[Tensor, "slots head_dim"],
        values: Float[Tensor, "slots value_dim"],
        bits: int,
        *,
        num_protected: int = 0,
    ) -> "PackedHead":
        """Every number rounded to the nearest code.

        Args:
            num_protected: of the slots, the first of which are protected.
        """
        exact, others = slice(num_protected), slice(num_protected, None)
        precise_keys = at_least_float32(keys[others])
        precise_values = at_least_float32(values[others])
        key_codes, key_grid = round_keys(precise_keys[1:], bits)
        value_codes, value_grid = round_values(precise_values[1:], bits)
        first_key = as_half(precise_keys[:1])
        first_value = as_half(precise_values[:1])
        packed = cls(first_key, first_value, key_codes, key_grid, value_codes, value_grid)
        return packed.after(keys[exact], values[exact]) if num_protected else packed

    def after(
        self,
        keys: Float[Tensor, "protected head_dim"],
        values: Float[Tensor, "protected value_dim"],
    ) -> "PackedHead":
        """The slots with protected ones before them."""
        return self._replace(
            first_keys=torch.cat([keys, self.first_keys.to(keys)]),
            first_values=torch.cat([values, self.first_values.to(values)]),
        )


def round_keys(
    keys: Float[Tensor, "packed head_dim"], bits: int
) -> tuple[UInt8[Tensor, "packed head_dim"], Grid]:
    """Codes of a head's keys, rounded to the nearest, and the grid of each group of slots."""
    sizes = key_groups(len(keys))
    if not sizes:
        empty = keys.new_empty(0, keys.shape[1], dtype=HALF)
        return keys.to(torch.uint8), Grid(empty, empty)
    grids = [Grid.over(rows, 0, bits) for rows in keys.split(sizes)]
    grid = Grid(*(torch.cat(tensors) for tensors in zip(*grids, strict=True)))
    group_of_slot = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    by_slot = Grid(*(tensor[group_of_slot.to(keys.device)] for tensor in grid))
    return by_slot.codes(keys, bits), grid


def round_values(
    values: Float[Tensor, "*slots value_dim"], bits: int
) -> tuple[UInt8[Tensor, "*slots value_dim"], Grid]:
    """Codes of values, rounded to the nearest, and the grid of every slot."""
    by_group = values.unflatten(-1, (-1, value_group(values.shape[-1])))
    if not values.numel():
        empty = values.new_empty(by_group.shape[:-1], dtype=HALF)
        return values.to(torch.uint8), Grid(empty, empty)
    grid = Grid.over(by_group, -1, bits)
    codes = grid.codes(by_group, bits).flatten(-2)
    return codes, Grid(*(tensor.squeeze(-1) for tensor in grid))


def check_dims(head_dim: int, value_dim: int, bits: int) -> None:
    """Reject heads whose codes do not fill whole bytes."""
    for name, dim in (("keys", head_dim), ("values", value_dim)):
        if dim * bits % 8:
            raise InputError(f"{name} of {dim} channels do not fill whole bytes in {bits} bits")


def most_bytes_per_slot(
    dims: tuple[int, int], bits: int, num_protected: int = 0, item_size: int = 0
) -> tuple[float, float]:
    """The most bytes of a slot with its share of the scales, and of a head besides its slots.

    Args:
        dims: channels of a key and of a value.
        bits: of keys and values.
        num_protected: of a head's slots; their bytes are no part of the first number.
        item_size: bytes of a number of protected slots.
    """
    head_dim, value_dim = dims
    codes = (head_dim + value_dim) * bits / 8
    value_grid = 4 * value_dim / value_group(value_dim)
    key_grid = 4 * head_dim
    log_bias = 2
    count = 4
    per_slot = codes + value_grid + key_grid / KEY_GROUP + log_bias
    # the first slots have no codes, and the last group of keys may hold few slots
    num_numbers = (num_protected + 1) * (head_dim + value_dim)
    first = num_numbers * (item_size if num_protected else HALF.itemsize)
    per_head = first + (num_protected + 1) * log_bias + key_grid + count
    return per_slot, float(per_head)


def as_half(states: Tensor) -> Tensor:
    """Keys or values in half precision.

    Raises:
        BeyondHalfError: numbers beyond it.
    """
    half = states.to(HALF)
    if not half.isfinite().all():
        raise BeyondHalfError(
            f"keys or values up to {states.abs().max():.3g} do not fit in 16 bits: "
            "leave out the bits"
        )
    return half


def _half_at_least(states: Tensor) -> Tensor:
    """The smallest numbers of half precision that are at least these."""
    half = states.to(HALF)
    is_smaller = half.to(states.dtype) < states
    return torch.where(is_smaller, torch.nextafter(half, half.new_tensor(torch.inf)), half)
