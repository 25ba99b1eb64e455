"""Weights that config.json does not announce are rejected by name; buffers that the model makes
itself are not."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvcat.models import load
from tiny import loud_model, refusal

LAYER = "model.layers.1.self_attn"


@pytest.fixture
def folder(tmp_path):
    """A Llama, tied, and one whose numbers plain transformers computed."""
    loud_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def add(folder, **tensors):
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, {"format": "pt"})


def frequencies(theta=10_000.0):
    return theta ** -(torch.arange(4) / 4)


@pytest.mark.parametrize(
    "name",
    [
        f"{LAYER}.q_proj.bias",
        f"{LAYER}.q_norm.weight",
        f"{LAYER}.q_proj.lora_A.weight",
        f"{LAYER}.sinks",
        f"{LAYER}.q_proj.base_layer.weight",
        f"{LAYER}.q_proj.weight_scale",
        "model.layers.0.mlp.gate_proj.bias",
        "model.layers.0.mlp.experts.0.up_proj.weight",
        "model.embed_positions.weight",
        "lm_head.bias",
        "mtp.fc.weight",
        "model.layers.0.post_feedforward_layernorm.weight",
    ],
)
def test_a_weight_that_the_model_does_not_use_is_rejected_by_name(name, folder):
    add(folder, **{name: torch.ones(8)})
    message = refusal(load, folder, tokenizer=False)
    assert f"has 1 weights that the model does not use, for example {name}" in message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_buffers_that_the_model_computes_itself_are_harmless(dtype, folder):
    ids = torch.arange(20)[None]
    with torch.no_grad():
        expected = load(folder, tokenizer=False)[0](ids).logits
    add(
        folder,
        **{
            f"{LAYER}.rotary_emb.inv_freq": frequencies().to(dtype),
            f"{LAYER}.masked_bias": torch.tensor(-1e9),
            f"{LAYER}.bias": torch.ones(1, 1, 128, 128, dtype=torch.bool).tril(),
            "model.position_ids": torch.arange(128)[None],
            "lm_head.weight": load_file(folder / "model.safetensors")[
                "model.embed_tokens.weight"
            ].clone(),
        },
    )
    with torch.no_grad():
        assert torch.equal(load(folder, tokenizer=False)[0](ids).logits, expected)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        (f"{LAYER}.rotary_emb.inv_freq", frequencies(theta=500.0)),
        (f"{LAYER}.bias", torch.ones(1, 1, 8, 8)),
        (f"{LAYER}.bias", torch.zeros(32)),
        ("model.position_ids", torch.arange(128).flip(0)),
    ],
)
def test_buffers_with_other_numbers_are_rejected(name, tensor, folder):
    add(folder, **{name: tensor})
    assert f"for example {name}" in refusal(load, folder, tokenizer=False)


def test_frequencies_stored_before_a_scaling_that_the_configuration_describes_are_harmless(folder):
    add(folder, **{f"{LAYER}.rotary_emb.inv_freq": frequencies()})
    path = folder / "config.json"
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_parameters": rope}))
    load(folder, tokenizer=False)


def test_an_output_matrix_that_differs_from_the_tied_embeddings_is_rejected(folder):
    add(folder, **{"lm_head.weight": torch.ones(67, 32)})
    assert "lm_head.weight that differs from the embeddings" in refusal(
        load, folder, tokenizer=False
    )


def test_pickled_weights_are_looked_through_as_well(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(
        tensors | {f"{LAYER}.rotary_emb.inv_freq": frequencies()}, folder / "pytorch_model.bin"
    )
    load(folder, tokenizer=False)
    torch.save(tensors | {f"{LAYER}.q_proj.bias": torch.ones(32)}, folder / "pytorch_model.bin")
    assert f"for example {LAYER}.q_proj.bias" in refusal(load, folder, tokenizer=False)


@pytest.mark.parametrize(
    "file", ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"]
)
@pytest.mark.parametrize("alone", [True, False])
def test_an_adapter_is_rejected_whether_or_not_peft_is_installed(file, alone, folder):
    (folder / file).write_text("{}")
    if alone:
        (folder / "config.json").unlink()
    message = refusal(load, folder)
    assert f"holds an adapter ({file})" in message
    assert "merge_and_unload" in message
