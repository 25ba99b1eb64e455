"""A scorer: keep the slots whose values have the largest norm."""

from dataclasses import dataclass

from torch import Tensor

from kvcat.compress import Scorer, Trace


@dataclass(frozen=True)
class ValueNorm(Scorer):
    """Keeps the slots whose values have the largest norm.

    Args:
        power: exponent of the norm, such as 2.
    """

    power: float = 2.0

    def measure(self, trace: Trace) -> list[Tensor]:
        """Norm of every value, per layer: (batch, kv_heads, prefix)."""
        return [values.float().norm(p=self.power, dim=-1) for values in trace.values]
