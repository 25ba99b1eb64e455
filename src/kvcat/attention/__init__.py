"""Attention over visible slots: the naive reference, the fast path, and transformers models."""

from kvcat.attention.carried import Carried, attach
from kvcat.attention.exclusive import exclusive
from kvcat.attention.fast import attend, attend_ragged, attend_twice
from kvcat.attention.interface import (
    NAME,
    SlotGate,
    check_not_wrapped,
    enable,
    kvcat_attention,
)
from kvcat.attention.kernels import attend_biased, extend_keys
from kvcat.attention.mass import attention_mass, log_mass
from kvcat.attention.reference import attend_reference, reachable

__all__ = [
    "NAME",
    "Carried",
    "SlotGate",
    "attach",
    "attend",
    "attend_biased",
    "attend_ragged",
    "attend_reference",
    "attend_twice",
    "attention_mass",
    "check_not_wrapped",
    "enable",
    "exclusive",
    "extend_keys",
    "kvcat_attention",
    "log_mass",
    "reachable",
]
