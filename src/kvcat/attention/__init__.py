"""Attention over visible slots: the naive reference, the fast path, and the way into transformers models."""

from kvcat.attention.fast import Head, attend, attend_ragged, attend_twice
from kvcat.attention.interface import NAME, Carried, SlotGate, attach, check_not_wrapped, enable, kvcat_attention
from kvcat.attention.kernels import attend_biased, extend_keys
from kvcat.attention.reference import attend_reference, reachable

__all__ = [
    "NAME", "Carried", "Head", "SlotGate", "attach", "attend", "attend_biased", "attend_ragged",
    "attend_reference", "attend_twice", "check_not_wrapped", "enable", "extend_keys", "kvcat_attention", "reachable",
]  # fmt: skip
