"""Ranges of token positions, such as those of protected tokens."""

from collections.abc import Sequence

import torch

from kvcat.types import Int, Tensor

Range = tuple[int, int]
"""The first position and the position after the last one."""


def range_text(ranges: Sequence[Range]) -> str:
    """Ranges as text, such as "0:24,40:48"."""
    return ",".join(f"{start}:{stop}" for start, stop in ranges)


def num_positions(ranges: Sequence[Range]) -> int:
    """The number of positions in ranges that do not overlap."""
    return sum(stop - start for start, stop in ranges)


def slot_positions(protected: Sequence[Range], num_tokens: int) -> Int[Tensor, " slots"]:
    """The position of each slot of a head with a slot for every token, protected ones first."""
    is_protected = torch.zeros(num_tokens, dtype=torch.bool)
    for start, stop in protected:
        is_protected[start:stop] = True
    return torch.cat([is_protected.nonzero(), (~is_protected).nonzero()]).squeeze(1)
