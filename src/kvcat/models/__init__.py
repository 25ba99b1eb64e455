"""Adapters around unmodified transformers models: load, save, the masked pass, the capture of keys and queries."""

from kvcat.models.capture import Capture, capture
from kvcat.models.hub import BASE_NAME
from kvcat.models.loading import load, parse_device, parse_dtype, save
from kvcat.models.masked_pass import MaskedPass, PassOutput
from kvcat.models.self_test import self_test
from kvcat.models.structure import decoder_layers, hidden_states, logits_from_hidden, model_name

__all__ = [
    "BASE_NAME",
    "Capture",
    "MaskedPass",
    "PassOutput",
    "capture",
    "decoder_layers",
    "hidden_states",
    "load",
    "logits_from_hidden",
    "model_name",
    "parse_device",
    "parse_dtype",
    "save",
    "self_test",
]
