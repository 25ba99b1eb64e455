"""SnapKV: the positions that the end of the prefix attends to."""

from dataclasses import dataclass
from typing import ClassVar

from torch.nn.functional import avg_pool1d, max_pool1d

from kvcat.compress.base import Scorer, Scores, received_mass
from kvcat.compress.trace import Trace
from kvcat.errors import InputError, check_least, check_one_of


@dataclass(frozen=True)
class SnapKV(Scorer):
    """Keeps an observation window at the end of the prefix and the positions that its queries
    attend to.

    Votes are the attention mass that a position receives from the window's queries, pooled along
    the positions before the window. The whole window is kept when there are more slots than it has
    positions, as published. With fewer slots, which the paper does not cover, half of the slots go
    to the window's end.

    Args:
        window: observation window in tokens, at least 1.
        kernel_size: width of the pooling, odd, at least 1.
        pooling: "max" or "average".

    References: Li et al. 2024, "SnapKV: LLM Knows What You are Looking for Before Generation",
    arXiv:2404.14469.
    """

    needs_all_queries: ClassVar[bool] = True

    window: int = 32
    kernel_size: int = 7
    pooling: str = "max"

    def __post_init__(self) -> None:
        check_least(1, window=self.window, kernel_size=self.kernel_size)
        if self.kernel_size % 2 == 0:
            raise InputError(f"kernel_size must be odd and positive, not {self.kernel_size}")
        check_one_of("pooling", self.pooling, ("max", "average"))

    def measure(self, trace: Trace) -> Scores:
        """Pooled votes; within the window as they are."""
        window_start = max(0, trace.prefix_len - self.window)
        votes = received_mass(trace, window_start)
        if not window_start:
            return votes
        pool = max_pool1d if self.pooling == "max" else avg_pool1d
        for layer_votes in votes:
            before_window = layer_votes[..., :window_start]
            padding = self.kernel_size // 2
            layer_votes[..., :window_start] = pool(before_window, self.kernel_size, 1, padding)
        return votes

    def num_recent(self, num_slots: int) -> int:
        """The window, or half of the slots where they are few."""
        return self.window if num_slots > self.window else num_slots // 2
