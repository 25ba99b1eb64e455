"""Models in .gguf files compute what llama.cpp computes from the same file, or are rejected by
name."""

import re

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from gguf_files import write_gguf
from kvcat.models import load, load_tokenizer, read_config, save
from kvcat.serving.llama_cpp import LlamaCpp
from tiny import loud_model, refusal

HALF = 8  # rotated pairs of channels of a head: half of head_dim
FACTORS = np.linspace(1.0, 6.0, HALF, dtype=np.float32)
SHORT = "rope_factors_short.weight"
LONG = "rope_factors_long.weight"
LONGROPE = {"rope.scaling.type": "longrope", "rope.scaling.attn_factor": 1.2}


def model_of(kind, **options):
    sizes = {
        "hidden_size": 96,
        "intermediate_size": 64,
        "num_attention_heads": 6,
        "max_position_embeddings": 1024,
    }
    model = loud_model(kind, std=0.15, **{**sizes, **options})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases, which are ones and zeros at the start
                parameter.add_(
                    0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
                )
    return model


def check_against_llama_cpp(path, length, num_ctx=1024):
    """The last logits of so many tokens are llama.cpp's own."""
    pytest.importorskip("xllamacpp")
    ids = torch.randint(67, (1, length), generator=torch.Generator().manual_seed(2))
    engine = LlamaCpp(path, num_ctx=num_ctx, cache_type="float32")
    expected = engine.logits(ids[0].tolist())
    engine.close()
    model, _ = load(path, tokenizer=False)
    with torch.no_grad():
        logits = model(ids).logits[0, -1]
    assert (logits - expected).norm() < 1e-3 * expected.norm()
    return model, ids


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    ("settings", "tensors"),
    [
        ({}, {}),
        ({}, {"rope_freqs.weight": FACTORS}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {}),
        ({"rope.scaling.factor": 4.0}, {}),
        ({"rope.scale_linear": 4.0}, {}),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {}),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
            {"rope_freqs.weight": FACTORS},
        ),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 256,
            },
            {},
        ),
        (LONGROPE, {SHORT: FACTORS, LONG: 3 * FACTORS}),
    ],
    ids=lambda value: "+".join(map(str, value)),
)
@pytest.mark.parametrize(
    "kind", ["llama", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen2", "qwen3"))]
)
def test_scaled_rotary_embeddings_are_those_of_llama_cpp(kind, settings, tensors, tmp_path):
    if kind != "llama" and tensors:
        pytest.skip("llama.cpp reads rotary factors of architecture llama alone")
    options = {"head_dim": 16} if kind == "qwen3" else {}
    write_gguf(model_of(kind, **options), tmp_path / "m.gguf", settings=settings, tensors=tensors)
    model, ids = check_against_llama_cpp(tmp_path / "m.gguf", 700)
    save(model, None, tmp_path / "folder")
    with torch.no_grad():
        again = load(tmp_path / "folder", tokenizer=False)[0](ids).logits
        before = model(ids).logits
    assert torch.equal(again, before)
    assert read_config(tmp_path / "m.gguf").rope_parameters == model.config.rope_parameters


def test_beyond_the_original_context_longrope_uses_the_long_factors(tmp_path):
    settings = {**LONGROPE, "rope.scaling.original_context_length": 256}
    write_gguf(
        model_of("llama"),
        tmp_path / "m.gguf",
        settings=settings,
        tensors={SHORT: FACTORS, LONG: 3 * FACTORS},
    )
    check_against_llama_cpp(tmp_path / "m.gguf", 700)
    check_against_llama_cpp(tmp_path / "m.gguf", 200, num_ctx=256)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("llama", {"head_dim": 32}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"rms_norm_eps": 0.3}),
        ("qwen2", {"rms_norm_eps": 0.3}),
        ("llama", {"num_key_value_heads": 6}),
        ("qwen3", {"head_dim": 32}),
        ("qwen3", {"head_dim": 16}),
        ("qwen3", {"rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}}),
    ],
)
def test_biases_and_sizes_of_heads_are_those_of_the_model(kind, options, tmp_path):
    expected = model_of(kind, **options)
    write_gguf(expected, tmp_path / "m.gguf")
    model, ids = check_against_llama_cpp(tmp_path / "m.gguf", 60)
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, expected(ids).logits, atol=1e-4)


