"""Quantises keys and values one by one; later ones compensate for earlier errors (GPTQ).

A rounding error e costs e G e, where the matrix G says which errors matter together: for a key,
G = sum_i w_i^2 q_i q_i^T over the queries, so that e G e is the squared error of the key's scores;
for the values of a head, G = A^T A over the slots, with A the weighted attention, so that e G e is
the squared error of the outputs. After each rounding, the numbers that are not rounded yet move to
where the cost is least.

References: Frantar et al. 2023, arXiv:2210.17323.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from kvcat.cache import Grid, PackedHead, as_half, key_groups, round_values
from kvcat.types import Float, Int, Tensor, UInt8

# added to the diagonals, relative to their mean
_KEY_DAMPING = 0.1
_VALUE_DAMPING = 0.01
_BLOCK = 64


class RoundedKeys(NamedTuple):
    """Quantised keys of a batch of heads; the first key of each head is in half precision."""

    codes: UInt8[Tensor, "heads packed head_dim"]
    grid: Grid  # (heads, groups, head_dim)
    numbers: Float[Tensor, "heads slots head_dim"]


class RoundedValues(NamedTuple):
    """Quantised values of a batch of heads; the first value of each head is in half precision."""

    codes: UInt8[Tensor, "heads packed value_dim"]
    grid: Grid  # (heads, packed, groups of channels)
    numbers: Float[Tensor, "heads slots value_dim"]


class RoundedHeads(NamedTuple):
    """Quantised keys and values of a batch of heads."""

    keys: RoundedKeys
    values: RoundedValues

    def split(self) -> Iterator[PackedHead]:
        """Each head."""
        for head in range(len(self.keys.codes)):
            yield PackedHead(
                first_keys=as_half(self.keys.numbers[head, :1]),
                first_values=as_half(self.values.numbers[head, :1]),
                key_codes=self.keys.codes[head],
                key_grid=Grid(*(tensor[head] for tensor in self.keys.grid)),
                value_codes=self.values.codes[head],
                value_grid=Grid(*(tensor[head] for tensor in self.values.grid)),
            )


def round_keys_together(
    keys: Float[Tensor, "heads slots head_dim"],
    queries: Float[Tensor, "heads queries head_dim"],
    bits: int,
) -> RoundedKeys:
    """Quantised keys, so that the squared errors of their scores are small.

    Channel after channel is rounded, those with the largest queries first. Each has scale and
    offset for every group of slots.

    Args:
        keys: of the slots, the first one first.
        queries: times the weights of their errors.
        bits: of keys and values.
    """
    num_heads, num_slots, head_dim = keys.shape
    first = as_half(keys[:, :1]).to(keys)
    sizes = key_groups(num_slots - 1)
    gram = queries.mT @ queries
    order = _by_diagonal(gram)  # (heads, channels)
    feedback = _feedback(gram, order, _KEY_DAMPING)
    channels = order.unsqueeze(1).expand(-1, num_slots - 1, -1)
    remaining = keys[:, 1:].gather(2, channels)
    codes = torch.empty_like(remaining, dtype=torch.uint8)
    numbers = torch.empty_like(remaining)
    grids = []
    repeats = torch.tensor(sizes, device=keys.device)  # slots of each group
    for channel in range(head_dim if sizes else 0):
        column = remaining[..., channel]
        group_grids = [Grid.over(group, 1, bits) for group in column.split(sizes, dim=1)]
        grid = Grid(*(torch.cat(tensors, dim=1) for tensors in zip(*group_grids, strict=True)))
        by_slot = Grid(*(tensor.repeat_interleave(repeats, dim=1) for tensor in grid))
        codes[..., channel] = by_slot.codes(column, bits)
        numbers[..., channel] = by_slot.numbers(codes[..., channel], keys.dtype)
        error = column - numbers[..., channel]
        later = feedback[:, channel, channel + 1 :].unsqueeze(1)
        remaining[..., channel + 1 :] -= error.unsqueeze(-1) * later
        grids.append(grid)
    if grids:
        ordered = Grid(*(torch.stack(tensors, -1) for tensors in zip(*grids, strict=True)))
    else:
        empty = keys.new_empty(num_heads, 0, head_dim, dtype=torch.float16)
        ordered = Grid(empty, empty)
    grid = Grid(*(_unordered(tensor, order, 2) for tensor in ordered))
    all_numbers = torch.cat([first, _unordered(numbers, order, 2)], dim=1)
    return RoundedKeys(_unordered(codes, order, 2), grid, all_numbers)


def round_values_together(
    values: Float[Tensor, "heads slots value_dim"],
    attention: Float[Tensor, "heads queries slots"],
    bits: int,
) -> RoundedValues:
    """Quantised values, so that the squared errors of the attention outputs are small.

    Slot after slot is rounded, those with the most attention first.

    Args:
        values: of the slots, the first one first.
        attention: weights of the slots, times the weights of the queries' errors.
        bits: of keys and values.
    """
    first = as_half(values[:, :1]).to(values)
    packed_attention = attention[..., 1:]
    gram = packed_attention.mT @ packed_attention
    order = _by_diagonal(gram)  # (heads, packed)
    feedback = _feedback(gram, order, _VALUE_DAMPING)
    slots = order.unsqueeze(-1).expand(-1, -1, values.shape[-1])
    remaining = values[:, 1:].gather(1, slots)
    num_packed = remaining.shape[1]
    no_codes, no_grid = round_values(remaining[:, :0], bits)
    codes = [no_codes]
    grids = [no_grid]
    numbers = torch.empty_like(remaining)
    errors = torch.empty_like(remaining)
    for start in range(0, num_packed, _BLOCK):
        stop = min(start + _BLOCK, num_packed)
        for slot in range(start, stop):
            row = remaining[:, slot : slot + 1]
            row_codes, row_grid = round_values(row, bits)
            numbers[:, slot : slot + 1] = _numbers(row_codes, row_grid, values.dtype)
            errors[:, slot : slot + 1] = row - numbers[:, slot : slot + 1]
            in_block = feedback[:, slot, slot + 1 : stop].unsqueeze(-1)
            remaining[:, slot + 1 : stop] -= in_block * errors[:, slot : slot + 1]
            codes.append(row_codes)
            grids.append(row_grid)
        # the slots after the block at once: a product for each slot would read them every time
        behind = feedback[:, start:stop, stop:]
        remaining[:, stop:] -= behind.mT @ errors[:, start:stop]
    ordered = Grid(*(torch.cat(tensors, dim=1) for tensors in zip(*grids, strict=True)))
    return RoundedValues(
        codes=_unordered(torch.cat(codes, dim=1), order, 1),
        grid=Grid(*(_unordered(tensor, order, 1) for tensor in ordered)),
        numbers=torch.cat([first, _unordered(numbers, order, 1)], dim=1),
    )


def _numbers(codes: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor:
    """The values that codes represent."""
    by_group = codes.unflatten(-1, (grid.scales.shape[-1], -1))
    of_group = Grid(*(tensor.unsqueeze(-1) for tensor in grid))
    return of_group.numbers(by_group, dtype).flatten(-2)


def _by_diagonal(gram: Float[Tensor, "heads rows rows"]) -> Int[Tensor, "heads rows"]:
    """The rows in the order of their diagonal elements, the largest first."""
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    return diagonal.sort(dim=-1, descending=True, stable=True).indices


def _feedback(
    gram: Float[Tensor, "heads rows rows"], order: Int[Tensor, "heads rows"], damping: float
) -> Float[Tensor, "heads rows rows"]:
    """How far every later row moves down for an error of 1 of a row; rows are in ``order``.

    With G^-1 = U^T U and U upper triangular, this is U_jk / U_jj. ``damping`` times the mean of the
    diagonal is added to it.
    """
    size = gram.shape[-1]
    rows = order.unsqueeze(-1).expand(-1, -1, size)
    columns = order.unsqueeze(-2).expand(-1, size, -1)
    ordered = gram.gather(1, rows).gather(2, columns)
    mean = ordered.diagonal(dim1=-2, dim2=-1).mean(-1)
    shift = torch.where(mean > 0, damping * mean, 1.0)
    ordered.diagonal(dim1=-2, dim2=-1).add_(shift.unsqueeze(-1))
    # G = R R^T with R upper triangular, from the Cholesky factor of G in reverse order
    factor = torch.linalg.cholesky(ordered.flip(-1, -2)).flip(-1, -2)
    identity = torch.eye(size, dtype=gram.dtype, device=gram.device).expand_as(factor)
    inverse = torch.linalg.solve_triangular(factor, identity, upper=True)
    return inverse / inverse.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)


def _unordered(states: Tensor, order: Int[Tensor, "heads rows"], dim: int) -> Tensor:
    """Undo an order of channels (``dim`` 2) or of slots (``dim`` 1)."""
    places = order.unsqueeze(3 - dim).expand_as(states)
    return torch.empty_like(states).scatter_(dim, places, states)
