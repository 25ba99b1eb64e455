"""H2O: heavy hitters and recent positions."""

from dataclasses import dataclass
from typing import ClassVar

from kvcat.compress.base import Scorer, Scores, received_mass
from kvcat.compress.trace import Trace


@dataclass(frozen=True)
class H2O(Scorer):
    """Keeps the most recent positions in half of the slots, the most attended ones in the other
    half.

    Attention is summed over all queries of the prefix and a KV head's query heads.

    References: Zhang et al. 2023, "H2O: Heavy-Hitter Oracle for Efficient Generative Inference",
        arXiv:2306.14048.
    """

    needs_all_queries: ClassVar[bool] = True

    def measure(self, trace: Trace) -> Scores:
        """Accumulated attention."""
        return received_mass(trace, 0)

    def num_recent(self, num_slots: int) -> int:
        """Half of the slots; if the number is odd, the heavy hitters get one more."""
        return num_slots // 2
