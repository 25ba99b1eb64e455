"""Functions on unmodified transformers models.

Loading and saving, the masked pass, the capture of keys and queries, and the start-up test.
"""
# isort: skip_file

# fmt: off
from kvcat.models.capture import (
    Capture as Capture, capture as capture, layer_states as layer_states,
)
from kvcat.models.loading import (
    get as get, load as load, load_tokenizer as load_tokenizer, parse_device as parse_device,
    read_config as read_config, save as save,
)
from kvcat.models.masked_pass import HiddenOutput as HiddenOutput, MaskedPass as MaskedPass
from kvcat.models.output_head import (
    logits_from_hidden as logits_from_hidden, output_head as output_head,
)
from kvcat.models.self_test import check_supported as check_supported, self_test as self_test
from kvcat.models.structure import (
    attention_sinks as attention_sinks, check_length as check_length,
    decoder_layers as decoder_layers, frozen as frozen,
    hidden_states as hidden_states, model_name as model_name, output_gains as output_gains,
    positions_of as positions_of,
)
# fmt: on
