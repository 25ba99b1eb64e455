"""The fixed policy that keeps the slots with the most attention."""

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch

from kvcat.attention.mass import attention_mass
from kvcat.policies._base import ExactCount
from kvcat.types import Float, Tensor


class AttentionMassPolicy(ExactCount):
    """Scores 1 for position 0 and the slots with the most dense attention, and 0 for the others.

    It keeps an exact count. Among equal masses the lower position comes first. There is no
    gradient.

    References: KV-CAT, appendix "Method ablation" (Attn).
    """

    reads: ClassVar[Literal["hidden", "attention"]] = "attention"

    @torch.no_grad()
    def forward(
        self,
        queries: Float[Tensor, "batch heads tokens head_dim"],
        keys: Float[Tensor, "batch kv_heads tokens head_dim"],
        *,
        scale: float,
        window: int | None = None,
        sinks: Float[Tensor, " heads"] | None = None,
        generators: Sequence[torch.Generator] | None = None,  # noqa: ARG002 (the protocol's)
    ) -> Float[Tensor, "batch tokens"]:
        """Scores, 0 or 1, in float32, or float64 if the queries have that type."""
        mass = attention_mass(queries, keys, scale=scale, window=window, sinks=sinks)
        return self.keep_largest(mass.sum(1))  # summed over the KV heads


def make(*, target: float, **_: object) -> AttentionMassPolicy:
    """The policy with the target as its keep ratio."""
    return AttentionMassPolicy(target)
