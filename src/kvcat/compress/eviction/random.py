"""Random positions."""

from dataclasses import dataclass

import torch

from kvcat.compress.base import Scorer, Scores, example_generators
from kvcat.compress.trace import Trace


@dataclass(frozen=True)
class Random(Scorer):
    """Keeps slots drawn uniformly without replacement, independently per example, layer and head.

    A larger cache holds all slots of a smaller one.

    Args:
        seed: with an example's tokens it determines the example's draw.
    """

    seed: int = 0

    def measure(self, trace: Trace) -> Scores:
        """Uniform numbers in [0, 1)."""
        generators = example_generators(trace, self.seed)
        scores_of_layers = []
        for layer in trace.layers:
            exists = layer.slots.exists().cpu()
            scores = torch.zeros(exists.shape)
            for example, generator in enumerate(generators):
                num_slots = int(exists[example].sum())
                scores[example][exists[example]] = torch.rand(num_slots, generator=generator)
            scores_of_layers.append(scores.to(layer.slots.keys.device))
        return scores_of_layers
