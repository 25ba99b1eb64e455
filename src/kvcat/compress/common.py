"""What every compressor needs: slots, draws per example, and the cache it returns."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch

from kvcat.cache import CompactCache, CompactLayer, Layer
from kvcat.compress.tracing import Trace
from kvcat.errors import InputError
from kvcat.models import model_name
from kvcat.types import Float, Int, Tensor

Fit = tuple[Int[Tensor, " slots"], Float[Tensor, "slots value_dim"], Float[Tensor, " slots"] | None]


@runtime_checkable
class Compressor(Protocol):
    """Makes a compact cache from a trace; a dataclass whose fields are its options."""

    def __call__(
        self, trace: Trace, *, keep_ratio: float | int | None = None, num_slots: int | None = None
    ) -> CompactCache:
        """The compact cache with ceil(keep_ratio * prefix_len) or num_slots slots per layer and head.

        Heads that have fewer, of a prefix whose past was compact, keep all of them.
        """
        ...


def slots_for(prefix_len: int, keep_ratio: float | int | None, num_slots: int | None) -> int:
    """Number of slots: ceil(keep_ratio * prefix_len), or num_slots itself.

    The product is rounded at the 12th significant digit first, so that 0.1 * 30 = 3.0000000000000004 gives 3.

    Args:
        prefix_len: tokens of the prefix.
        keep_ratio: fraction kept, in (0, 1].
        num_slots: number kept, in [1, prefix_len].

    Raises:
        InputError: out of range, or not exactly one of the two given.
    """
    if (keep_ratio is None) == (num_slots is None):
        raise InputError(f"give either keep_ratio or num_slots, not keep_ratio={keep_ratio} and num_slots={num_slots}")
    if num_slots is not None:
        if not 1 <= num_slots <= prefix_len:
            raise InputError(f"num_slots must be in [1, {prefix_len}], not {num_slots}")
        return num_slots
    if keep_ratio is None or not 0 < keep_ratio <= 1:
        raise InputError(f"keep_ratio must be in (0, 1], not {keep_ratio}")
    return max(1, math.ceil(float(f"{keep_ratio * prefix_len:.12g}")))


def best_layer(trace: Trace, index: int, scores: Float[Tensor, "batch kv_heads prefix"], num_slots: int) -> Layer:
    """One layer's slots of the highest scores, unchanged; of equal scores the earlier slot wins.

    Args:
        trace: of the windows.
        index: of the layer.
        scores: one per slot of the prefix; those of slots that a head does not have play no part.
        num_slots: slots kept per head; heads with fewer keep all they have.
    """
    slots = top_positions(scores.masked_fill(trace.ranks(index) < 0, -torch.inf), num_slots)
    bias = None if trace.log_bias is None else trace.log_bias[index].gather(2, slots)
    keys, values = (take_slots(states[index], slots) for states in (trace.keys, trace.values))
    return CompactLayer(keys, values, bias, None if trace.past_len else slots).without_absent()


def fitted_layer(trace: Trace, index: int, fits: Mapping[tuple[int, int, int], Fit]) -> Layer:
    """One layer's kept keys with the values and the log-bias that were fitted to them.

    Args:
        trace: of the windows.
        index: of the layer.
        fits: by layer, example and KV head: which of the slots that ``trace.head`` gives are kept, their values, and
            their log-bias, nats, or None for all of them.
    """
    examples, heads = trace.keys[index].shape[:2]
    rows = [[fits[index, example, head] for head in range(heads)] for example in range(examples)]
    biases = [[bias for _, _, bias in row if bias is not None] for row in rows]
    return CompactLayer.ragged(
        [[trace.head(index, b, h)[0][kept] for h, (kept, _, _) in enumerate(row)] for b, row in enumerate(rows)],
        [[values.to(trace.values[index].dtype) for _, values, _ in row] for row in rows],
        biases if biases[0] else None,
        None if trace.past_len else [[kept for kept, _, _ in row] for row in rows],
    )


def compact_cache(
    trace: Trace, layers: Sequence[Layer], method: str, options: dict[str, object] | None = None
) -> CompactCache:
    """A compact cache of this trace that tells how it was made.

    Args:
        trace: what was compressed.
        layers: one per layer of the model.
        method: name of the method.
        options: further facts for the metadata.
    """
    cache = CompactCache(layers, trace.prefix_len, trace.fingerprint)
    slots = cache.mean_slots
    facts = {
        "method": method,
        "num_slots": f"{slots:.6g}",
        "keep_ratio": f"{slots / trace.prefix_len:.6g}",
        **(options or {}),
        "supervision": trace.supervision,
        "model": model_name(trace.model),
        "architecture": type(trace.model).__name__,
    }
    return replace(cache, metadata={key: str(fact) for key, fact in facts.items()})


def example_generators(trace: Trace, seed: int) -> list[torch.Generator]:
    """One random stream per example, a function of the seed and the tokens of the example's prefix.

    Examples draw independently, and each draws the same alone as in any batch.

    Args:
        trace: of the examples.
        seed: any integer.
    """
    generators = []
    for row in trace.input_ids[:, : trace.prefix_len].cpu():
        digest = hashlib.sha256(f"{seed}:".encode() + row.contiguous().numpy().tobytes()).digest()
        generators.append(torch.Generator().manual_seed(int.from_bytes(digest[:7], "little")))
    return generators


def wide(states: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """In float32, or in float64 where they are."""
    return states if states.dtype == torch.float64 else states.float()


def take_slots(
    states: Float[Tensor, "batch kv_heads prefix head_dim"], positions: Int[Tensor, "batch kv_heads slots"]
) -> Float[Tensor, "batch kv_heads slots head_dim"]:
    """Keys or values at the given positions of each head."""
    return states.gather(2, positions.unsqueeze(-1).expand(-1, -1, -1, states.shape[-1]))


def top_positions(scores: Float[Tensor, "*heads prefix"], num_slots: int) -> Int[Tensor, "*heads slots"]:
    """Positions of the highest scores, in ascending order; of equal scores the earlier position wins.

    Args:
        scores: one per position.
        num_slots: how many to keep, in [1, prefix].
    """
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    return order[..., :num_slots].sort(dim=-1).values
