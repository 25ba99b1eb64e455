"""Attention to a compact document beside an engine's pages, and the merge of the two.

A document is read-only. Its slots are not in the engine's pages: they are in memory once, head
after head, without padding, and all requests that name the document read them. Question and answer
are in the pages, at positions from 0, and the document's keys are rotated by minus its length. With
the log-sum-exp l of the scores over the document and over the pages, the attention over both is

    o = (e^{l_document} o_document + e^{l_pages} o_pages) / (e^{l_document} + e^{l_pages}).

This module needs torch alone and knows no engine.
"""

from dataclasses import dataclass

import torch

from kvcat.types import Float, Int, Tensor


@dataclass(frozen=True, eq=False)
class LayerBeside:
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


def attend_document(
    queries: Float[Tensor, "kv_heads tokens group head_dim"],
    layer: LayerBeside,
    positions: Int[Tensor, " tokens"],
    *,
    scale: float,
) -> tuple[Float[Tensor, "kv_heads tokens group head_dim"], Float[Tensor, "kv_heads tokens group"]]:
    """Attention of the tokens of all requests that name a document, over its slots alone.

    Args:
        queries: by KV head.
        layer: of the document.
        positions: of the tokens in their texts, from 0.
        scale: factor on q.k.

    Returns:
        outputs, and the log-sum-exp of the scores in float32; where a token sees no slot, 0 and
        -inf.
    """
    num_tokens, group, head_dim = queries.shape[1:]
    flat = queries.reshape(len(queries), num_tokens * group, head_dim)
    outputs = torch.empty_like(flat)
    log_masses = flat.new_empty(flat.shape[:2], dtype=torch.float32)
    start = 0
    for head, count in enumerate(layer.counts):
        slots = slice(start, start + count)
        start += count
        bias = None if layer.log_bias is None else layer.log_bias[slots]
        if layer.seen_until is not None:
            is_seen = positions.repeat_interleave(group)[:, None] < layer.seen_until[slots]
            bias = torch.where(is_seen, 0.0 if bias is None else bias, -torch.inf)
        outputs[head], log_masses[head] = _attend_head(
            flat[head], layer.keys[slots], layer.values[slots], bias, scale
        )
    return outputs.view(queries.shape), log_masses.view(queries.shape[:3])


def _attend_head(
    queries: Float[Tensor, "queries head_dim"],
    keys: Float[Tensor, "slots head_dim"],
    values: Float[Tensor, "slots head_dim"],
    bias: Float[Tensor, "... slots"] | None,
    scale: float,
) -> tuple[Float[Tensor, "queries head_dim"], Float[Tensor, " queries"]]:
    """Attention of one KV head's queries, and the log-sum-exp of their scores."""
    if queries.device.type == "cpu" and (bias is None or bias.dim() == 1):
        # the operator wants four axes and a last one that is contiguous
        mask = None if bias is None else bias[None, None, None]
        output, log_mass = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries[None, None], keys[None, None], values[None, None], attn_mask=mask, scale=scale
        )
        return output[0, 0], log_mass.flatten()
    scores = queries.float() @ keys.float().mT * scale
    if bias is not None:
        scores = scores + bias
    log_mass = scores.logsumexp(-1)
    weights = (scores - log_mass[:, None].clamp_min(torch.finfo(scores.dtype).min)).exp()
    return (weights @ values.float()).to(queries.dtype), log_mass


def merge(
    pages: Float[Tensor, "*rows head_dim"],
    log_mass_of_pages: Float[Tensor, "*rows"],
    document: Float[Tensor, "*rows head_dim"],
    log_mass_of_document: Float[Tensor, "*rows"],
) -> Float[Tensor, "*rows head_dim"]:
    """The attention over pages and document, from the attention over each.

    The pages hold at least the token itself, so that their log-sum-exp is finite.
    """
    share = torch.sigmoid(log_mass_of_document - log_mass_of_pages).unsqueeze(-1)
    return pages + (document - pages) * share.to(pages.dtype)
