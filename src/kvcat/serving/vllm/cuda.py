"""vLLM's FlashAttention, with documents next to its pages. No kernel is ours.

One call attends to the pages of all rows and returns the log-sum-exp. One call for each document
attends to its slots: every KV head is a sequence of its own, as long as it has slots. Two more
channels of the keys hold the log-bias, divided by the scale: [k, high, low, 0...] with high + low =
log_bias / scale, and the queries have ones there. ``merge_attn_states`` merges both.
"""

# pyright: reportMissingImports=false

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.ops.merge_attn_states import merge_attn_states

from kvcat.attention.kernels import EXTRA_CHANNELS, extend_keys
from kvcat.serving.document_attention import DocumentLayer, attend_documents
from kvcat.serving.vllm.connector import layer_number, reserved_bytes
from kvcat.serving.vllm.worker import WORKER, Rows
from kvcat.types import Float, Int, Tensor

_MOST_CHANNELS = 256  # of a head in FlashAttention


@dataclass(frozen=True, eq=False)
class FlashLayer:
    """The slots of a document in one layer, as FlashAttention reads them.

    Args:
        keys: head after head, with the log-bias in more channels.
        values: with as many channels.
        starts: the first slot of every head, and the end of the last one; int32.
        most: slots of the fullest head.
        head_dim: channels without the others.
    """

    keys: Float[Tensor, "slots one channels"]
    values: Float[Tensor, "slots one channels"]
    starts: Int[Tensor, " heads_and_one"]
    most: int
    head_dim: int

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.keys.nbytes + self.values.nbytes + self.starts.nbytes

    @staticmethod
    def of(layer: DocumentLayer, scale: float) -> "FlashLayer":
        """The layer with its log-bias in channels."""
        keys = layer.keys[None, None]  # (batch, kv_heads, slots, head_dim)
        bias = layer.log_bias
        if bias is None:
            bias = torch.zeros(keys.shape[2], device=keys.device)
        wide = extend_keys(keys, bias[None, None], scale)[0, 0]
        counts = torch.tensor([0, *layer.counts], device=keys.device)
        return FlashLayer(
            wide[:, None].contiguous(),
            pad(layer.values, (0, EXTRA_CHANNELS))[:, None].contiguous(),
            counts.cumsum(0).to(torch.int32),
            max(layer.counts),
            layer.keys.shape[-1],
        )


def attend_flash(
    queries: Float[Tensor, "kv_heads tokens group head_dim"],
    layer: FlashLayer,
    *,
    scale: float,
    version: int,
) -> tuple[Float[Tensor, "kv_heads tokens group head_dim"], Float[Tensor, "kv_heads tokens group"]]:
    """``attend_documents`` by one call of FlashAttention.

    Args:
        queries: by KV head.
        layer: of the document.
        scale: factor on q.k.
        version: of FlashAttention.
    """
    num_heads, num_tokens, group, head_dim = queries.shape
    ones = queries.new_ones(*queries.shape[:-1], EXTRA_CHANNELS)
    wide = torch.cat([queries, ones], dim=-1).flatten(0, 1)  # (kv_heads * tokens, group, channels)
    starts = torch.arange(num_heads + 1, dtype=torch.int32, device=queries.device) * num_tokens
    output, log_mass = flash_attn_varlen_func(
        q=wide,
        k=layer.keys,
        v=layer.values,
        cu_seqlens_q=starts,
        cu_seqlens_k=layer.starts,
        max_seqlen_q=num_tokens,
        max_seqlen_k=layer.most,
        softmax_scale=scale,
        causal=False,
        return_softmax_lse=True,
        fa_version=version,
    )
    outputs = output[..., :head_dim].view(queries.shape)
    # (group, kv_heads * tokens)
    return outputs, log_mass.T.view(num_heads, num_tokens, group)


