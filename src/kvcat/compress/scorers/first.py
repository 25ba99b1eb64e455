"""The first positions."""

from dataclasses import dataclass

from kvcat.compress.scorers.base import Scores
from kvcat.compress.tracing import Trace


@dataclass(frozen=True)
class First:
    """Keeps the first slots of the prefix."""

    def __call__(self, trace: Trace, num_slots: int) -> Scores:  # noqa: ARG002
        """Minus the position.

        Args:
            trace: of the windows.
            num_slots: not used.
        """
        return [-trace.ranks(layer).float() for layer in range(len(trace.keys))]
