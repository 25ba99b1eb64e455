"""Attention to a compact document next to an engine's pages, and the merge of the two.

A document is read-only. Its slots are not in the engine's pages: they are in memory once, head
after head, without padding, and all requests that name the document read them. Question and answer
are in the pages, at positions from 0, and the document's keys are rotated by minus its length. With
the log-sum-exp l of the scores over the document and over the pages, the attention over both is

    o = (e^{l_document} o_document + e^{l_pages} o_pages) / (e^{l_document} + e^{l_pages}).

This module needs torch alone and is independent of any engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from kvcat.types import Float, Int, Tensor

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


# On a CPU one call costs as much as the attention of one head over some hundred slots. Up to these
# numbers, found by benchmark, one call for all heads with masked scores is faster than several.
_JOINT_SLOTS = 640
_JOINT_SCORES = 7200  # of slots times the queries of a head
_JOINT_MEMORY = 0.025  # of the masks, relative to keys and values


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
        tensors = (self.keys, self.values, self.log_bias, self.seen_until, self.joint_mask)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @cached_property
    def heads(self) -> "list[_Head]":
        """Views of the slots of every head."""
        heads = []
        start = 0
        for count in self.counts:
            slots = slice(start, start + count)
            start += count
            bias = None if self.log_bias is None else self.log_bias[None, None, None, slots]
            until = None if self.seen_until is None else self.seen_until[slots]
            heads.append(
                _Head(self.keys[None, None, slots], self.values[None, None, slots], bias, until)
            )
        return heads

    @cached_property
    def joint_mask(self) -> Float[Tensor, "one kv_heads one_more slots"] | None:
        """What makes one call for all heads right: the log-bias of a head's slots, -inf for others.

        None where one call for every head is better.
        """
        slot_bytes = 2 * self.keys.shape[1] * self.keys.itemsize
        is_masked = mask_bytes(len(self.counts), len(self.keys), slot_bytes) > 0
        if self.keys.device.type != "cpu" or self.seen_until is not None or not is_masked:
            return None
        heads = torch.arange(len(self.counts))
        is_own = heads.repeat_interleave(torch.tensor(self.counts)) == heads[:, None]
        bias = torch.tensor(0.0) if self.log_bias is None else self.log_bias
        return torch.where(is_own, bias, -torch.inf)[None, :, None]


class _Head(NamedTuple):
    """The slots of one KV head, with the axes that attention wants."""

    keys: Float[Tensor, "one one_more slots head_dim"]
    values: Float[Tensor, "one one_more slots head_dim"]
    log_bias: Float[Tensor, "one one_more and_one slots"] | None
    seen_until: Int[Tensor, " slots"] | None


def mask_bytes(num_heads: int, num_slots: int, slot_bytes: int) -> int:
    """Bytes of the mask of a layer on a CPU; 0 if it has none.

    Args:
        num_heads, num_slots: of the layer.
        slot_bytes: of the key and the value of a slot.
    """
    is_small = num_slots <= _JOINT_SLOTS and 4 * num_heads <= _JOINT_MEMORY * slot_bytes
    return 4 * num_heads * num_slots if is_small else 0


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
    group, head_dim = queries.shape[2:]
    flat = queries.reshape(len(queries), -1, head_dim)  # (kv_heads, tokens * group, head_dim)
    outputs = []
    log_masses = []
    for layer, start, stop in documents:
        of_document = flat[:, start * group : stop * group]
        output, log_mass = _attend_document(of_document, layer, positions[start:stop], scale)
        outputs.append(output)
        log_masses.append(log_mass)
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
    log_mass = log_masses[0] if len(log_masses) == 1 else torch.cat(log_masses, dim=1)
    return output.view(queries.shape), log_mass.view(queries.shape[:3])


def _attend_document(
    queries: Float[Tensor, "kv_heads queries head_dim"],
    layer: DocumentLayer,
    positions: Int[Tensor, " tokens"],
    scale: float,
) -> tuple[Float[Tensor, "kv_heads queries head_dim"], Float[Tensor, "kv_heads queries"]]:
    """``attend_documents`` to one document."""
    mask = layer.joint_mask
    if mask is not None and len(layer.keys) * queries.shape[1] <= _JOINT_SCORES:
        shape = (1, len(queries), *layer.keys.shape)
        output, log_mass = _FLASH(
            queries[None],
            layer.keys.expand(shape),
            layer.values.expand(shape),
            attn_mask=mask,
            scale=scale,
        )
        return output[0], log_mass[0]
    of_heads = [
        _attend_head(of_head, head, positions, scale)
        for of_head, head in zip(queries, layer.heads, strict=True)
    ]
    return torch.cat([output for output, _ in of_heads]), torch.cat([mass for _, mass in of_heads])


def _attend_head(
    queries: Float[Tensor, "queries head_dim"],
    head: _Head,
    positions: Int[Tensor, " tokens"],
    scale: float,
) -> tuple[Float[Tensor, "one queries head_dim"], Float[Tensor, "one queries"]]:
    """Attention of one KV head's queries, and the log-sum-exp of their scores."""
    if queries.device.type == "cpu" and head.seen_until is None:
        # the operator wants four axes and a last one that is contiguous
        output, log_mass = _FLASH(
            queries[None, None], head.keys, head.values, attn_mask=head.log_bias, scale=scale
        )
        return output[0], log_mass[0]
    scores = queries.float() @ head.keys[0, 0].float().mT * scale
    if head.log_bias is not None:
        scores = scores + head.log_bias[0, 0]
    if head.seen_until is not None:
        group = len(queries) // len(positions)
        is_seen = positions.repeat_interleave(group)[:, None] < head.seen_until
        scores = scores.masked_fill(~is_seen, -torch.inf)
    log_mass = scores.logsumexp(-1)
    weights = (scores - log_mass[:, None].clamp_min(torch.finfo(scores.dtype).min)).exp()
    return (weights @ head.values[0, 0].float()).to(queries.dtype)[None], log_mass[None]


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
    return torch.lerp(pages, document, share.to(pages.dtype))
