"""Random positions."""

from dataclasses import dataclass

import torch

from kvcat.compress.base import Scorer, Scores, example_generators
from kvcat.compress.trace import Trace


@dataclass(frozen=True)
class Random(Scorer):
    """Keeps slots drawn uniformly without replacement, independently per example, layer and head.

    A larger cache holds all that a smaller one does.

    Args:
        seed: with an example's tokens it determines the example's draw.
    """

    seed: int = 0

    def measure(self, trace: Trace) -> Scores:
        """Uniform numbers in [0, 1)."""
        generators = example_generators(trace, self.seed)
        result = []
        for layer, keys in enumerate(trace.keys):
            there = trace.ranks(layer).cpu() >= 0
            scores = torch.zeros(there.shape)
            for own, at, generator in zip(scores, there, generators, strict=True):
                own[at] = torch.rand(int(at.sum()), generator=generator)
            result.append(scores.to(keys.device))
        return result
