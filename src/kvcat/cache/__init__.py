"""Compact caches: the prefix in few slots, on disk and in transformers."""

from kvcat.cache.compact import CompactCache
from kvcat.cache.fingerprint import fingerprint
from kvcat.cache.layers import PrefixLayer, layer_windows
from kvcat.cache.slots import CompactLayer, Head, Layer, RaggedLayer

__all__ = [
    "CompactCache", "CompactLayer", "Head", "Layer", "PrefixLayer", "RaggedLayer", "fingerprint", "layer_windows",
]  # fmt: skip
