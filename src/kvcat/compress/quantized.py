"""Any method with its caches in few bits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvcat.cache import Bits, CompactCache
from kvcat.compress.base import Compressor
from kvcat.compress.trace import Trace


@dataclass(frozen=True)
class Quantized(Compressor):
    """The caches of another method in few bits.

    Attention Matching rounds its keys before it fits to them. The other methods' caches are rounded
    at the end (``CompactCache.quantize``).

    Args:
        method: the other method.
        bits: of keys and values.
    """

    method: Compressor
    bits: Bits

    @property
    def draws(self) -> bool:
        """Whether the result depends on the seed of the method."""
        return self.method.draws

    @property
    def last_step(self) -> int | None:
        """Step of the method's last snapshot."""
        return self.method.last_step

    def full(self, trace: Trace) -> CompactCache:
        """The cache with all slots, in few bits."""
        return next(self.compress(trace, [trace.max_slots]))

    def compress(self, trace: Trace, sizes: Sequence[int]) -> Iterator[CompactCache]:
        """The caches in few bits."""
        return self.method.compress_quantized(trace, sizes, self.bits)

    def snapshots(
        self, trace: Trace, *, keep_ratio: float | int | None = None, num_slots: int | None = None
    ) -> Iterator[tuple[int | None, CompactCache]]:
        """The method's snapshots in few bits."""
        if self.method.last_step is None:
            yield None, self(trace, keep_ratio=keep_ratio, num_slots=num_slots)
            return
        snapshots = self.method.snapshots(trace, keep_ratio=keep_ratio, num_slots=num_slots)
        for step, cache in snapshots:
            yield step, cache.quantize(self.bits)

    def each_snapshots(
        self, trace: Trace, keep_ratios: Sequence[float | int]
    ) -> Iterator[Iterator[tuple[int | None, CompactCache]]]:
        """The method's snapshots of several keep ratios in few bits."""
        if self.method.last_step is None:
            yield from super().each_snapshots(trace, keep_ratios)
            return
        for keep_ratio in keep_ratios:
            yield self.snapshots(trace, keep_ratio=keep_ratio)
