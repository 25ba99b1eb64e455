"""The smallest keys."""

from dataclasses import dataclass

from kvcat.compress.scorers.base import Scores
from kvcat.compress.tracing import Trace


@dataclass(frozen=True)
class KeyNorm:
    """Keeps the slots whose keys have the smallest Euclidean norm.

    The number of slots is the same in every layer; the authors spare the first layers of some models.

    References: Devoto et al. 2024, "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression",
        arXiv:2406.11430.
    """

    def __call__(self, trace: Trace, num_slots: int) -> Scores:  # noqa: ARG002
        """Minus the norm of the key.

        Args:
            trace: of the windows.
            num_slots: not used.
        """
        return [-keys.float().norm(dim=-1) for keys in trace.keys]
