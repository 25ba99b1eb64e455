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
from kvcat.cache.compact import CompactCache
from kvcat.cache.fingerprint import fingerprint
from kvcat.cache.first_tokens import (
    FirstSlots,
    count_before,
    document_digests,
    first_ids,
    first_slots,
)
from kvcat.cache.forward import CACHE_NAME, PrefixCache, cache_argument
from kvcat.cache.heads import HeadGrid, HeadSlots
from kvcat.cache.layers import PrefixLayer, layer_windows, recurrent_layers, state_layers
from kvcat.cache.quantized import QuantizedLayer
from kvcat.cache.record import CacheRecord
from kvcat.cache.recurrence import continue_states
from kvcat.cache.rope import Factors, held_factors, rope_border, rope_factors
from kvcat.cache.slots import CompactLayer, Layer, RaggedLayer
from kvcat.cache.states import LayerState
from kvcat.cache.token_ids import check_batch_of_ids, check_token_ids

__all__ = [
    "BITS",
    "CACHE_NAME",
    "CacheRecord",
    "CompactCache",
    "CompactLayer",
    "Factors",
    "FirstSlots",
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
    "document_digests",
    "fingerprint",
    "first_ids",
    "first_slots",
    "held_factors",
    "key_groups",
    "layer_windows",
    "most_bytes_per_slot",
    "parse_bits",
    "recurrent_layers",
    "rope_border",
    "rope_factors",
    "round_values",
    "state_layers",
]  # fmt: skip
