"""Compact caches: the prefix in few slots, on disk and in transformers."""

from kvcat.cache.carrying import CarriedSlots, attach_log_bias, carried_by, log_bias_of
from kvcat.cache.compact import CompactCache, next_turn
from kvcat.cache.fingerprint import fingerprint
from kvcat.cache.layers import PrefixLayer
from kvcat.cache.slots import CompactLayer, Head, Layer, RaggedLayer
from kvcat.cache.windows import layer_windows

__all__ = [
    "CarriedSlots", "CompactCache", "CompactLayer", "Head", "Layer", "PrefixLayer", "RaggedLayer", "attach_log_bias",
    "carried_by", "fingerprint", "layer_windows", "log_bias_of", "next_turn",
]  # fmt: skip
