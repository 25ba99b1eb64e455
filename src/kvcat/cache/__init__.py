"""Compact caches: the prefix in few slots, on disk and in transformers."""

from kvcat.cache.compact import CompactCache
from kvcat.cache.fingerprint import fingerprint
from kvcat.cache.layers import PrefixLayer, layer_windows
from kvcat.cache.slots import CompactLayer, Head, Layer, RaggedLayer
from kvcat.cache.token_ids import check_token_ids

__all__ = [
    "CompactCache", "CompactLayer", "Head", "Layer", "PrefixLayer", "RaggedLayer", "check_token_ids", "fingerprint",
    "layer_windows",
]  # fmt: skip
