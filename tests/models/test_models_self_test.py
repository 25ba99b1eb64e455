"""The self-test tells a wrong attention from rounding, in every dtype."""

import importlib

import pytest
import torch
from models_zoo import BASE, SUPPORTED, supported
from torch import nn

from kvcat.attention import interface
from kvcat.models import check_supported, decoder_layers, output_head, self_test
from kvcat.models.exact_copy import exact_copy
from kvcat.models.rotation import KeyRotation
from kvcat.serving.widen import widen
from tiny import loud_model, refusal

HALF = (torch.bfloat16, torch.float16)


def with_large_activations(kind, dtype, **options):
    """A model with outlier channels and biases of queries and keys as large as Qwen2.5's."""
    model = loud_model(kind, torch.float32, **{**BASE, "num_hidden_layers": 6, **options})
    generator = torch.Generator().manual_seed(1)
    model.get_input_embeddings().weight.data[:, 3] = 3.0
    for layer in decoder_layers(model):
        for name, parameter in layer.named_parameters():
            if name.endswith(("q_proj.bias", "k_proj.bias")):
                signs = torch.randint(2, parameter.shape, generator=generator) * 2 - 1
                parameter.data.copy_(60.0 * signs)
    return model.to(dtype)


@torch.no_grad()
def spread(model):
    """Relative difference of transformers' two attention functions."""
    ids = torch.randint(3, 61, (2, 16), generator=torch.Generator().manual_seed(0))
    logits = []
    for name in ("eager", "sdpa"):
        model.set_attn_implementation(name)
        logits.append(model(input_ids=ids, use_cache=False).logits.double())
    return float((logits[0] - logits[1]).norm() / logits[0].norm())


def test_a_model_is_tested_once_for_its_configuration_classes_and_dtype(monkeypatch):
    module = importlib.import_module("kvcat.models.self_test")
    tested = []

    def watched(model):
        tested.append(model.dtype)
        self_test(model)

    monkeypatch.setattr(module, "_PASSED", set())
    monkeypatch.setattr(module, "self_test", watched)
    for dtype in (torch.float32, torch.float32, torch.bfloat16):
        check_supported(model := loud_model(dtype=dtype))
        assert model.config._attn_implementation == "kvcat"
    assert tested == [torch.float32, torch.bfloat16]
    check_supported(loud_model(rope_parameters={"rope_type": "default", "rope_theta": 500.0}))
    assert len(tested) == 3
    changed = loud_model()
    attention = decoder_layers(changed)[1].self_attn

    class WithoutGate(type(attention)):
        def forward(self, *args, kv_gate=None, **kwargs):
            return super().forward(*args, **kwargs)

    attention.__class__ = WithoutGate
    for _ in range(2):  # what failed is tested again
        assert "not all of its layers attend" in refusal(check_supported, changed)


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("kind", ["qwen2", "llama", "gemma", "qwen2_moe"])
def test_models_with_large_activations_are_supported_in_half_precision(kind, dtype):
    options = {
        "gemma": {"head_dim": 8},
        "llama": {"attention_bias": True},
        "qwen2_moe": {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16},
    }
    model = with_large_activations(kind, dtype, **options.get(kind, {}))
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    if kind == "qwen2" and dtype == torch.bfloat16:  # or it would not be a test
        assert spread(model) > 0.05
    self_test(model)
    self_test(model, split=True)
    head = output_head(model)
    assert (head.scale, head.softcap) == (1.0, None)
    assert head.weight is model.get_output_embeddings().weight
    assert all(KeyRotation(model, 1000).turned)
    if kind in ("qwen2", "llama"):
        widen(model)
    assert model.config.num_hidden_layers == 6
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())


@pytest.mark.slow_after(6)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("kind", SUPPORTED)
def test_every_supported_family_passes_in_every_dtype(kind, dtype):
    self_test(supported(kind, dtype=dtype))
    self_test(supported(kind, dtype=dtype), split=True)


def scaled(module, query, key, value, mask, scaling=None, **options):
    return SDPA(module, query, key, value, mask, scaling=1.02 * scaling, **options)


def without_bias(q, k, v, keep, bias=None, **options):
    return ATTEND(q, k, v, keep, **options)


def ungated(q, k, v, keep=None, bias=None, **options):
    return ATTEND(q, k, v, None if keep is None else torch.ones_like(keep) * keep[0, 0], bias)


def plain_mask(*, mask_function=None, local_size=None, **options):
    return MASK(**options)


SDPA, ATTEND, MASK = interface.sdpa_attention_forward, interface.attend, interface.sdpa_mask
DENSE = "the dense rows differ from the stock model"


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    ("kind", "name", "wrong", "message"),
    [
        ("llama", "sdpa_attention_forward", scaled, DENSE),
        ("mistral", "sdpa_mask", plain_mask, DENSE),
        ("llama", "attend", without_bias, "the log-bias of a compact cache does not reach"),
        ("llama", "attend", ungated, "a gate does not change the masked rows"),
    ],
)
def test_a_wrong_attention_is_rejected_in_half_precision(
    kind, name, wrong, message, dtype, monkeypatch
):
    model = supported(kind, dtype=dtype)
    monkeypatch.setattr(interface, name, wrong)
    assert message in refusal(self_test, model)


def test_the_copy_has_one_layer_of_each_kind_and_a_small_vocabulary():
    types = ["full_attention"] * 3 + ["sliding_attention"] * 5
    model = loud_model(
        "qwen2",
        torch.bfloat16,
        vocab_size=5000,
        num_hidden_layers=8,
        use_sliding_window=True,
        sliding_window=5,
        layer_types=types,
    )
    model.model.layers[6].mlp.down_proj = nn.Linear(48, 32).to(torch.bfloat16)  # with a bias
    copied = exact_copy(model)
    assert copied.layers == [0, 0, 0, 1, 1, 1, 2, 1]
    assert copied.model.config.layer_types == [types[0], types[3], types[6]]
    assert copied.model.get_input_embeddings().weight.shape == (1024, 32)
    assert [layer.self_attn.layer_idx for layer in decoder_layers(copied.model)] == [0, 1, 2]
    assert {weight.dtype for weight in copied.model.parameters()} == {torch.float64}
    assert model.dtype == torch.bfloat16
    assert len(decoder_layers(model)) == 8
    self_test(model)
