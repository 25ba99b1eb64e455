"""H2O: heavy hitters and recent positions."""

from dataclasses import dataclass

import torch

from kvcat.compress.scorers.base import Scores, received_mass
from kvcat.compress.tracing import Trace


@dataclass(frozen=True)
class H2O:
    """Keeps the most recent positions in half of the slots, those of the largest accumulated attention in the rest.

    The accumulated attention of a position is what it receives from all queries of the prefix, summed over a KV head's
    query heads.

    References: Zhang et al. 2023, "H2O: Heavy-Hitter Oracle for Efficient Generative Inference", arXiv:2306.14048.
    """

    def __call__(self, trace: Trace, num_slots: int) -> Scores:
        """Accumulated attention; infinite for the recent half.

        Args:
            trace: of the windows; its suffix plays no part.
            num_slots: slots per head; an odd one goes to the heavy hitters.
        """
        result = [mass.clone() for mass in received_mass(trace, 0)]
        if num_slots // 2:
            for scores in result:
                scores[..., -(num_slots // 2) :] = torch.inf
        return result
