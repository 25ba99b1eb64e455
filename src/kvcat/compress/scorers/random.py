"""Random positions."""

from dataclasses import dataclass

import torch

from kvcat.compress.common import example_generators
from kvcat.compress.scorers.base import Scores
from kvcat.compress.tracing import Trace


@dataclass(frozen=True)
class Random:
    """Keeps slots drawn uniformly without replacement, independently per example, layer and head.

    Args:
        seed: with an example's tokens it determines the example's draw.
    """

    seed: int = 0

    def __call__(self, trace: Trace, num_slots: int) -> Scores:  # noqa: ARG002
        """Uniform numbers in [0, 1).

        Args:
            trace: of the windows.
            num_slots: not used, so that a larger budget keeps all that a smaller one does.
        """
        generators = example_generators(trace, self.seed)
        return [
            torch.stack([torch.rand(keys.shape[1:3], generator=generator) for generator in generators]).to(keys.device)
            for keys in trace.keys
        ]
