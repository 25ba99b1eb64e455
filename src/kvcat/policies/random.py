"""The fixed policy that drops slots at random."""

from typing import ClassVar, Literal

import torch

from kvcat.errors import InputError
from kvcat.policies._base import ExactCount, Randomness
from kvcat.types import Float, Tensor


class RandomPolicy(ExactCount):
    """Scores 1 for an exact count of slots, position 0 and others uniformly without replacement, and 0 for the rest.

    Every sequence of a batch draws its own slots.

    References: KV-CAT, appendix "Method ablation" (Rand).
    """

    reads: ClassVar[Literal["hidden", "attention"]] = "hidden"

    def forward(
        self, hidden: Float[Tensor, "batch tokens hidden"], generator: Randomness | None = None
    ) -> Float[Tensor, "batch tokens"]:
        """Scores, 0 or 1, float32 (float64 where the hidden states are); only the shape of these counts.

        The draw comes from the generator, one or one per sequence, whose state advances; without one it is refused.
        """
        if generator is None:
            raise InputError(
                "RandomPolicy needs a torch.Generator: its draws never come from the global random state"
            )
        batch, num_tokens, _ = hidden.shape
        sources, rows = (
            ([generator], batch) if isinstance(generator, torch.Generator) else (generator, 1)
        )
        noise = torch.cat([
            torch.rand(rows, num_tokens, generator=g, device=g.device, dtype=torch.float64) for g in sources
        ])  # fmt: skip
        return self.keep_largest(-noise).to(
            hidden.device, torch.promote_types(hidden.dtype, torch.float32)
        )


def make(*, target: float, **_: object) -> RandomPolicy:
    """The policy with the target as its keep ratio."""
    return RandomPolicy(target)
