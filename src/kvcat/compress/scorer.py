"""What an eviction scorer is, and the attention that some scorers read."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from kvcat.compress.trace import Trace
from kvcat.types import Float, Tensor

Scores = list[Float[Tensor, "batch kv_heads _"]]
_CHUNK_ELEMENTS = 2**23


@dataclass(frozen=True)
class Scorer(ABC):
    """Decides which slots eviction keeps. A subclass is a frozen dataclass whose fields are its options."""

    @abstractmethod
    def measure(self, trace: Trace) -> Scores:
        """Per layer one score per position and KV head; the highest are kept."""

    def protect(self, scores: Scores, num_slots: int) -> Scores:  # noqa: ARG002
        """The scores with infinity where a position is kept whatever its score; here nowhere."""
        return scores


@torch.no_grad()
def received_mass(trace: Trace, start: int) -> Scores:
    """Attention mass that each prefix position receives from the prefix queries from ``start`` on.

    Per layer and KV head, summed over these queries and the head's query heads.

    Args:
        trace: of the windows; its model runs again over the prefix where the trace lacks queries.
        start: first query position, in [0, prefix_len).
    """
    result = []
    for queries, keys, scale in zip(trace.prefix_queries_from(start), trace.keys, trace.scales, strict=True):
        batch, kv_heads, prefix, _ = keys.shape
        grouped = queries.unflatten(1, (kv_heads, -1))
        positions = torch.arange(prefix, device=keys.device)
        mass = torch.zeros(batch, kv_heads, prefix, device=keys.device)
        step = max(1, _CHUNK_ELEMENTS // (batch * queries.shape[1] * prefix))
        for first in range(0, prefix - start, step):
            scores = (grouped[:, :, :, first : first + step] @ keys.mT.unsqueeze(2)).float() * scale
            later = positions > positions[start + first : start + first + step].unsqueeze(-1)
            mass += scores.masked_fill(later, -torch.inf).softmax(-1).sum((2, 3))
        result.append(mass)
    return result
