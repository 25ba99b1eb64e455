"""Functions on unmodified transformers models.

Loading and saving, the masked pass, the capture of keys and queries, and the start-up test.
"""

from kvcat.models.capture import Capture, capture, layer_states
from kvcat.models.loading import get, load, load_tokenizer, parse_device, read_config, save
from kvcat.models.masked_pass import HiddenOutput, MaskedPass
from kvcat.models.output_head import logits_from_hidden, output_head
from kvcat.models.self_test import self_test
from kvcat.models.structure import (
    attention_sinks,
    decoder_layers,
    frozen,
    hidden_states,
    model_name,
    output_gains,
    positions_of,
)

__all__ = [
    "Capture",
    "HiddenOutput",
    "MaskedPass",
    "attention_sinks",
    "capture",
    "decoder_layers",
    "frozen",
    "get",
    "hidden_states",
    "layer_states",
    "load",
    "load_tokenizer",
    "logits_from_hidden",
    "model_name",
    "output_gains",
    "output_head",
    "parse_device",
    "positions_of",
    "read_config",
    "save",
    "self_test",
]
