"""The smallest keys."""

from dataclasses import dataclass

from kvcat.compress.base import Scorer, Scores
from kvcat.compress.trace import Trace


@dataclass(frozen=True)
class KeyNorm(Scorer):
    """Keeps the slots whose keys have the smallest Euclidean norm.

    The authors spare the first layers of some models.

    References: Devoto et al. 2024, "A Simple and Effective L2 Norm-Based Strategy for KV Cache
        Compression", arXiv:2406.11430.
    """

    def measure(self, trace: Trace) -> Scores:
        """Minus the norm of the key."""
        return [-keys.float().norm(dim=-1) for keys in trace.keys]
