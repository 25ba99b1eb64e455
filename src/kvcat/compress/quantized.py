"""Slots and bits of a cache for a number of bytes."""

from collections.abc import Sequence

from kvcat.cache import most_bytes_per_slot
from kvcat.compress.trace import Trace
from kvcat.errors import InputError

# from so many times fewer bytes than a dense cache in 16 bits on, 4 bits are better than 8
_LEAST_FEWER_OF_4_BITS = 8.5


def slots_and_bits(
    trace: Trace, num_bytes: int, choices: Sequence[int | None] | None = None
) -> tuple[int, int | None]:
    """The number of slots per head, and their bits, with which a cache has at most so many bytes.

    Without ``choices`` a cache has 4 bits if it has at least 8.5 times fewer bytes than a dense
    cache in 16 bits, else 8. On SmolLM2-135M, more slots in 4 bits were closer to the dense cache
    than fewer in 8 bits at 16 and 24 times fewer bytes, level at 8.5, and behind at 4.6
    (docs/log.md).

    Args:
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
    item_size = trace.keys[0].itemsize
    if bits is None:
        per_slot = sum(dims) * item_size + 4
        return num_bytes // (num_heads * per_slot)
    num_protected = trace.num_protected
    per_slot, per_head = most_bytes_per_slot(dims, bits, num_protected, item_size)
    return num_protected + int((num_bytes / num_heads - per_head) // per_slot)
