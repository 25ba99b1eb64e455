"""A policy with an option: hide all slots but every n-th."""

from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvcat.policies import SparsificationPolicy


class StridedPolicy(SparsificationPolicy):
    """Keeps every ``stride``-th slot, the first one included.

    Args:
        stride: distance of the slots that are kept, at least 1.
    """

    reads: ClassVar[Literal["hidden", "attention"]] = "hidden"

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(  # the scores do not depend on the generators
        self,
        hidden: Tensor,
        generators: list[torch.Generator] | None = None,  # noqa: ARG002
    ) -> Tensor:
        """1 for a kept slot and 0 for a hidden one: (batch, tokens)."""
        batch, num_tokens, _ = hidden.shape
        is_kept = torch.arange(num_tokens, device=hidden.device) % self.stride == 0
        return is_kept.float().expand(batch, num_tokens)


def make(*, target: float, stride: int = 0, **_: object) -> StridedPolicy:
    """The policy of one group of layers; without ``stride`` it follows from the target."""
    return StridedPolicy(stride or round(1 / target))
