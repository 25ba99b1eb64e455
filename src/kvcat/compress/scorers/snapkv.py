"""SnapKV: what the end of the prefix attends to."""

from dataclasses import dataclass

import torch
from torch.nn.functional import avg_pool1d, max_pool1d

from kvcat.compress.scorers.base import Scores, received_mass
from kvcat.compress.tracing import Trace
from kvcat.errors import InputError


@dataclass(frozen=True)
class SnapKV:
    """Keeps an observation window at the end of the prefix and what its queries attend to.

    Votes are the attention mass a position receives from the window's queries, pooled along the positions before the
    window. The whole window is kept when there are more slots than it has positions, as published; with fewer slots,
    which the paper does not treat, the last half of the slots' number is.

    Args:
        window: observation window in tokens, at least 1.
        kernel_size: of the pooling, odd, at least 1.
        pooling: "max" or "average".

    Raises:
        InputError: an option out of its range.

    References: Li et al. 2024, "SnapKV: LLM Knows What You are Looking for Before Generation", arXiv:2404.14469.
    """

    window: int = 32
    kernel_size: int = 7
    pooling: str = "max"

    def __post_init__(self) -> None:
        if self.window < 1:
            raise InputError(f"window must be at least 1, not {self.window}")
        if self.kernel_size < 1 or self.kernel_size % 2 == 0:
            raise InputError(f"kernel_size must be odd and positive, not {self.kernel_size}")
        if self.pooling not in ("max", "average"):
            raise InputError(f"pooling must be 'max' or 'average', not {self.pooling!r}")

    def __call__(self, trace: Trace, num_slots: int) -> Scores:
        """Pooled votes; infinite for the part of the window that is always kept.

        Args:
            trace: of the windows; its suffix plays no part.
            num_slots: slots per head.
        """
        window = min(self.window, trace.prefix_len)
        always = window if num_slots > window else num_slots // 2
        result = []
        for votes in received_mass(trace, trace.prefix_len - window):
            scores, before = votes.clone(), trace.prefix_len - window
            if before:
                pool = max_pool1d if self.pooling == "max" else avg_pool1d
                scores[..., :before] = pool(votes[..., :before], self.kernel_size, 1, self.kernel_size // 2)
            if always:
                scores[..., -always:] = torch.inf
            result.append(scores)
        return result