def test_a_model_named_mistral_has_no_sliding_window_that_the_file_does_not_state(tmp_path):
    write_gguf(model_of("llama", max_position_embeddings=8192), tmp_path / "m.gguf", name="mistral")
    model, _ = load(tmp_path / "m.gguf", tokenizer=False)
    assert getattr(model.config, "sliding_window", None) is None
    check_against_llama_cpp(tmp_path / "m.gguf", 60)


@pytest.mark.parametrize(
    ("settings", "tensors", "reason"),
    [
        (
            {"attention.sliding_window": 64},
            {},
            "llama.attention.sliding_window = 64, which .* cannot apply",
        ),
        ({"attention.scale": 0.5}, {}, "llama.attention.scale = 0.5"),
        ({"logit_scale": 0.5}, {}, "llama.logit_scale = 0.5"),
        ({"residual_scale": 0.5}, {}, "llama.residual_scale"),
        ({"final_logit_softcapping": 30.0}, {}, "llama.final_logit_softcapping"),
        ({"attention.causal": False}, {}, "llama.attention.causal"),
        ({"expert_count": 4}, {}, "llama.expert_count = 4"),
        ({"attention.head_count": 0}, {}, "llama.attention.head_count = 0, which is not a size"),
        ({"attention.head_count": [4, 4]}, {}, r"head_count = \[4, 4\], a number for every layer"),
        ({"attention.head_count_kv": [2, 2]}, {}, r"head_count_kv = \[2, 2\], a number for every"),
        ({"feed_forward_length": [96, 96]}, {}, "feed_forward_length = .* a number for every"),
        ({"rope.scaling.factor": "4"}, {}, "rope.scaling.factor = '4', which is not a size"),
        ({"attention.head_count_kv": 0}, {}, "head_count_kv = 0, which is not a size"),
        ({"attention.key_length": 0}, {}, "key_length = 0, which is not a size"),
        ({"block_count": 2.0}, {}, "block_count = 2.0, which is not a size"),
        ({"rope.freq_base": 0.0}, {}, "freq_base = 0.0, which is not a size"),
        (
            {"attention.layer_norm_rms_epsilon": float("nan")},
            {},
            "epsilon = nan, which is not a size",
        ),
        ({"context_length": "long"}, {}, "llama.context_length = 'long', which is not a size"),
        ({"something_new": 4}, {}, "llama.something_new = 4"),
        ({"rope.scaling.type": "dynamic"}, {}, "llama.rope.scaling.type = 'dynamic'"),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.yarn_attn_factor": 2.0},
            {},
            "yarn_attn_factor = 2.0",
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.yarn_beta_slow": 2.0},
            {},
            "yarn_beta_slow = 2.0",
        ),
        ({"rope.scaling.attn_factor": 2.0}, {}, "llama.rope.scaling.attn_factor = 2.0"),
        (
            {"rope.dimension_count": 8},
            {},
            "llama.rope.dimension_count = 8, but keys have 16 channels",
        ),
        ({"attention.value_length": 8}, {}, "llama.attention.value_length = 8"),
        (LONGROPE, {SHORT: FACTORS}, "lacks rope_factors_long.weight"),
        (
            {"rope.scaling.type": "yarn"},
            {"rope_freqs.weight": FACTORS},
            "rope_freqs.weight and .* type yarn",
        ),
        ({}, {SHORT: FACTORS}, "not use, for example rope_factors_short.weight"),
        (
            LONGROPE,
            {SHORT: FACTORS, LONG: FACTORS, "rope_freqs.weight": FACTORS},
            "not use, for example rope_freqs",
        ),
        ({}, {"rope_freqs.weight": FACTORS[:3]}, "do not fit heads of 16 channels"),
        (
            {},
            {"blk.0.attn_q_norm.weight": FACTORS},
            "1 tensors .* not use, for example blk.0.attn_q_norm.weight",
        ),
        ({}, {"blk.1.attn_sinks.weight": FACTORS}, "not use, for example blk.1.attn_sinks.weight"),
        ({}, {"blk.2.ffn_up.weight": FACTORS}, "not use, for example blk.2.ffn_up.weight"),
        ({}, {"blk.0.ffn_down.scale": FACTORS}, "not use, for example blk.0.ffn_down.scale"),
        (
            {},
            {"blk.1.attn_q.bias": np.ones(96, np.float32)},
            "not use, for example blk.1.attn_q.bias",
        ),
        ({}, {"blk.0.attn_q.bias": np.ones(96, np.float32)}, "lacks"),
    ],
)
def test_what_a_model_cannot_use_of_a_gguf_file_is_rejected_by_name(
    settings, tensors, reason, tmp_path
):
    write_gguf(model_of("llama"), tmp_path / "m.gguf", settings=settings, tensors=tensors)
    message = refusal(load, tmp_path / "m.gguf", tokenizer=False)
    assert re.search(reason, message), message


