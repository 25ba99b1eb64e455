"""Compact caches: the prefix in few slots, on disk and in transformers."""

from kvcat.cache.compact import CompactCache, CompactLayer, attention_scales
from kvcat.cache.fingerprint import fingerprint
from kvcat.cache.layers import EXTRA_CHANNELS, PrefixLayer, bias_channels
from kvcat.cache.windows import layer_windows

__all__ = [
    "EXTRA_CHANNELS", "CompactCache", "CompactLayer", "PrefixLayer", "attention_scales", "bias_channels",
    "fingerprint", "layer_windows",
]  # fmt: skip
