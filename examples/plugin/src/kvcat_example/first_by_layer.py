"""A compressor with unequal slots: the first positions, more of them in the first layers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvcat.cache import CompactLayer
from kvcat.compress import Compressor, Prefix


@dataclass(frozen=True)
class FirstByLayer(Compressor):
    """Keeps the first positions of the prefix, fewer in every further layer, as many on average.

    Args:
        spread: slots of the first layer over the average, minus 1, in [0, 1).
    """

    spread: float = 0.5

    def fit(self, prefix: Prefix, sizes: Sequence[int]) -> Iterator[list[CompactLayer]]:
        """The layers for every average number of slots."""
        for size in sizes:
            counts = self._slots_of_layers(len(prefix.layers), size, prefix.max_slots)
            yield [_first(*each) for each in zip(prefix.layers, counts, strict=True)]

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


def _first(layer: CompactLayer, count: int) -> CompactLayer:
    """The first slots of a layer with their keys, values and positions."""
    positions = None if layer.positions is None else layer.positions[:, :, :count]
    return CompactLayer(layer.keys[:, :, :count], layer.values[:, :, :count], None, positions)
