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
        result = []
        for layer, keys in enumerate(trace.keys):
            there = trace.ranks(layer).cpu() >= 0
            scores = torch.zeros(there.shape)
            for own, at, generator in zip(scores, there, generators, strict=True):
                own[at] = torch.rand(int(at.sum()), generator=generator)
            result.append(scores.to(keys.device))
        return result
