"""Vectors in 8 bits: a third or less of the memory of many queries."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvcat.types import Float, Int, Tensor, at_least_float32

_LARGEST = 127


@dataclass(frozen=True)
class Rounded:
    """Vectors in 8 bits, each with a scale of its own, so that its largest number is 127 times it.

    Args:
        integers: from -127 to 127.
        scales: what the integers are multiplied by, in at least float32.
    """

    integers: Int[Tensor, "*shape channels"]
    scales: Float[Tensor, "*shape 1"]

    @classmethod
    def of(cls, vectors: Float[Tensor, "*shape channels"]) -> "Rounded":
        """The vectors, rounded."""
        numbers = at_least_float32(vectors)
        scales = numbers.abs().amax(-1, keepdim=True) / _LARGEST
        divisors = torch.where(scales > 0, scales, torch.ones_like(scales))
        return cls((numbers / divisors).round().to(torch.int8), scales)

    def __getitem__(self, index: Any) -> "Rounded":
        """Some of the vectors, by the dimensions before the channels."""
        return Rounded(self.integers[index], self.scales[index])

    @property
    def shape(self) -> torch.Size:
        """The shape of the rounded vectors."""
        return self.integers.shape

    @property
    def device(self) -> torch.device:
        """Where the vectors are."""
        return self.integers.device

    @property
    def nbytes(self) -> int:
        """Bytes of the integers and their scales."""
        return self.integers.nbytes + self.scales.nbytes

    def numbers(self) -> Float[Tensor, "*shape channels"]:
        """The rounded vectors."""
        return self.integers * self.scales

    def selected(self, dim: int, places: Int[Tensor, " rows"]) -> "Rounded":
        """Some of the vectors along a dimension."""
        places = places.to(self.device)
        return Rounded(
            self.integers.index_select(dim, places), self.scales.index_select(dim, places)
        )

    @staticmethod
    def joined(several: Sequence["Rounded"], dim: int) -> "Rounded":
        """Vectors of several, one after the other along a dimension."""
        integers = torch.cat([rows.integers for rows in several], dim=dim)
        scales = torch.cat([rows.scales for rows in several], dim=dim)
        return Rounded(integers, scales)
