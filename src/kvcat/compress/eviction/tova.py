"""TOVA: what the last position attends to."""

from dataclasses import dataclass

from kvcat.compress.base import Scorer, Scores, received_mass
from kvcat.compress.trace import Trace


@dataclass(frozen=True)
class TOVA(Scorer):
    """Keeps, in all heads of a layer alike, the positions with the most attention from the prefix's last query.

    This is the published method on a prompt that is read in one pass; the last position competes as any other does.

    References: Oren et al. 2024, "Transformers are Multi-State RNNs", arXiv:2401.06104.
    """

    def measure(self, trace: Trace) -> Scores:
        """Attention weight from the last query, averaged over the query heads."""
        last = received_mass(trace, trace.prefix_len - 1)
        heads = [queries.shape[1] for queries in trace.queries]
        return [(m.sum(1, keepdim=True) / count).expand_as(m) for m, count in zip(last, heads, strict=True)]