def test_rotary_factors_of_an_architecture_that_does_not_read_them_are_rejected(tmp_path):
    write_gguf(model_of("qwen2"), tmp_path / "m.gguf", tensors={"rope_freqs.weight": FACTORS})
    assert "not use, for example rope_freqs.weight" in refusal(
        load, tmp_path / "m.gguf", tokenizer=False
    )


WORDS = ["a", "b", "Ġ", "1", "2", "12", "ĠĠ", "<s>", "<e>"]


def encoded(path, text, **tokens):
    """A text in the tokens of a tokenizer with these settings, and again after it was saved."""
    merges = ["Ġ Ġ", "1 2"]
    model = model_of("llama", vocab_size=len(WORDS))
    write_gguf(model, path, WORDS, merges=merges, tokens={"bos_token_id": 7, **tokens})
    tokenizer = load_tokenizer(path)
    tokenizer.save_pretrained(path.parent / "saved")
    saved = AutoTokenizer.from_pretrained(path.parent / "saved")
    assert saved.encode(text) == tokenizer.encode(text)
    return tokenizer.convert_ids_to_tokens(tokenizer.encode(text))


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ({}, ["a", "Ġ", "Ġ", "12"]),
        ({"pre": "gpt-2"}, ["a", "Ġ", "Ġ", "12"]),
        # as llama_tokenize gives it for the file of SmolLM2
        ({"pre": "smollm"}, ["a", "ĠĠ", "1", "2"]),
        ({"pre": "llama-bpe"}, ["<s>", "a", "Ġ", "Ġ", "12"]),
        ({"pre": "llama-bpe", "add_bos_token": False}, ["a", "Ġ", "Ġ", "12"]),
        ({"add_bos_token": True}, ["<s>", "a", "Ġ", "Ġ", "12"]),
        ({"pre": "gpt-2", "add_bos_token": True}, ["<s>", "a", "Ġ", "Ġ", "12"]),
    ],
)
def test_texts_are_split_and_begin_as_the_file_says(tokens, expected, tmp_path):
    assert encoded(tmp_path / "m.gguf", "a  12", **tokens) == expected


def test_a_split_or_a_beginning_that_is_not_supported_is_rejected_by_name(tmp_path):
    message = refusal(encoded, tmp_path / "m.gguf", "a", pre="strange")
    assert "splits texts as 'strange' (tokenizer.ggml.pre)" in message
    message = refusal(encoded, tmp_path / "m.gguf", "a", model="llama", add_space_prefix=False)
    assert "tokenizer.ggml.add_space_prefix" in message
