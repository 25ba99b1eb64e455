"""The first positions."""

from dataclasses import dataclass

from kvcat.compress.base import Scorer, Scores
from kvcat.compress.trace import Trace


@dataclass(frozen=True)
class First(Scorer):
    """Keeps the first slots of the prefix."""

    def measure(self, trace: Trace) -> Scores:
        """Minus the position."""
        return [-layer.slots.ranks().float() for layer in trace.layers]
