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


def test_frequencies_stored_before_a_scaling_that_the_configuration_describes_are_harmless(folder):
    add(folder, **{f"{LAYER}.rotary_emb.inv_freq": frequencies()})
    path = folder / "config.json"
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_parameters": rope}))
    load(folder, tokenizer=False)


def test_pickled_weights_are_looked_through_as_well(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(
        tensors | {f"{LAYER}.rotary_emb.inv_freq": frequencies()}, folder / "pytorch_model.bin"
    )
    load(folder, tokenizer=False)
    torch.save(tensors | {f"{LAYER}.q_proj.bias": torch.ones(32)}, folder / "pytorch_model.bin")
    assert f"for example {LAYER}.q_proj.bias" in refusal(load, folder, tokenizer=False)
