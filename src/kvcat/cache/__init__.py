"""Compact caches: the prefix in few slots, on disk and in transformers."""

from kvcat.cache.compact import CompactCache, next_turn
from kvcat.cache.fingerprint import fingerprint
from kvcat.cache.layers import PrefixLayer
from kvcat.cache.slots import CompactLayer, Head, Layer, RaggedLayer
from kvcat.cache.windows import layer_windows

__all__ = [
    "CompactCache", "CompactLayer", "Head", "Layer", "PrefixLayer", "RaggedLayer", "fingerprint", "layer_windows",
    "next_turn",
]  # fmt: skip
