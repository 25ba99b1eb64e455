"""Compact caches: the prefix in few slots, on disk and in transformers."""

from kvcat.cache.adapters import check_no_adapters
from kvcat.cache.compact import CompactCache
from kvcat.cache.fingerprint import are_comparable, fingerprint, fingerprint_like
from kvcat.cache.layers import PrefixLayer, layer_windows
from kvcat.cache.slots import CompactLayer, Head, Layer, RaggedLayer
from kvcat.cache.token_ids import check_token_ids

__all__ = [
    "CompactCache", "CompactLayer", "Head", "Layer", "PrefixLayer", "RaggedLayer", "are_comparable",
    "check_no_adapters", "check_token_ids", "fingerprint", "fingerprint_like", "layer_windows",
]  # fmt: skip
