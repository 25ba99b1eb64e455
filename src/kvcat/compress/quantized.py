"""Any method with its caches in few bits, and slots and bits for a number of bytes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvcat.cache import CompactCache, check_dims, most_bytes_per_slot
from kvcat.compress.base import Compressor
from kvcat.compress.trace import Trace
from kvcat.errors import InputError

# from so many times fewer bytes than a dense cache in 16 bits on, 4 bits are better than 8
_LEAST_FEWER_OF_4_BITS = 8.5


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
    bits: int

    @property
    def draws(self) -> bool:
        """Whether the result depends on the seed of the method."""
        return self.method.draws

    @property
    def last_step(self) -> int | None:
        """Step of the method's last snapshot."""
        return self.method.last_step

    def _at_an_end(self, trace: Trace, slots: int) -> CompactCache:
        """The cache of all slots; protected slots alone are rejected like those among others."""
        _check_not_protected(trace, self.bits)
        return super()._at_an_end(trace, slots)

    def full(self, trace: Trace) -> CompactCache:
        """The cache with all slots, in few bits."""
        return next(self.compress(trace, [trace.max_slots]))

    def compress(self, trace: Trace, sizes: Sequence[int]) -> Iterator[CompactCache]:
        """The caches in few bits."""
        check_dims(trace.keys[0].shape[-1], trace.values[0].shape[-1], self.bits)
        _check_not_protected(trace, self.bits)
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


def _check_not_protected(trace: Trace, bits: int) -> None:
    """Raise an ``InputError`` for protected slots, which few bits would round."""
    if trace.protected:
        raise InputError(f"protected slots are exact, not in {bits} bits: leave out bits")


def slots_and_bits(
    trace: Trace, num_bytes: int, choices: Sequence[int | None] | None = None
) -> tuple[int, int | None]:
    """The number of slots per head, and their bits, with which a cache has at most so many bytes.

    Without ``choices`` a cache has 4 bits if it has at least 8.5 times fewer bytes than a dense
    cache in 16 bits, else 8. On SmolLM2-135M, more slots in 4 bits were closer to the dense cache
    than fewer in 8 bits at 16 and 24 times fewer bytes, level at 8.5, and behind at 4.6
    (docs/log.md).

    Args:
        trace: of the prefix.
        num_bytes: of all examples together, with the states that are kept whole.
        choices: bits to choose from, the first of which do not hold the whole prefix; None among
            them is the type of the trace.

    Raises:
        InputError: fewer bytes than one slot per head needs.
    """
    state_bytes = sum(state.nbytes for state in trace.states.values())
    of_slots = num_bytes - state_bytes
    dense_bytes = sum(2 * states.numel() for states in (*trace.keys, *trace.values))
    is_small = dense_bytes >= _LEAST_FEWER_OF_4_BITS * of_slots
    tried = [4 if is_small else 8] if choices is None else list(choices)
    sizes = [(_slots_within(trace, of_slots, bits), bits) for bits in tried]
    not_whole = [(slots, bits) for slots, bits in sizes if slots < trace.max_slots]
    slots, bits = not_whole[0] if not_whole else sizes[-1]
    if slots < 1:
        states = f" and {state_bytes} of states that are kept whole" if state_bytes else ""
        raise InputError(f"{num_bytes} bytes do not hold one slot in every head{states}")
    return min(slots, trace.max_slots), bits


def _slots_within(trace: Trace, num_bytes: int, bits: int | None) -> int:
    """Slots per head that fit into a number of bytes, also if those with the most channels get most
    of the slots.
    """
    num_heads = sum(keys.shape[0] * keys.shape[1] for keys in trace.keys)
    dims = max(
        (
            (keys.shape[-1], values.shape[-1])
            for keys, values in zip(trace.keys, trace.values, strict=True)
        ),
        key=sum,
    )
    if bits is None:
        per_slot = sum(dims) * trace.keys[0].itemsize + 4
        return num_bytes // (num_heads * per_slot)
    per_slot, per_head = most_bytes_per_slot(dims, bits)
    return int((num_bytes / num_heads - per_head) // per_slot)
