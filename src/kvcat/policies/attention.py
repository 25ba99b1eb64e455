"""The fixed policy that keeps the slots with the most attention."""

from typing import ClassVar, Literal

import torch

from kvcat.attention.mass import attention_mass
from kvcat.policies._base import ExactCount, Randomness
from kvcat.types import Float, Tensor


class AttentionMassPolicy(ExactCount):
    """Scores 1 for position 0 and the slots that receive the most dense attention, an exact count, and 0 for the rest.

    Equal masses go to the lower position. No gradient.

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
        generator: Randomness | None = None,  # noqa: ARG002 (the protocol's)
    ) -> Float[Tensor, "batch tokens"]:
        """Scores, 0 or 1, float32 (float64 where the queries are)."""
        return self.keep_largest(attention_mass(queries, keys, scale=scale, window=window).sum(1))


def make(*, target: float, **_: object) -> AttentionMassPolicy:
    """The policy with the target as its keep ratio."""
    return AttentionMassPolicy(target)
