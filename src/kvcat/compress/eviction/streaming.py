"""StreamingLLM: attention sinks and recent positions."""

from dataclasses import dataclass

import torch

from kvcat.compress.base import Scorer, Scores
from kvcat.compress.trace import Trace
from kvcat.errors import check_least


@dataclass(frozen=True)
class StreamingLLM(Scorer):
    """Keeps the first positions, which queries attend to regardless of their content, and the last.

    With no more slots than sinks only sinks are kept. Slots keep their original positions, unlike
    in the paper.

    Args:
        num_sinks: first positions kept, at least 0.

    References: Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks",
    arXiv:2309.17453.
    """

    num_sinks: int = 4

    def __post_init__(self) -> None:
        check_least(0, num_sinks=self.num_sinks)

    def measure(self, trace: Trace) -> Scores:
        """The position; infinite for the sinks."""
        scores = []
        for layer in trace.layers:
            ranks = layer.slots.ranks()
            scores.append(ranks.float().masked_fill(ranks < self.num_sinks, torch.inf))
        return scores
