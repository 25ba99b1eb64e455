"""Compact caches: the prefix in few slots, on disk and in transformers."""

from kvcat.cache.adapters import check_no_adapters
from kvcat.cache.codes import (
    BITS,
    Grid,
    PackedHead,
    check_dims,
    key_groups,
    most_bytes_per_slot,
    parse_bits,
    round_values,
)
from kvcat.cache.compact import CompactCache, slot_facts
from kvcat.cache.fingerprint import fingerprint
from kvcat.cache.first_tokens import (
    FIRST_IDS,
    FIRST_SLOTS,
    count_before,
    document_digest,
    first_ids,
    first_slots,
    joined_first_ids,
    parse_first_ids,
)
from kvcat.cache.forward import CACHE_NAME, PrefixCache, cache_argument
from kvcat.cache.heads import HeadGrid, HeadSlots
from kvcat.cache.layers import PrefixLayer, layer_windows, recurrent_layers, state_layers
from kvcat.cache.quantized import QuantizedLayer
from kvcat.cache.recurrence import continue_states
from kvcat.cache.rope import Factors, held_factors, rope_border, rope_factors
from kvcat.cache.slots import CompactLayer, Layer, RaggedLayer
from kvcat.cache.states import LayerState
from kvcat.cache.token_ids import check_batch_of_ids, check_token_ids

__all__ = [
    "BITS",
    "CACHE_NAME",
    "FIRST_IDS",
    "FIRST_SLOTS",
    "CompactCache",
    "CompactLayer",
    "Factors",
    "Grid",
    "HeadGrid",
    "HeadSlots",
    "Layer",
    "LayerState",
    "PackedHead",
    "PrefixCache",
    "PrefixLayer",
    "QuantizedLayer",
    "RaggedLayer",
    "cache_argument",
    "check_batch_of_ids",
    "check_dims",
    "check_no_adapters",
    "check_token_ids",
    "continue_states",
    "count_before",
    "document_digest",
    "fingerprint",
    "first_ids",
    "first_slots",
    "held_factors",
    "joined_first_ids",
    "key_groups",
    "layer_windows",
    "most_bytes_per_slot",
    "parse_bits",
    "parse_first_ids",
    "recurrent_layers",
    "rope_border",
    "rope_factors",
    "round_values",
    "slot_facts",
    "state_layers",
]  # fmt: skip
