"""Places compact documents next to an engine's pages: keys rotated to positions before 0, the slots
of a worker's heads, in the engine's dtype and on its device.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from kvcat.cache import CompactCache, HeadGrid, HeadSlots, layer_windows
from kvcat.compress.compose import check_states, slots_behind
from kvcat.errors import InputError
from kvcat.models.rotation import KeyRotation
from kvcat.serving.document_attention import DocumentLayer
from kvcat.types import Tensor

_HIDDEN = 8  # channels of what has no part in the rotation


@dataclass(frozen=True)
class Share:
    """The KV heads of one of several tensor-parallel workers.

    Args:
        rank, size: number of the worker, and of all workers.
    """

    rank: int = 0
    size: int = 1

    def heads(self, num_kv_heads: int) -> range:
        """The numbers of the worker's heads; if there are more workers than heads, they share."""
        if self.size >= num_kv_heads:
            head = self.rank * num_kv_heads // self.size
            return range(head, head + 1)
        each = num_kv_heads // self.size
        return range(self.rank * each, (self.rank + 1) * each)


def num_bytes(
    counts: Sequence[Sequence[int]], head_dim: int, dtype: torch.dtype, *, biased: bool, size: int
) -> int:
    """Bytes of a document in the memory of the worker with the most of it.

    Args:
        counts: slots of every layer and KV head.
        head_dim: channels.
        dtype: of keys and values.
        biased: whether slots have a log-bias.
        size: number of tensor-parallel workers.
    """
    slot_bytes = 2 * head_dim * dtype.itemsize + (4 if biased else 0)
    num_slots = [
        sum(layer[head] for layer in counts for head in Share(rank, size).heads(len(layer)))
        for rank in range(size)
    ]
    return slot_bytes * max(num_slots)


def rotation_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A model with the rotary embedding of a served one, and little else: one head, few
    channels.
    """
    small: Any = copy.deepcopy(config.get_text_config(decoder=True))
    head_dim = getattr(small, "head_dim", None) or small.hidden_size // small.num_attention_heads
    sizes = {
        "head_dim": head_dim,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "hidden_size": head_dim,
        "intermediate_size": _HIDDEN,
        "vocab_size": 8 * _HIDDEN,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    for name, value in sizes.items():
        setattr(small, name, value)
    return AutoModelForCausalLM.from_config(
        small, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def place(
    caches: Sequence[CompactCache],
    model: PreTrainedModel,
    *,
    share: Share,
    dtype: torch.dtype,
    device: torch.device,
) -> list[DocumentLayer]:
    """Every layer of one document, or of several one behind the other.

    The first document's first token is the attention sink of all: the slots of a later document's
    first token are left out, as in ``kvcat.compose`` without a seam.

    Args:
        caches: of the documents, one example each.
        model: what ``rotation_model`` made.
        share: heads of the worker.
        dtype: of keys and values.

    Raises:
        InputError: states of several documents, keys that cannot be rotated, or numbers that the
            dtype cannot hold.
    """
    check_states(model, caches)
    sections: dict[int, list[HeadGrid]] = {}
    behind = sum(cache.num_tokens for cache in caches)  # tokens from a document's start to its end
    for number, cache in enumerate(caches):
        rotation = KeyRotation(model, -behind)
        behind -= cache.num_tokens
        num_left_out = 0 if number == 0 else 1
        layers = slots_behind(cache, num_left_out, f"document {number + 1}", required=False)
        for layer, grid in zip(cache.layer_numbers, layers, strict=True):
            turned = [_turned(head, rotation, layer) for head in grid[0]]
            sections.setdefault(layer, []).append([turned])
    placed = {layer: _layer(grids, share, dtype, device) for layer, grids in sections.items()}
    windows = layer_windows(model.config)
    for layer, state in caches[0].states.items():
        rotation = KeyRotation(model, -caches[0].num_tokens)
        pairs = zip(state.tensors["keys"][0], state.tensors["values"][0], strict=True)
        grid = [[_turned(HeadSlots(keys, values), rotation, layer) for keys, values in pairs]]
        held = _layer([grid], share, dtype, device)
        placed[layer] = _in_window(held, windows[layer])
    return [placed[layer] for layer in sorted(placed)]


def _turned(head: HeadSlots, rotation: KeyRotation, layer: int) -> HeadSlots:
    keys = head.keys
    if len(keys):
        keys = rotation(keys[None, None], layer)[0, 0]
    return HeadSlots(keys, head.values, head.log_bias)


def _layer(
    grids: Sequence[HeadGrid], share: Share, dtype: torch.dtype, device: torch.device
) -> DocumentLayer:
    """One layer of the slots of all sections, one behind the other in every head."""
    chosen = share.heads(len(grids[0][0]))
    heads = [HeadSlots.joined([grid[0][head] for grid in grids]) for head in chosen]
    flat = HeadSlots.joined(heads)
    bias = flat.log_bias
    return DocumentLayer(
        keys=_in_dtype(flat.keys, dtype).to(device).contiguous(),
        values=_in_dtype(flat.values, dtype).to(device).contiguous(),
        log_bias=None if bias is None else bias.to(device, torch.float32).contiguous(),
        counts=tuple(len(head) for head in heads),
    )


def _in_window(layer: DocumentLayer, window: int | None) -> DocumentLayer:
    """The layer with the positions from which on the window has left each slot.

    A slot is ``distance`` tokens before the text; a token at position t sees the ``window`` tokens
    up to itself: t + distance < window.
    """
    if window is None:
        raise InputError("a layer without a sliding window has the state of one")
    count = layer.counts[0]
    distance = torch.arange(count, 0, -1, device=layer.keys.device)
    seen_until = (window - distance).repeat(len(layer.counts))
    return DocumentLayer(layer.keys, layer.values, layer.log_bias, layer.counts, seen_until)


def _in_dtype(states: Tensor, dtype: torch.dtype) -> Tensor:
    converted = states.to(dtype)
    if not converted.isfinite().all():
        raise InputError(
            f"keys or values up to {states.abs().max():.3g} do not fit in "
            f"{str(dtype).removeprefix('torch.')}"
        )
    return converted
