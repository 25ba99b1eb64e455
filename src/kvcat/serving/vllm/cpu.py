"""vLLM's attention on a CPU, with documents next to its pages.

Its kernel attends to the pages and returns no log-sum-exp. So this module computes that of the rows
with a document, from the keys in their pages, and merges the two attentions.
"""

# pyright: reportMissingImports=false

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from kvcat.serving.document_attention import attend_documents, merge
from kvcat.serving.vllm.connector import layer_number, reserved_bytes
from kvcat.serving.vllm.worker import WORKER, Rows
from kvcat.types import Bool, Float, Int, Tensor


@dataclass(frozen=True, eq=False)
class _OneTokenRows:
    """Rows with one new token each, and pages for similarly long texts.

    Args:
        places: of their tokens among those of all rows with documents.
        is_all: whether these are all of them, in order.
        blocks: of every row's pages.
        last: the cell of each row's token, numbered from its first page.
        page_size: cells of a page.
        masks: what ``hidden`` made, by window.
    """

    places: Int[Tensor, " rows"]
    is_all: bool
    blocks: Int[Tensor, "rows pages"]
    last: Int[Tensor, " rows"]
    page_size: int
    masks: dict[int, Tensor] = field(default_factory=dict)

    def hidden(self, window: int) -> Bool[Tensor, "rows one cells"]:
        """The cells that a row's token does not see; a window below 1 is none."""
        if window not in self.masks:
            cells = torch.arange(self.blocks.shape[1] * self.page_size)
            last = self.last[:, None]
            is_hidden = cells > last
            if window > 0:
                is_hidden |= cells <= last - window
            self.masks[window] = is_hidden[:, None]
        return self.masks[window]


class _LongRow(NamedTuple):
    """A row with several new tokens: a question, or a part of one."""

    places: slice
    blocks: Int[Tensor, " pages"]
    positions: Int[Tensor, " tokens"]


@dataclass(frozen=True)
class _Plan:
    """What every layer of a group computes in a step."""

    rows: Rows
    one_token: list[_OneTokenRows]
    long: list[_LongRow]


class DocumentsImpl(CPUAttentionBackendImpl):
    """Attention over the pages, and over the documents that rows name."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.reserved_bytes = reserved_bytes(get_current_vllm_config())

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
        if attn_metadata is None:
            if self.reserved_bytes:
                WORKER.hold_reserve(self.reserved_bytes, query.device)
            return result
        if WORKER.is_idle:
            return result
        plan = _plan_of(layer.layer_name, attn_metadata, kv_cache.shape[2])
        if plan is not None:
            self._add_documents(layer, query, kv_cache, plan, output)
        return result

    def _add_documents(
        self, layer: Any, query: Tensor, kv_cache: Tensor, plan: _Plan, output: Tensor
    ) -> None:
        """Merge the attention over documents into the output of their rows."""
        rows = plan.rows
        by_head = query.index_select(0, rows.tokens).view(
            -1, self.num_kv_heads, self.num_queries_per_kv, self.head_size
        )
        keys_of = _key_cells(self, layer, kv_cache)
        queries = by_head.transpose(0, 1).contiguous()  # (kv_heads, tokens, group, head_dim)
        pages_mass = self._mass_of_pages(by_head, queries, kv_cache, plan, keys_of)
        number = layer_number(layer.layer_name)
        documents = [
            (WORKER.layers[document.digest][number], document.start, document.stop)
            for document in rows.documents
        ]
        attended, mass = attend_documents(queries, documents, rows.positions, scale=self.scale)
        pages = output.index_select(0, rows.tokens).view(by_head.shape)
        both = merge(
            pages, pages_mass.transpose(0, 1), attended.transpose(0, 1), mass.transpose(0, 1)
        )
        output.index_copy_(0, rows.tokens, both.reshape(-1, *output.shape[1:]))

    def _mass_of_pages(
        self,
        by_head: Float[Tensor, "tokens kv_heads group head_dim"],
        queries: Float[Tensor, "kv_heads tokens group head_dim"],
        kv_cache: Tensor,
        plan: _Plan,
        keys_of: "_KeyCells",
    ) -> Float[Tensor, "kv_heads tokens group"]:
        """The log-sum-exp of the scores over the pages."""
        masses = queries.new_empty(queries.shape[:3], dtype=torch.float32)
        window = self.sliding_window
        for short in plan.one_token:
            keys = keys_of(kv_cache, short.blocks.flatten()).unflatten(0, short.blocks.shape)
            of_rows = by_head if short.is_all else by_head[short.places]
            of_rows = (of_rows.float() * self.scale).unsqueeze(1)
            scores = torch.matmul(of_rows, keys.float())  # (rows, pages, kv_heads, group, cells)
            scores = scores.permute(2, 0, 3, 1, 4).flatten(-2)
            scores.masked_fill_(short.hidden(window), -torch.inf)
            of_pages = scores.logsumexp(-1)
            if short.is_all:
                return of_pages
            masses[:, short.places] = of_pages
        for row in plan.long:
            keys = keys_of(kv_cache, row.blocks).float()  # (pages, kv_heads, head_dim, cells)
            keys = keys.permute(1, 2, 0, 3).flatten(-2)
            of_row = queries[:, row.places].float()  # (kv_heads, tokens, group, head_dim)
            scores = torch.matmul(of_row.flatten(1, 2), keys) * self.scale
            scores = scores.unflatten(1, of_row.shape[1:3])
            cells = torch.arange(keys.shape[-1])
            seen = cells <= row.positions[:, None]
            if window > 0:
                seen &= cells > row.positions[:, None] - window
            scores.masked_fill_(~seen[:, None], -torch.inf)
            masses[:, row.places] = scores.logsumexp(-1)
        return masses


class DocumentsBackend(CPUAttentionBackend):
    """vLLM's backend for CPUs, with documents."""

    @staticmethod
    def get_impl_cls() -> type[DocumentsImpl]:
        """The attention of a layer."""
        return DocumentsImpl


