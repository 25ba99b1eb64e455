"""Models whose layers differ compress and answer as plain transformers does, or are rejected by
name."""

import pytest
import torch

import kvcat
from kvcat.compress import make_compressor, slots_and_bits
from kvcat.models import self_test
from kvcat.models.rotation import KeyRotation
from kvcat.options import parse_spec
from tiny import TRANSFORMERS, loud_model

PREFIX = 30
TOKENS = 44
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA4 = {
    "num_hidden_layers": 3,
    "layer_types": TYPES,
    "sliding_window": 64,
    "head_dim": 8,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 67,
    "num_kv_shared_layers": 0,
}
FAMILIES = {
    "gemma4_text": GEMMA4,
    "gemma4_text, one size of heads": {**GEMMA4, "global_head_dim": 8},
    "gemma4_text, inputs per layer": {**GEMMA4, "hidden_size_per_layer_input": 8},
    "gemma4_text, keys as values": {
        **GEMMA4,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "beam": {"num_hidden_layers": 4, "pad_token_id": 0},
    "llama, longrope of one set": {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "short_factor": [1.0, 2.0, 3.0, 4.0],
            "long_factor": [1.0, 2.0, 3.0, 4.0],
            "original_max_position_embeddings": 128,
            "factor": 1.0,
        }
    },
}


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name == "beam" else []) for name in FAMILIES],
)
def test_compressing_and_answering_equal_the_stock_model(name):
    if name == "beam" and TRANSFORMERS < (5, 20):
        pytest.skip("transformers has no such model")
    model = loud_model(name.partition(",")[0], std=0.2, **FAMILIES[name])
    ids = torch.randint(3, 67, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits[:, PREFIX:]
    self_test(model)
    trace = kvcat.trace(model, ids, PREFIX)
    whole = kvcat.AttentionMatching()(trace, keep_ratio=1)
    with torch.no_grad():
        logits = model(**whole.inputs(model, ids[:, PREFIX:])).logits
    assert torch.allclose(logits, expected, atol=1e-3)
    small = kvcat.AttentionMatching()(trace, num_slots=8)
    assert kvcat.compare(trace, small).kl.isfinite().all()
    made = model.generate(
        **small.inputs(model, ids[:, PREFIX:]), max_new_tokens=3, do_sample=False, pad_token_id=0
    )
    assert made.shape == (2, TOKENS - PREFIX + 3)
    turned = KeyRotation(
        model, 5
    )  # which compares each layer's keys with the model's own at other positions
    assert any(turned.turned)


@pytest.mark.parametrize("method", ["attention-matching", "attention-matching,budgets=equal"])
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_slots_for_a_number_of_bytes_count_the_channels_of_every_layer(method, bits):
    """In Gemma 4 layers of full attention have larger heads than those with windows."""
    model = loud_model("gemma4_text", std=0.2, **GEMMA4)
    ids = torch.randint(3, 67, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    trace = kvcat.trace(model, ids, PREFIX)
    name, options = parse_spec(method)
    if bits is not None:
        options["bits"] = str(bits)
    for num_bytes in (4_000, 6_000, 9_000):
        num_slots, _ = slots_and_bits(trace, num_bytes, [bits])
        cache = make_compressor(name, **options)(trace, num_slots=num_slots)
        assert cache.nbytes <= num_bytes
