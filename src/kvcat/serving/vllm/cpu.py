"""vLLM's attention on a CPU, with documents next to its pages.

vLLM's kernel attends to the pages and returns no log-sum-exp. Ours attends to the documents,
computes that of the pages from their keys, and returns how much of the sum is the document's.
"""

# pyright: reportMissingImports=false

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from kvcat.serving.document_attention import DocumentLayer
from kvcat.serving.vllm.connector import layer_number, reserved_bytes
from kvcat.serving.vllm.worker import WORKER
from kvcat.types import Tensor

_SECTION = 16  # tokens of a document that one thread attends with
# of the codes in pages, by vLLM's names; vLLM truncates numbers, and writes no infinity and no NaN
_CODES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class _Plan:
    """What every layer of a group computes in a step.

    Args:
        tokens: of the batch, document after document.
        positions: of these tokens in their texts.
        tables: the blocks of each token's text.
        digests: of the document of every section of tokens.
        sections: the first token of every section, and the end of the last one.
    """

    tokens: np.ndarray
    positions: np.ndarray
    tables: np.ndarray
    digests: list[str]
    sections: np.ndarray


class DocumentsImpl(CPUAttentionBackendImpl):
    """Attention over the pages, and over the documents that rows name.

    Pages may have codes of 8 bits. Queries, outputs and documents have the model's numbers, and
    vLLM's kernel attends to the pages, so that only their keys are read here.
    """

    page_dtypes = ("auto", *_CODES)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.reserved_bytes = reserved_bytes(get_current_vllm_config())
        if self.reserved_bytes:  # other servers need no compiled functions
            from kvcat.serving import cpu_kernel

            self.kernel = cpu_kernel
            # from now on, because vLLM may measure its memory without a step of the model
            WORKER.hold_reserve(self.reserved_bytes, torch.device("cpu"))

    def prepare(self, layer: DocumentLayer) -> Any:
        """A document's layer in the form that ``forward`` reads."""
        return self.kernel.KernelLayer.of(layer)

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
        result = super().forward(
            layer, query, key, value, kv_cache, attn_metadata, output, *args, **options
        )
        if attn_metadata is None or WORKER.is_idle:
            return result
        plan = _plan_of(layer.layer_name, attn_metadata)
        if plan is not None:
            self._add_documents(layer, query, kv_cache, plan, output)
        return result

    def _add_documents(
        self, layer: Any, query: Tensor, kv_cache: Tensor, plan: _Plan, output: Tensor
    ) -> None:
        """Merge the attention over documents into the output of their rows."""
        number = layer_number(layer.layer_name)
        documents = [WORKER.layers[digest][number] for digest in plan.digests]
        num_bytes = query.itemsize
        num_page_bytes = kv_cache.itemsize
        self.kernel.attend(
            query.data_ptr(),
            query.stride(0) * num_bytes,
            output.data_ptr(),
            output.stride(0) * num_bytes,
            kv_cache.data_ptr(),
            kv_cache.stride(0) * num_page_bytes,
            kv_cache.stride(1) * num_page_bytes,
            self.kernel.kind_of(query.dtype),
            self.kernel.key_table(_CODES.get(self.kv_cache_dtype), _key_scale(layer)),
            self.num_queries_per_kv,
            np.float32(self.scale),
            self.sliding_window,
            _key_places(self, layer, query.dtype, kv_cache),
            plan.tokens,
            plan.positions,
            plan.tables,
            plan.sections,
            np.array([document.addresses for document in documents]),
            np.array([document.starts for document in documents]),
        )


class DocumentsBackend(CPUAttentionBackend):
    """vLLM's backend for CPUs, with documents."""

    @staticmethod
    def get_impl_cls() -> type[DocumentsImpl]:
        """The attention of a layer."""
        return DocumentsImpl


def _key_scale(layer: Any) -> float:
    """What vLLM divides a layer's keys by in pages of 8 bits: the checkpoint's scale, or 1."""
    return layer._k_scale_float  # noqa: SLF001 (vLLM's backends read it as well)


def _key_places(
    impl: DocumentsImpl, layer: Any, dtype: torch.dtype, kv_cache: Tensor
) -> np.ndarray:
    """Where a page of a head holds the channels of its keys, (head_dim, cells).

    The layout depends on the processor and on the types of numbers. Keys with one bit of their own
    number are written into a page with the kernel that the engine uses, bit after bit: whatever the
    cells hold, 0 and another number differ. All layers with pages of one form share the result.

    Args:
        impl: writes keys and values.
        layer: the attention layer.
        dtype: of the keys that the model computes.
        kv_cache: the layer's pages, (blocks, kv_heads, cells, 2 head_dim).

    Raises:
        RuntimeError: the first half of a page does not hold every key once.
    """
    form = (tuple(kv_cache.shape[1:]), dtype, kv_cache.dtype, layer.isa)
    if form not in _PLACES:
        _, num_heads, cells, width = kv_cache.shape
        num_keys = cells * width // 2
        pages = kv_cache.new_zeros(1, num_heads, cells, width)
        numbers = torch.arange(num_keys).view(cells, 1, -1)
        number_at = torch.zeros(num_keys, dtype=torch.long)
        for bit in range(num_keys.bit_length()):
            # with this factor, cells hold numbers near 1
            keys = (numbers >> bit & 1).expand(-1, num_heads, -1) * _key_scale(layer)
            keys = keys.to(dtype).contiguous()
            values = torch.zeros_like(keys)
            impl.do_kv_cache_update(layer, keys, values, pages, torch.arange(cells))
            number_at += (pages[0, 0].flatten()[:num_keys] != 0).long() << bit
        places = number_at.argsort()
        if not torch.equal(number_at[places], numbers.flatten()):
            raise RuntimeError(f"vLLM's pages for {layer.isa} have a layout that kvcat cannot read")
        in_order = places.view(cells, -1).T.contiguous()
        _PLACES[form] = impl.kernel.key_places(in_order.numpy())
    return _PLACES[form]


_PLACES: dict[Any, np.ndarray] = {}


def _plan_of(layer_name: str, metadata: Any) -> _Plan | None:
    """The plan of a step for the layers of a group, made by the first of them."""
    if not hasattr(metadata, "kvcat_plan"):
        metadata.kvcat_plan = _make_plan(layer_name, metadata)
    return metadata.kvcat_plan


def _make_plan(layer_name: str, metadata: Any) -> _Plan | None:
    blocks = metadata.block_table
    rows = WORKER.rows(
        WORKER.group_of_layer[layer_name],
        blocks[:, 0].tolist(),
        metadata.query_start_loc.tolist(),
        metadata.seq_lens.tolist(),
        blocks.device,
    )
    if rows is None:
        return None
    digests = []
    sections = []
    for document in rows.documents:
        of_document = range(document.start, document.stop, _SECTION)
        digests += [document.digest] * len(of_document)
        sections += of_document
    row_of_token = [row.number for row in rows.rows for _ in range(row.start, row.stop)]
    return _Plan(
        rows.tokens.numpy(),
        rows.positions.numpy(),
        blocks[row_of_token].numpy(),
        digests,
        np.array([*sections, len(row_of_token)]),
    )