class _KeyCells:
    """Reads keys out of pages, whose layout depends on the processor.

    A page of a head holds ``cells`` keys and values. Numbered keys are written into a page with the
    kernel that the engine uses, and are looked for.

    Args:
        impl: writes keys and values.
        layer: the attention layer.
        kv_cache: its pages, (blocks, kv_heads, cells, 2 head_dim).
    """

    def __init__(self, impl: CPUAttentionBackendImpl, layer: Any, kv_cache: Tensor) -> None:
        _, num_heads, cells, width = kv_cache.shape
        head_dim = width // 2
        digit = 128  # numbers that all types of cells hold exactly
        pages = kv_cache.new_zeros(1, num_heads, cells, width)
        numbers = torch.arange(cells * head_dim).view(cells, 1, head_dim)
        number_of_cell = torch.zeros(cells * width, dtype=torch.long)
        factor = 1
        while factor <= cells * head_dim:
            keys = (numbers // factor % digit + 1).expand(-1, num_heads, -1).to(pages.dtype)
            values = torch.zeros_like(keys)
            impl.do_kv_cache_update(layer, keys.contiguous(), values, pages, torch.arange(cells))
            number_of_cell += pages[0, 0].flatten().long().sub(1) * factor
            factor *= digit
        is_key = pages[0, 0].flatten() > 0
        places = torch.empty(cells * head_dim, dtype=torch.long)
        places[number_of_cell[is_key]] = is_key.nonzero().flatten()
        self.places = places.view(cells, head_dim).T.contiguous()  # (head_dim, cells)
        steps = (
            int(self.places[1, 0] - self.places[0, 0]),
            int(self.places[0, 1] - self.places[0, 0]),
        )
        regular = self.places[0, 0] + (
            torch.arange(head_dim)[:, None] * steps[0] + torch.arange(cells) * steps[1]
        )
        self.steps = steps if torch.equal(regular, self.places) else None

    def __call__(
        self, kv_cache: Tensor, blocks: Int[Tensor, " blocks"]
    ) -> Float[Tensor, "blocks kv_heads head_dim cells"]:
        """The keys of some pages."""
        num_blocks, num_heads = kv_cache.shape[:2]
        if self.steps is None:
            flat = kv_cache.view(num_blocks, num_heads, -1).index_select(0, blocks)
            return flat[..., self.places]
        view = kv_cache.as_strided(
            (num_blocks, num_heads, *self.places.shape),
            (*kv_cache.stride()[:2], *self.steps),
            kv_cache.storage_offset() + int(self.places[0, 0]),
        )
        return view.index_select(0, blocks)


def _key_cells(impl: CPUAttentionBackendImpl, layer: Any, kv_cache: Tensor) -> _KeyCells:
    """How pages hold keys; all layers with pages of one form share it."""
    form = (tuple(kv_cache.shape[1:]), kv_cache.dtype)
    if form not in _FORMS:
        _FORMS[form] = _KeyCells(impl, layer, kv_cache)
    return _FORMS[form]


_FORMS: dict[Any, _KeyCells] = {}


def _plan_of(layer_name: str, metadata: Any, page_size: int) -> _Plan | None:
    """The plan of a step for the layers of a group, made by the first of them."""
    if not hasattr(metadata, "kvcat_plan"):
        metadata.kvcat_plan = _make_plan(layer_name, metadata, page_size)
    return metadata.kvcat_plan


def _make_plan(layer_name: str, metadata: Any, page_size: int) -> _Plan | None:
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
    buckets: dict[int, list[tuple[int, int, int]]] = {}
    long = []
    place = 0
    for row in rows.rows:
        count = row.stop - row.start
        num_pages = -(-row.length // page_size)
        if count == 1:
            # pages for up to twice as long a text are read with it
            bucket = 1 << (num_pages - 1).bit_length()
            buckets.setdefault(bucket, []).append((place, row.number, row.length))
        else:
            positions = torch.arange(row.length - count, row.length)
            pages = blocks[row.number, :num_pages].long()
            long.append(_LongRow(slice(place, place + count), pages, positions))
        place += count
    one_token = []
    for members in buckets.values():
        places, numbers, lengths = zip(*members, strict=True)
        num_pages = -(-max(lengths) // page_size)
        pages = blocks[list(numbers), :num_pages].long()
        last = torch.tensor(lengths) - 1
        # a row's unused pages are those of nobody, or of another text
        is_used = torch.arange(num_pages) * page_size <= last[:, None]
        pages = torch.where(is_used, pages, 0)
        is_all = list(places) == list(range(len(rows.tokens)))
        one_token.append(_OneTokenRows(torch.tensor(places), is_all, pages, last, page_size))
    return _Plan(rows, one_token, long)
