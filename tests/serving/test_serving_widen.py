"""Checkpoints with bias channels: the same logits, and slots with a log-bias in an engine that
knows none."""

import pytest
import torch
from evicted_caches import LLAMA3, evicted, ids, make_model, our_logits, ragged, rope
from transformers import AutoModelForCausalLM, DynamicCache

from kvcat.cache import cache_argument
from kvcat.models import save
from kvcat.serving import export_prefix, read_prefix, widen
from kvcat.serving.widen import UNSEEN

YARN = {"factor": 8.0, "original_max_position_embeddings": 32, "attention_factor": 1.7}


FAMILIES = {
    "Llama and SmolLM": ("llama", {}),
    "Llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "Llama 3": ("llama", rope("llama3", **LLAMA3)),
    "Mistral": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "Qwen2": ("qwen2", {}),
    "Qwen2 with YaRN": ("qwen2", rope("yarn", **YARN)),
    "SmolLM3": ("smollm3", {"no_rope_layers": [1, 0]}),
}


def exact(model):
    """The model in float64 throughout; transformers computes norms and eager attention in
    float32."""
    model.set_attn_implementation("sdpa")
    for norm in (module for module in model.modules() if type(module).__name__.endswith("RMSNorm")):
        norm.forward = lambda x, n=norm: (
            n.weight * x * (x.square().mean(-1, keepdim=True) + n.variance_epsilon).rsqrt()
        )
    return model


def answers(wide, layers, suffix):
    """Logits of a stock model on a stock cache."""
    cache = DynamicCache()
    for index, (keys, values) in enumerate(layers):
        cache.update(keys.unsqueeze(0), values.unsqueeze(0), index)
    return wide(suffix, **cache_argument(cache)).logits.detach()


@pytest.mark.parametrize(("kind", "options"), FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("head_dim", [18, 32])
def test_a_widened_model_has_the_logits_of_the_original(kind, options, head_dim):
    model = make_model(kind, options, dtype=torch.float64)
    wide = widen(model, head_dim)
    rotary = model.model.rotary_emb
    assert wide.config.head_dim == head_dim
    difference = (wide(ids(2, 60)).logits - model(ids(2, 60)).logits).abs().max()
    assert difference < 2e-5  # transformers makes frequencies in float32
    for frequencies in (wide.model.rotary_emb.inv_freq, wide.model.rotary_emb.original_inv_freq):
        frequencies.zero_()[: len(rotary.inv_freq)] = rotary.inv_freq
    if rotary.attention_scaling == 1.0:
        assert (
            exact(wide)(ids(2, 60)).logits - exact(model)(ids(2, 60)).logits
        ).abs().max() < 1e-12


@pytest.mark.parametrize(
    "slots", [(7, 7), (4, 9), "ragged"], ids=["equal", "unequal layers", "unequal heads"]
)
@pytest.mark.parametrize(
    ("kind", "options"), [FAMILIES["Qwen2"], FAMILIES["Qwen2 with YaRN"], FAMILIES["SmolLM3"]]
)
def test_stock_transformers_answers_from_a_cache_with_log_bias(tmp_path, kind, options, slots):
    model = make_model(kind, options)
    suffix = ids(1, 6, seed=6)
    cache = evicted(model, ids(1, 30), 7 if slots == "ragged" else slots, log_bias=True)
    if slots == "ragged":
        cache = ragged(cache)
    export_prefix(cache, model, tmp_path / "p", head_dim=12)
    save(widen(model, 12), None, tmp_path / "wide")
    wide = AutoModelForCausalLM.from_pretrained(tmp_path / "wide")
    prefix = read_prefix(tmp_path / "p")
    assert prefix.num_slots == cache.max_slots
    assert prefix.fingerprint == wide.config.kvcat_fingerprint
    layers = prefix.load()
    wanted = our_logits(model, cache, suffix)
    assert torch.allclose(answers(wide, layers, suffix), wanted, atol=1e-4)
    for keys, _ in layers:
        keys[:, :, 4][keys[:, :, 4] > UNSEEN] = 0.0
    assert not torch.allclose(answers(wide, layers, suffix), wanted, atol=1e-2)
