"""TOVA: what the last position attends to."""

from dataclasses import dataclass

from kvcat.compress.scorer import Scorer, Scores, received_mass
from kvcat.compress.trace import Trace


@dataclass(frozen=True)
class TOVA(Scorer):
    """Keeps, in all heads of a layer alike, the positions with the most attention from the prefix's last query.

    The attention weights are averaged over the layer's query heads; the last position competes as any other does. This
    is the published method on a prompt that is read in one pass. Read token by token, TOVA drops the position of least
    weight after every token beyond the number of slots: what an earlier query found useless is gone for good, and the
    weights are those among the survivors. Both keep the same when the prefix is one token longer than the slots.

    References: Oren et al. 2024, "Transformers are Multi-State RNNs", arXiv:2401.06104.
    """

    def measure(self, trace: Trace) -> Scores:
        """Attention weight from the last query, averaged over the query heads."""
        last = received_mass(trace, trace.prefix_len - 1)
        heads = [queries.shape[1] for queries in trace.queries]
        return [(m.sum(1, keepdim=True) / count).expand_as(m) for m, count in zip(last, heads, strict=True)]
