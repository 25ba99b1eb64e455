"""A fingerprint changes with everything that changes a model's logits, and with nothing else."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import kvcat
from kvcat.cache import fingerprint
from kvcat.models import load, save
from kvcat.serving import widen
from tiny import loud_model, refusal

# by family: settings that the model class reads at every forward or when it is constructed
SETTINGS = {
    "llama": {
        "rms_norm_eps": 1e-3,
        "hidden_act": "gelu",
        "max_position_embeddings": 77,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0},
    },
    "qwen2": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "rms_norm_eps": 1e-3,
    },
    "mixtral": {"num_experts_per_tok": 1},
    "qwen3_moe": {"num_experts_per_tok": 1, "norm_topk_prob": True},
    "deepseek_v3": {
        "routed_scaling_factor": 1.5,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
    },
    "gpt_neox": {"use_parallel_residual": False, "layer_norm_eps": 1e-3, "hidden_act": "relu"},
    "gpt2": {
        "scale_attn_by_inverse_layer_idx": True,
        "layer_norm_epsilon": 1e-3,
        "activation_function": "relu",
    },
    "cohere": {"logit_scale": 0.5},
    "granite": {
        "residual_multiplier": 0.5,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.3,
    },
    "olmo": {"clip_qkv": 8.0},
    "nemotron": {"norm_eps": 1e-3, "partial_rotary_factor": 0.25},
    "starcoder2": {"norm_epsilon": 1e-3},
    "stablelm": {"use_parallel_residual": True},
    "falcon_h1": {"ssm_out_multiplier": 0.5},
    "smollm3": {"no_rope_layers": [0, 1]},
    "gemma3_text": {
        "query_pre_attn_scalar": 3,
        "sliding_window": 7,
        "final_logit_softcapping": 9.0,
    },
    "opt": {"do_layer_norm_before": False, "activation_function": "gelu"},
}
SIZES = {
    "mixtral": {"num_local_experts": 2},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 16},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 2,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
    "smollm3": {"pad_token_id": 0},
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": 32},
    "gemma3_text": {"head_dim": 8},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
}
WITHOUT_EFFECT = {
    "bos_token_id": 5,
    "eos_token_id": 6,
    "pad_token_id": 7,
    "use_cache": False,
    "initializer_range": 0.5,
    "output_attentions": False,
    "output_hidden_states": True,
    "architectures": ["Other"],
    "attention_dropout": 0.3,
    "torch_dtype": "float16",
    "name_or_path": "other",
    "transformers_version": "4.0.0",
    "router_aux_loss_coef": 0.7,
    "something_that_no_code_reads": 3,
    "base_model_tp_plan": {"embed_tokens": "embedding_rowwise"},
}


# the first digits of fingerprints by the second scheme of models whose weights are all 0.5
RECORDED = {
    "llama": "10337e0e8ff0",
    "qwen2": "a85511245f8b",
    "mixtral": "44238bef61e8",
    "qwen3_moe": "d47b8f366ac1",
    "deepseek_v3": "a4276d769c29",
    "gpt_neox": "26d723e6d4a4",
    "gpt2": "ce35625bd753",
    "cohere": "5bbcfbccca17",
    "granite": "da6d4c13db4a",
    "olmo": "dd709893e231",
    "nemotron": "ae7bac2e784b",
    "starcoder2": "5248059b209c",
    "stablelm": "4d7b65f2c3b3",
    "falcon_h1": "d4907da95a22",
    "smollm3": "712af3b70c33",
    "gemma3_text": "21a7018030eb",
    "opt": "0c4584be01a8",
}
RECORDED_TIED = "4f2d0f7c1920"  # llama with tied weights


def model_of(kind, **options):
    return loud_model(kind, **{**SIZES.get(kind, {}), **options})


@pytest.mark.parametrize("kind", SETTINGS)
def test_each_setting_that_changes_logits_changes_the_fingerprint(kind):
    model = model_of(kind)
    first = fingerprint(model)
    config = model.config
    for name, value in SETTINGS[kind].items():
        before = getattr(config, name, None)
        assert before != value
        setattr(config, name, value)
        assert fingerprint(model) != first, name
        setattr(config, name, before)
        if before is None and name not in type(config).__dataclass_fields__:
            delattr(config, name)
        assert fingerprint(model) == first, name


@pytest.mark.parametrize("kind", ["llama", "mixtral", "gpt2", "gemma3_text", "deepseek_v3"])
def test_settings_without_effect_leave_the_fingerprint(kind):
    model = model_of(kind)
    first = fingerprint(model)
    for name, value in WITHOUT_EFFECT.items():
        setattr(model.config, name, value)
        assert fingerprint(model) == first, name


@pytest.mark.parametrize(
    ("kind", "options", "recorded"),
    [
        *((kind, {}, digits) for kind, digits in RECORDED.items()),
        ("llama", {"tie_word_embeddings": True}, RECORDED_TIED),
    ],
)
def test_every_version_of_transformers_has_the_same_fingerprint(kind, options, recorded):
    model = model_of(kind, **options)
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(0.5)
    assert fingerprint(model).startswith(f"2:{recorded}")


def test_a_setting_of_a_nested_configuration_counts():
    text = {
        "vocab_size": 67,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "head_dim": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 16,
    }
    vision = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    model = model_of("gemma3", text_config=text, vision_config=vision)
    first = fingerprint(model)
    model.config.text_config.rms_norm_eps = 0.1
    assert fingerprint(model) != first


def test_a_setting_spelled_out_and_one_left_out_are_the_same():
    first = fingerprint(model_of("llama"))
    assert first == fingerprint(
        model_of("llama", hidden_act="silu", attention_bias=False, rms_norm_eps=1e-06)
    )
    assert first == fingerprint(
        model_of(
            "llama", rope_parameters={"rope_type": "default", "rope_theta": 10_000, "factor": None}
        )
    )


def test_a_folder_has_the_fingerprint_of_the_model_saved_to_it(tmp_path):
    for kind in ("llama", "gemma3_text", "gpt2"):
        model = model_of(kind)
        folder = save(model, None, tmp_path / kind)
        for again in (
            AutoModelForCausalLM.from_pretrained(folder),
            load(folder, tokenizer=False)[0],
        ):
            assert fingerprint(again) == fingerprint(model)


def test_buffers_count_but_neither_rounding_nor_the_state_that_follows_a_text():
    model = model_of("llama")
    first = fingerprint(model)
    frequencies = model.model.rotary_emb.inv_freq
    frequencies.mul_(1 + 1e-6)  # as another device or version computes them
    assert fingerprint(model) == first
    frequencies.mul_(1.01)
    assert fingerprint(model) != first
    routed = model_of("deepseek_v3")
    before = fingerprint(routed)
    routed.model.layers[1].mlp.gate.e_score_correction_bias.add_(0.5)
    assert fingerprint(routed) != before
    gemma = model_of("gemma3_text")
    before = fingerprint(gemma)
    gemma.model.embed_tokens.embed_scale.mul_(2)
    assert fingerprint(gemma) != before


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0},
        {
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "short_factor": [1.0] * 4,
            "long_factor": [3.0] * 4,
            "original_max_position_embeddings": 32,
            "factor": 4.0,
        },
    ],
)
def test_frequencies_that_follow_the_last_text_do_not_count(rope):
    model = model_of("llama", rope_parameters=rope, max_position_embeddings=64)
    first = fingerprint(model)
    with torch.no_grad():
        model(torch.arange(100)[None] % 67)
    assert fingerprint(model) == first


def adapted():
    """A Llama with an adapter, and the PEFT model around it."""
    peft = pytest.importorskip("peft")
    options = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False}
    return peft.get_peft_model(loud_model("llama"), peft.LoraConfig(**options)).eval()


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # of peft
def test_a_model_with_adapters_is_rejected_in_one_line_and_a_merged_one_is_another_model(tmp_path):
    plain = loud_model("llama")
    ids = torch.arange(40)[None]
    cache = kvcat.trace(plain, ids, 30).dense_cache()
    wrapped = adapted()
    for call in (fingerprint, cache.check_model):
        assert "PeftModel wraps a model: merge its adapters" in refusal(call, wrapped)
    inside = wrapped.get_base_model()
    said = "LlamaForCausalLM holds PEFT adapters and cannot be"
    assert f"{said} identified: merge them" in refusal(fingerprint, inside)
    assert said in refusal(kvcat.trace, inside, ids, 30)
    assert said in refusal(cache.inputs, inside, ids)
    assert f"{said} saved" in refusal(save, inside, None, tmp_path / "out")
    assert f"{said} widened" in refusal(widen, inside)
    assert not (tmp_path / "out").exists()
    merged = wrapped.merge_and_unload()
    assert fingerprint(merged) != fingerprint(plain)
    assert "another model" in refusal(cache.inputs, merged, ids)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # torch itself
def test_wrappers_of_torch_are_rejected_by_name_and_a_model_compiled_in_place_is_not():
    model = loud_model("llama")
    ids = torch.arange(40)[None]
    cache = kvcat.trace(model, ids, 30).dense_cache()
    wrappers = {
        "OptimizedModule wraps a model: give the model itself": torch.compile(model),
        "DataParallel wraps a model: give its module": torch.nn.DataParallel(model),
    }
    for reason, wrapped in wrappers.items():
        assert reason in refusal(fingerprint, wrapped)
        assert reason in refusal(kvcat.trace, wrapped, ids, 30)
        assert reason in refusal(cache.inputs, wrapped, ids[:, 30:])
    model.compile(backend="eager")
    assert fingerprint(model) == cache.fingerprint
