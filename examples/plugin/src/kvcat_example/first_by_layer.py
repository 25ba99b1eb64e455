"""A compressor with unequal slots: the first positions, more of them in the first layers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kvcat import CompactCache
from kvcat.cache import CompactLayer
from kvcat.compress import Compressor, Trace, compact_cache


@dataclass(frozen=True)
class FirstByLayer(Compressor):
    """Keeps the first positions of the prefix, fewer in every further layer, as many on average.

    Args:
        spread: slots of the first layer over the average, minus 1, in [0, 1).
    """

    spread: float = 0.5

    def compress(self, trace: Trace, sizes: Sequence[int]) -> Iterator[CompactCache]:
        """One cache for every average number of slots."""
        for size in sizes:
            counts = self._slots_of_layers(len(trace.keys), size, trace.max_slots)
            layers = [_first(trace, layer, count) for layer, count in enumerate(counts)]
            yield compact_cache(trace, layers, "first-by-layer", {"spread": self.spread})

    def _slots_of_layers(self, num_layers: int, average: int, most: int) -> list[int]:
        """Slots of every layer; their sum is ``num_layers * average``."""
        counts = []
        for layer in range(num_layers // 2):
            depth = layer / max(1, num_layers - 1)
            extra = round(self.spread * average * (1 - 2 * depth))
            counts.append(min(extra, average - 1, most - average))
        middle = [0] * (num_layers % 2)
        extras = [*counts, *middle, *(-extra for extra in reversed(counts))]
        return [average + extra for extra in extras]


def _first(trace: Trace, layer: int, count: int) -> CompactLayer:
    """The first slots of a layer with their original keys and values."""
    keys = trace.keys[layer][:, :, :count]
    values = trace.values[layer][:, :, :count]
    positions = torch.arange(count, device=keys.device).expand(*keys.shape[:2], count)
    return CompactLayer(keys, values, None, positions)
