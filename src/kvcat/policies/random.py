"""The fixed policy that drops slots at random."""

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch

from kvcat.errors import InputError
from kvcat.policies._base import ExactCount
from kvcat.types import Float, Tensor


class RandomPolicy(ExactCount):
    """Scores 1 for an exact count of slots, drawn at random, and 0 for the others.

    Position 0 is always kept: without it the masked pass has no attention sink. The others are
    drawn uniformly without replacement, independently for every sequence of a batch.

    References: KV-CAT, appendix "Method ablation" (Rand).
    """

    reads: ClassVar[Literal["hidden", "attention"]] = "hidden"

    def forward(
        self,
        hidden: Float[Tensor, "batch tokens hidden"],
        generators: Sequence[torch.Generator] | None = None,
    ) -> Float[Tensor, "batch tokens"]:
        """Scores, 0 or 1, in float32, or float64 if the hidden states have that type.

        Args:
            hidden: only their shape, dtype and device count.
            generators: one per sequence; a draw advances its state. They are required.
        """
        batch, num_tokens, _ = hidden.shape
        if generators is None or len(generators) != batch:
            reason = "its draws never come from the global random state"
            raise InputError(f"RandomPolicy needs a torch.Generator for each sequence: {reason}")
        # in float64, so that no two tokens draw the same number
        noise = torch.stack(
            [
                torch.rand(num_tokens, generator=each, device=each.device, dtype=torch.float64)
                for each in generators
            ]
        )
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return self.keep_largest(-noise).to(hidden.device, wide)


def make(*, target: float, **_: object) -> RandomPolicy:
    """The policy with the target as its keep ratio."""
    return RandomPolicy(target)
