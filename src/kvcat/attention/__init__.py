"""Attention over visible slots: the naive reference, the fast paths, and the way into transformers models."""

from kvcat.attention.biased import attend_biased
from kvcat.attention.carried import Carried, attach, carried_by
from kvcat.attention.fast import attend, attend_within
from kvcat.attention.gates import AttentionGate, Gate, SlotGate, layer_number
from kvcat.attention.interface import NAME, Recorder, enable, kvcat_attention, scaling_of
from kvcat.attention.kernels import attend_extended, extend_keys, fused_attention
from kvcat.attention.reference import COUPLINGS, attend_coupled_reference, attend_reference, reachable, visible

__all__ = [
    "COUPLINGS",
    "NAME",
    "AttentionGate",
    "Carried",
    "Gate",
    "Recorder",
    "SlotGate",
    "attach",
    "attend",
    "attend_biased",
    "attend_coupled_reference",
    "attend_extended",
    "attend_reference",
    "attend_within",
    "carried_by",
    "enable",
    "extend_keys",
    "fused_attention",
    "kvcat_attention",
    "layer_number",
    "reachable",
    "scaling_of",
    "visible",
]
