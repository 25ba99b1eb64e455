"""What queries attend to: the mass and the output of their attention over some slots."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from kvcat.types import Float, Tensor


@dataclass(frozen=True)
class PastAttention:
    """Attention of kept queries over the tokens of a compact cache (``Past.queries``).

    Args:
        first_row: of these queries among those of the batch, where they follow each other.
        num_new: number of slots after those of the cache, which are exact.
        log_mass: of each query on the tokens of the cache, nats.
        outputs: its attention over them.
    """

    first_row: int
    num_new: int
    log_mass: Float[Tensor, "heads kept"]
    outputs: Float[Tensor, "heads kept value_dim"]

    @property
    def rows(self) -> slice:
        """The rows of these queries in the batch."""
        return slice(self.first_row, self.first_row + self.log_mass.shape[1])

    def of(self, heads: slice) -> "PastAttention":
        """The attention of some heads."""
        return replace(self, log_mass=self.log_mass[heads], outputs=self.outputs[heads])


class Attended(NamedTuple):
    """Attention of some queries over some slots.

    Args:
        log_mass: log sum of exp(score) over the slots, nats.
        outputs: their values, averaged by attention.
    """

    log_mass: Float[Tensor, "*heads queries"]
    outputs: Float[Tensor, "*heads queries value_dim"]

    @classmethod
    def over(
        cls,
        scores: Float[Tensor, "*heads queries slots"],
        values: Float[Tensor, "... slots value_dim"],
    ) -> "Attended":
        """The attention with these scores; values are those of every row of the heads."""
        return cls(scores.logsumexp(-1), scores.softmax(-1) @ values)

    def joined(self, other: "Attended") -> "Attended":
        """The attention over the slots of both."""
        log_mass = torch.logaddexp(self.log_mass, other.log_mass)
        outputs = (self.log_mass - log_mass).exp().unsqueeze(-1) * self.outputs
        outputs = outputs + (other.log_mass - log_mass).exp().unsqueeze(-1) * other.outputs
        return Attended(log_mass, outputs)
