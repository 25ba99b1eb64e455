"""TOVA: the positions that the last one attends to."""

from dataclasses import dataclass
from typing import ClassVar

from kvcat.compress.base import Scorer, Scores, received_mass
from kvcat.compress.trace import Trace


@dataclass(frozen=True)
class TOVA(Scorer):
    """Keeps, the same in all heads of a layer, the positions that the prefix's last query attends
    to most.

    This is the published method for a prompt that is read in one pass. The last position has no
    special role.

    References: Oren et al. 2024, "Transformers are Multi-State RNNs", arXiv:2401.06104.
    """

    needs_all_queries: ClassVar[bool] = True

    def measure(self, trace: Trace) -> Scores:
        """Attention weight from the last query, averaged over the query heads."""
        scores = []
        masses = received_mass(trace, trace.prefix_len - 1)
        for mass, queries in zip(masses, trace.queries, strict=True):
            num_query_heads = queries.shape[1]
            mean = mass.sum(1, keepdim=True) / num_query_heads
            scores.append(mean.expand_as(mass))
        return scores
