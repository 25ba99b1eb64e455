"""Pages of vLLM's key-value cache: which cells hold a request's slots, and writing them.

A page is a block of cells of one layer. vLLM's attention implementations write keys and values of
given cells themselves (``do_kv_cache_update``), so this module only has to know that the pages have
a layout for which they do.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from kvcat.errors import InputError
from kvcat.serving.prefix import LayerStates
from kvcat.types import Int, Tensor

NULL_BLOCK = 0  # for cells that no query sees any more: vLLM keeps none


class SlotsInCells(NamedTuple):
    """Slots of a cache, and the cell of each in the pages of some layers."""

    slots: Int[Tensor, " slots"]
    cells: Int[Tensor, " slots"]


def cells_of(block_ids: Sequence[int], start: int, stop: int, block_size: int) -> SlotsInCells:
    """The cells of slots ``start`` to ``stop``, which are the request's first tokens.

    Slots that are outside the layers' sliding window have no cells and are left out.

    Args:
        block_ids: blocks of the request in these layers.
        start, stop: slots.
        block_size: cells of a block.
    """
    slots = torch.arange(start, stop)
    blocks = torch.tensor(block_ids)[slots // block_size]
    is_kept = blocks != NULL_BLOCK
    cells = blocks * block_size + slots % block_size
    return SlotsInCells(slots[is_kept], cells[is_kept])


def check_pages(
    name: str, shape: Sequence[int], *, num_kv_heads: int, head_dim: int, block_size: int
) -> None:
    """Reject pages whose layout is not one of those of vLLM 0.32 and 0.33, or earlier.

    - (blocks, heads, cells, 2 * head_dim): keys, then values, of a cell
    - (2, blocks, cells, heads, head_dim) and (blocks, 2, cells, heads, head_dim)

    Args:
        name: name of the layer.
        shape: of its pages.
        num_kv_heads, head_dim: of the layer.
        block_size: cells of a block; an attention implementation may divide blocks.

    Raises:
        InputError: another layout.
    """
    sizes = tuple(shape)
    num_cells = 0
    if (len(sizes) == 4 and (sizes[1], sizes[3]) == (num_kv_heads, 2 * head_dim)) or (
        len(sizes) == 5 and 2 in sizes[:2] and sizes[3:] == (num_kv_heads, head_dim)
    ):
        num_cells = sizes[2]
    if num_cells < 1 or block_size % num_cells:
        raise InputError(
            f"compact caches are not written into pages of shape {sizes} (layer {name}, "
            f"{num_kv_heads} heads of {head_dim} channels, blocks of {block_size}): this version "
            "of vLLM, or its attention backend, has a layout that is not known"
        )


def write_slots(layer: Any, states: LayerStates, places: SlotsInCells, dtype: torch.dtype) -> None:
    """Write slots of a cache into the cells of one layer.

    Args:
        layer: vLLM's attention layer.
        states: keys and values of all slots of the cache in this layer.
        places: which slots to write, and where.
        dtype: of the pages.
    """
    pages = layer.kv_cache
    keys, values = (
        # (kv_heads, slots, channels) to (slots to write, kv_heads, channels)
        tensor[:, places.slots].transpose(0, 1).to(pages.device, dtype).contiguous()
        for tensor in states
    )
    cells = places.cells.to(pages.device)
    layer.impl.do_kv_cache_update(layer, keys, values, pages, cells)
