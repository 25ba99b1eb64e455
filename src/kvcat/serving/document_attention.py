"""Attention to compact documents next to an engine's pages.

A document is read-only. Its slots are not in the engine's pages: they are in memory once, head
after head, without padding, and all requests that name the document read them. Question and answer
are in the pages, at positions from 0, and the document's keys are rotated by minus its length. With
the log-sum-exp l of the scores over the document and over the pages, the attention over both is

    o = (e^{l_document} o_document + e^{l_pages} o_pages) / (e^{l_document} + e^{l_pages})
      = o_pages + share (o_document - o_pages),  share = sigmoid(l_document - l_pages).

This module needs torch alone and is independent of any engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch

from kvcat.types import Float, Int, Tensor


@dataclass(frozen=True, eq=False)
class DocumentLayer:
    """The slots of a document in one layer; of a tensor-parallel worker, those of its heads.

    Args:
        keys: head after head, rotated to positions before 0.
        values: as the keys.
        log_bias: nats, float32; None: none.
        counts: slots of every KV head.
        seen_until: of a layer with a sliding window: the first position of the text from which on a
            slot is outside the window; None: all slots are visible.
    """

    keys: Float[Tensor, "slots head_dim"]
    values: Float[Tensor, "slots head_dim"]
    log_bias: Float[Tensor, " slots"] | None
    counts: tuple[int, ...]
    seen_until: Int[Tensor, " slots"] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors = (self.keys, self.values, self.log_bias, self.seen_until)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first slot of every KV head, and the end of the last one."""
        return (0, *accumulate(self.counts))


def attend_documents(
    queries: Float[Tensor, "kv_heads tokens group head_dim"],
    documents: Sequence[tuple[DocumentLayer, int, int]],
    positions: Int[Tensor, " tokens"],
    *,
    scale: float,
) -> tuple[Float[Tensor, "kv_heads tokens group head_dim"], Float[Tensor, "kv_heads tokens group"]]:
    """Attention of tokens to the slots of the documents that their requests name.

    Args:
        queries: by KV head.
        documents: a layer, and which of the tokens read it: one after the other, all of them.
        positions: of the tokens in their texts, from 0.
        scale: factor on q.k.

    Returns:
        outputs, and the log-sum-exp of the scores in float32; where a token sees no slot, 0 and
        -inf.
    """
    outputs = torch.empty_like(queries)
    log_masses = queries.new_empty(queries.shape[:3], dtype=torch.float32)
    for layer, start, stop in documents:
        tokens = slice(start, stop)
        for head, (first, end) in enumerate(pairwise(layer.starts)):
            slots = slice(first, end)
            scores = queries[head, tokens].float() @ layer.keys[slots].float().mT * scale
            if layer.log_bias is not None:
                scores = scores + layer.log_bias[slots]
            if layer.seen_until is not None:
                is_seen = positions[tokens, None, None] < layer.seen_until[slots]
                scores = scores.masked_fill(~is_seen, -torch.inf)
            log_mass = scores.logsumexp(-1)
            lowest = torch.finfo(scores.dtype).min  # -inf where a token sees no slot
            weights = (scores - log_mass[..., None].clamp_min(lowest)).exp()
            outputs[head, tokens] = (weights @ layer.values[slots].float()).to(queries.dtype)
            log_masses[head, tokens] = log_mass
    return outputs, log_masses
