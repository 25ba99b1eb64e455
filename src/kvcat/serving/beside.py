"""Attention to a compact document beside an engine's pages, and the merge of the two.

A document is read-only. Its slots are not in the engine's pages: they are in memory once, head
after head, without padding, and all requests that name the document read them. Question and answer
are in the pages, at positions from 0, and the document's keys are rotated by minus its length. With
the log-sum-exp l of the scores over the document and over the pages, the attention over both is

    o = (e^{l_document} o_document + e^{l_pages} o_pages) / (e^{l_document} + e^{l_pages}).

This module needs torch alone and knows no engine.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from kvcat.types import Float, Int, Tensor, UInt8


# On a CPU one call costs as much as the attention of one head over some hundred slots. Up to these
# numbers, found by benchmark, one call for all heads with masked scores is faster than one for each.
_JOINT_SLOTS = 640
_JOINT_SCORES = 7200  # of slots times the queries of a head


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

    @cached_property
    def head_of_slot(self) -> UInt8[Tensor, " slots"]:
        """The KV head that each slot belongs to, in bytes."""
        heads = torch.arange(len(self.counts), dtype=torch.uint8)
        return heads.repeat_interleave(torch.tensor(self.counts)).to(self.keys.device)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors = (self.keys, self.values, self.log_bias, self.seen_until, self.head_of_slot)
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
    is_joint = (
        queries.device.type == "cpu"
        and layer.seen_until is None
        and len(layer.keys) <= _JOINT_SLOTS
        and len(layer.keys) * flat.shape[1] <= _JOINT_SCORES
    )
    if is_joint:
        outputs, log_masses = _attend_jointly(flat, layer, scale)
        return outputs.view(queries.shape), log_masses.view(queries.shape[:3])
    of_heads = []
    start = 0
    for head, count in enumerate(layer.counts):
        slots = slice(start, start + count)
        start += count
        bias = None if layer.log_bias is None else layer.log_bias[slots]
        if layer.seen_until is not None:
            is_seen = positions.repeat_interleave(group)[:, None] < layer.seen_until[slots]
            bias = torch.where(is_seen, 0.0 if bias is None else bias, -torch.inf)
        of_heads.append(
            _attend_head(flat[head], layer.keys[slots], layer.values[slots], bias, scale)
        )
    outputs = torch.stack([output for output, _ in of_heads])
    log_masses = torch.stack([log_mass for _, log_mass in of_heads])
    return outputs.view(queries.shape), log_masses.view(queries.shape[:3])


def _attend_jointly(
    queries: Float[Tensor, "kv_heads queries head_dim"], layer: LayerBeside, scale: float
) -> tuple[Float[Tensor, "kv_heads queries head_dim"], Float[Tensor, "kv_heads queries"]]:
    """Attention of all KV heads in one call: a head sees all slots, those of others with a bias of
    -inf.
    """
    num_slots, head_dim = layer.keys.shape
    shape = (1, len(queries), num_slots, head_dim)
    bias = 0.0 if layer.log_bias is None else layer.log_bias
    is_own = layer.head_of_slot == torch.arange(len(queries), dtype=torch.uint8)[:, None]
    mask = torch.where(is_own, bias, -torch.inf)  # (kv_heads, slots)
    outputs, log_masses = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries[None],
        layer.keys.expand(shape),
        layer.values.expand(shape),
        attn_mask=mask[None, :, None],
        scale=scale,
    )
    return outputs[0], log_masses


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
