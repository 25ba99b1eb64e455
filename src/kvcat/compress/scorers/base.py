"""What an eviction scorer is, and the attention that some of them read."""

from typing import Protocol, runtime_checkable

import torch

from kvcat.compress.tracing import Trace
from kvcat.types import Float, Tensor

Scores = list[Float[Tensor, "batch kv_heads _"]]
_BLOCK_ELEMENTS = 2**23


@runtime_checkable
class Scorer(Protocol):
    """Decides which slots eviction keeps; a dataclass whose fields are its options."""

    def __call__(self, trace: Trace, num_slots: int) -> Scores:
        """Per layer one score per position and KV head: the highest ``num_slots`` are kept."""
        ...


def received_mass(trace: Trace, start: int) -> Scores:
    """Attention mass that each prefix position receives from the prefix queries from start on.

    Per layer and KV head, summed over these queries and the head's query heads; the suffix plays no part.

    Args:
        trace: its model runs once more over the prefix.
        start: first query position, in [0, prefix_len).
    """
    return trace.memo(("received mass", start), lambda: _received_mass(trace, start))


@torch.no_grad()
def _received_mass(trace: Trace, start: int) -> Scores:
    result = []
    for queries, keys, scale in zip(trace.prefix_queries(start), trace.keys, trace.scales, strict=True):
        batch, kv_heads, prefix, _ = keys.shape
        grouped = queries.unflatten(1, (kv_heads, -1))
        positions = torch.arange(start, prefix, device=keys.device)
        mass = torch.zeros(batch, kv_heads, prefix, device=keys.device)
        step = max(1, _BLOCK_ELEMENTS // (batch * queries.shape[1] * prefix))
        for first in range(0, len(positions), step):
            at = positions[first : first + step]
            scores = (grouped[:, :, :, first : first + step] @ keys.mT.unsqueeze(2)).float() * scale
            later = torch.arange(prefix, device=keys.device) > at.unsqueeze(-1)
            mass += scores.masked_fill(later, -torch.inf).softmax(-1).sum((2, 3))
        result.append(mass)
    return result