class DocumentsImpl(FlashAttentionImpl):
    """Attention over the pages, and over the documents that rows name."""

    # with FP8 pages, queries would be in 8 bits as well
    page_dtypes = ("auto", "float16", "bfloat16", "float32")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.reserved_bytes = reserved_bytes(get_current_vllm_config_or_none())

    def prepare(self, layer: DocumentLayer) -> Any:
        """A document's layer in the form that ``forward`` reads."""
        is_wide = self.head_size + EXTRA_CHANNELS > _MOST_CHANNELS
        if layer.seen_until is not None or is_wide:
            return layer
        return FlashLayer.of(layer, self.scale)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *args: Any,
        **options: Any,
    ) -> Tensor:
        """Attention of all rows, in ``output``."""
        rows = None
        if attn_metadata is None:
            if self.reserved_bytes:
                WORKER.hold_reserve(self.reserved_bytes, query.device)
        elif not WORKER.is_idle:
            rows = _rows_of(layer.layer_name, attn_metadata)
        if rows is None or attn_metadata is None:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *args, **options
            )
        count = attn_metadata.num_actual_tokens
        pages, pages_mass = self._attend_pages(query[:count], kv_cache, attn_metadata)
        output[:count] = pages
        by_head = query.index_select(0, rows.tokens).view(
            -1, self.num_kv_heads, self.num_queries_per_kv, self.head_size
        )
        queries = by_head.transpose(0, 1).contiguous()  # (kv_heads, tokens, group, head_dim)
        attended = torch.empty_like(queries)
        mass = queries.new_empty(queries.shape[:3], dtype=torch.float32)
        number = layer_number(layer.layer_name)
        for document in rows.documents:
            tokens = slice(document.start, document.stop)
            held = WORKER.layers[document.digest][number]
            if isinstance(held, FlashLayer):
                attended[:, tokens], mass[:, tokens] = attend_flash(
                    queries[:, tokens], held, scale=self.scale, version=self.vllm_flash_attn_version
                )
            else:
                attended[:, tokens], mass[:, tokens] = attend_documents(
                    queries[:, tokens],
                    [(held, 0, document.stop - document.start)],
                    rows.positions[tokens],
                    scale=self.scale,
                )
        shape = (len(rows.tokens), self.num_heads, self.head_size)
        merged = output.new_empty(shape)
        merge_attn_states(
            merged,
            attended.transpose(0, 1).reshape(shape),
            mass.permute(0, 2, 1).reshape(self.num_heads, -1).contiguous(),
            pages.index_select(0, rows.tokens).contiguous(),
            pages_mass.index_select(1, rows.tokens).contiguous(),
        )
        output.index_copy_(0, rows.tokens, merged.view(-1, *output.shape[1:]))
        return output

    def _attend_pages(
        self, query: Tensor, kv_cache: Tensor, metadata: Any
    ) -> tuple[Tensor, Tensor]:
        """Attention of all rows over their pages, and the log-sum-exp (heads, tokens)."""
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        starts = metadata.query_start_loc
        window = None if self.sliding_window[0] < 0 else list(self.sliding_window)
        return flash_attn_varlen_func(
            q=query,
            k=keys,
            v=values,
            cu_seqlens_q=starts,
            max_seqlen_q=metadata.max_query_len,
            seqused_k=metadata.seq_lens,
            max_seqlen_k=metadata.max_seq_len,
            softmax_scale=self.scale,
            causal=True,
            window_size=window,
            block_table=metadata.block_table,
            return_softmax_lse=True,
            fa_version=self.vllm_flash_attn_version,
        )


class DocumentsBuilder(FlashAttentionMetadataBuilder):
    """vLLM's metadata, without the common prefix of a batch: rows have different documents."""

    def use_cascade_attention(self, *args: Any, **options: Any) -> bool:
        """False if rows may have documents."""
        may_have = self.vllm_config.kv_transfer_config is not None
        return not may_have and super().use_cascade_attention(*args, **options)


class DocumentsBackend(FlashAttentionBackend):
    """vLLM's FlashAttention, with documents."""

    @staticmethod
    def get_impl_cls() -> type[DocumentsImpl]:
        """The attention of a layer."""
        return DocumentsImpl

    @staticmethod
    def get_builder_cls() -> type[DocumentsBuilder]:
        """What makes the metadata."""
        return DocumentsBuilder


def _rows_of(layer_name: str, metadata: Any) -> Rows | None:
    """The rows of a step with documents, found by the first layer of a group."""
    if not hasattr(metadata, "kvcat_rows"):
        metadata.kvcat_rows = WORKER.rows(
            WORKER.group_of_layer[layer_name],
            metadata.block_table[:, 0].tolist(),
            metadata.query_start_loc.tolist(),
            metadata.seq_lens.tolist(),
            metadata.block_table.device,
        )
    return metadata.kvcat_rows
