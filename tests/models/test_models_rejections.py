"""Folders, weights and models that are rejected, each in one line."""

import json
import re
import shutil
from functools import partial

import pytest
import torch
from models_zoo import BASE, some_ids, supported, tiny
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import nn
from transformers import BertConfig, BertLMHeadModel, PreTrainedTokenizerFast

import kvcat
from kvcat.models import MaskedPass, load, save, self_test
from kvcat.models.rotation import KeyRotation
from kvcat.policies import AttentionMassPolicy, RandomPolicy
from tiny import loud_model, refusal_with, rejections

KEYS = "model.layers.1.self_attn.k_proj.weight"
ATTENTION = "model.layers.1.self_attn"
OTHERS = r"has 1 weights that the model does not use, for example "
GEMMA4 = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 64,
    "head_dim": 8,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 67,
}
GEMMA3N = {"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5, "laurel_rank": 4}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
}
MAMBA_AND_ATTENTION = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "mamba_d_ssm": 64,
    "head_dim": 8,
}
LFM2 = {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
NEMOTRON = {
    "num_hidden_layers": 3,
    "layers_block_type": ["mamba", "attention", "moe"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 1,
    "chunk_size": 8,
    "head_dim": 8,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
}


LONGROPE = {
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    return save(loud_model("llama", tie_word_embeddings=True), tokenizer, folder)


@pytest.fixture
def folder(source, tmp_path):
    """The folder of a model with tied embeddings and a tokenizer, without hashes of its files."""
    return shutil.copytree(source, tmp_path / "copy", ignore=shutil.ignore_patterns("SHA256SUMS"))


def load_file_of(folder, name, content):
    """Load a folder, or a file of it, with a file of this content; None removes the file."""
    file = folder / name
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return load(file if name.endswith(".gguf") else folder, tokenizer=name.startswith("tokenizer"))


def load_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    return load_file_of(folder, "config.json", json.dumps({**config, **changes}))


def load_weights(folder, *, lacks=(), **others):
    """Load a folder that has other weights or lacks some."""
    file = folder / "model.safetensors"
    tensors = {name: value for name, value in load_file(file).items() if name not in lacks}
    save_file({**tensors, **others}, file, {"format": "pt"})
    return load(folder, tokenizer=False)


def load_index(folder):
    weights = {"metadata": {}, "weight_map": {"x": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors").unlink()
    return load_file_of(folder, "model.safetensors.index.json", json.dumps(weights))


def without_tokenizer(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    return load(folder)


def load_adapter(folder, name, *, alone):
    if alone:
        (folder / "config.json").unlink()
    return load_file_of(folder, name, "{}")


def unused(name):
    """A row of a weight that the model does not use."""
    return f"{OTHERS}{name}", lambda folder: load_weights(folder, **{name: torch.ones(8)})


def changed_buffer(name, tensor):
    """A row of a buffer with other numbers than those that the model makes."""
    return f"for example {name}", lambda folder: load_weights(folder, **{name: tensor})


def self_test_of(kind, **options):
    """The self-test of a model of a kind that this transformers may not have."""
    try:
        model = tiny(kind, dtype=torch.float32, **options)
    except (TypeError, ValueError) as error:
        pytest.skip(f"this transformers makes no such {kind}: {error}")
    return self_test(model)


def self_test_of_bert():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    return self_test(BertLMHeadModel(BertConfig(**BASE, **sizes)))


def masked(model, policy, **options):
    return MaskedPass(model, {0: policy}, **options)


def with_parameters():
    policy = AttentionMassPolicy(0.5)
    policy.weight = nn.Parameter(torch.ones(3))
    return policy


def closed_pass():
    with masked(loud_model(), RandomPolicy(0.5)) as masked_pass:
        pass
    return masked_pass


def hidden(prefix_len=None, model=None):
    with masked(model or supported("llama"), RandomPolicy(0.5)) as masked_pass:
        return masked_pass.hidden(some_ids(), [torch.Generator()] * 2, prefix_len=prefix_len)


def cached(model):
    return kvcat.trace(model, torch.arange(30)[None], 20).dense_cache()


def rotation(kind, **options):
    return KeyRotation(loud_model(kind, **options), -23)


def rope(kind, **options):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **options}}


def wrongly_rotated():
    model = loud_model()
    attention = model.model.layers[1].self_attn

    class Rolled(type(attention)):
        def forward(self, *args, position_embeddings, **kwargs):
            rolled = [x.roll(1, -1) for x in position_embeddings]
            return super().forward(*args, position_embeddings=rolled, **kwargs)

    attention.__class__ = Rolled
    return KeyRotation(model, -23)


@rejections(
    # what is no folder of a model
    ("does not exist", lambda tmp_path: load(tmp_path / "nowhere")),
    ("no config.json", lambda tmp_path: load(tmp_path)),
    ("is a file", lambda folder: load(folder / "config.json")),
    ("is not a GGUF file", lambda folder: load_file_of(folder, "m.gguf", b"PK\x03\x04")),
    ("cannot load", lambda folder: load_file_of(folder, "m.gguf", b"GGUF\x03\0\0\0")),
    ("dtype must be one of", lambda tmp_path: load(tmp_path / "nowhere", dtype="float8")),
    ("'abacus'", lambda tmp_path: load(tmp_path / "nowhere", device="abacus")),
    ("'meta', on which", lambda tmp_path: load(tmp_path / "nowhere", device="meta")),
    # files of the folder
    ("tokenizer", lambda folder: load_file_of(folder, "tokenizer.json", '{"model_type": ')),
    ("tokenizer=False", without_tokenizer),
    ("config.json", lambda folder: load_file_of(folder, "config.json", '{"model_type": ')),
    ("does not contain a JSON object", lambda folder: load_file_of(folder, "config.json", "[1]")),
    ("encoder-decoder",
     lambda folder: load_config(folder, is_encoder_decoder=True, architectures=["T5"])),
    ("NoSuchLM",
     lambda folder: load_config(folder, model_type="no-such", architectures=["NoSuchLM"])),
    (
        "never run",
        lambda folder: load_config(
            folder, model_type="no-such", auto_map={"AutoModelForCausalLM": "x.Y"}
        ),
    ),
    ("model_type None", lambda folder: load_config(folder, model_type=None)),
    ("cannot load", lambda folder: load_config(folder, hidden_size="wide")),
    ("SafetensorError", lambda folder: load_file_of(folder, "model.safetensors", b"cut")),
    ("no file named model.safetensors",
     lambda folder: load_file_of(folder, "model.safetensors", None)),
    ("model-00002-of-00002", load_index),
    # its weights
    (f"lacks weights.*, for example .*{KEYS}", lambda folder: load_weights(folder, lacks=[KEYS])),
    (f"another shape.*, for example .*{KEYS}",
     lambda folder: load_weights(folder, **{KEYS: torch.zeros(3, 3)})),
    (f"not finite.*, for example .*{KEYS}",
     lambda folder: load_weights(folder, **{KEYS: torch.full((16, 32), torch.nan)})),
    ("more layers than config.json's 2.*, for example .*layers.3.self_attn.k_proj",
     lambda folder: load_weights(folder, **{KEYS.replace(".1.", ".3."): torch.ones(16, 32)})),
    ("lm_head.weight that differs from the embeddings",
     lambda folder: load_weights(folder, **{"lm_head.weight": torch.ones(67, 32)})),
    unused(f"{ATTENTION}.q_proj.bias"),
    unused(f"{ATTENTION}.q_norm.weight"),
    unused(f"{ATTENTION}.q_proj.lora_A.weight"),
    unused(f"{ATTENTION}.sinks"),
    unused(f"{ATTENTION}.q_proj.base_layer.weight"),
    unused(f"{ATTENTION}.q_proj.weight_scale"),
    unused("model.layers.0.mlp.gate_proj.bias"),
    unused("model.layers.0.mlp.experts.0.up_proj.weight"),
    unused("model.embed_positions.weight"),
    unused("lm_head.bias"),
    unused("mtp.fc.weight"),
    unused("model.layers.0.post_feedforward_layernorm.weight"),
    changed_buffer(f"{ATTENTION}.rotary_emb.inv_freq", 500.0 ** -(torch.arange(4) / 4)),
    changed_buffer(f"{ATTENTION}.bias", torch.ones(1, 1, 8, 8)),
    changed_buffer(f"{ATTENTION}.bias", torch.zeros(32)),
    changed_buffer("model.position_ids", torch.arange(128).flip(0)),
    *(
        (
            rf"holds an adapter \({name}\).*merge_and_unload",
            partial(load_adapter, name=name, alone=alone),
        )
        for name in ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
        for alone in (True, False)
    ),
    # models that the self-test rejects
    ("StableLm.*not all of its layers attend", lambda: self_test_of("stablelm")),
    ("FalconForCausalLM.*interface", lambda: self_test_of("falcon")),
    ("Gemma2ForCausalLM.*50",
     lambda: self_test_of("gemma2", head_dim=8, sliding_window=5, query_pre_attn_scalar=8)),
    ("mamba: layers of type 'linear_attention' keep no keys", lambda: self_test_of("mamba")),
    ("falcon_h1: layers of type", lambda: self_test_of("falcon_h1", **MAMBA_AND_ATTENTION)),
    ("nemotron_h: layers of type", lambda: self_test_of("nemotron_h", **NEMOTRON)),
    ("Bert.*not causal", self_test_of_bert),
    ("share keys and values",
     lambda: self_test_of("gemma4_text", **GEMMA4, num_kv_shared_layers=1)),
    (
        "Gemma3nForCausalLM is not supported",
        lambda: self_test_of(
            "gemma3n_text",
            **{**GEMMA4, **GEMMA3N, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0},
        ),
    ),
    (
        "sliding_window",
        lambda: self_test_of(
            "mistral", sliding_window=None, per_layer_config={1: {"sliding_window": 8}}
        ),
    ),
    ("latent attention", lambda: self_test_of("deepseek_v3", **LATENT)),
    # models whose keys have no other positions
    ("OPTForCausalLM has no rotary position embedding",
     lambda: rotation("opt", ffn_dim=48, word_embed_proj_dim=32)),
    ("no rotary position embedding",
     lambda: rotation("gpt2", n_embd=32, n_head=4, n_layer=2, n_positions=64)),
    ("'dynamic' depend on the length of the text",
     lambda: rotation("llama", **rope("dynamic", factor=4.0))),
    ("'longrope' depend on the length of the text",
     lambda: rotation("phi3", pad_token_id=0, **rope("longrope", **LONGROPE))),
    ("keys of its layers do not rotate with their position", wrongly_rotated),
    # the masked pass
    ("recurrent state", lambda: masked(loud_model("lfm2", **LFM2), RandomPolicy(0.5))),
    ("group start 3 does not exist",
     lambda: MaskedPass(supported("llama"), {3: RandomPolicy(0.5)})),
    ("tau must be", lambda: masked(supported("llama"), RandomPolicy(0.5), tau=1.0)),
    ("AttentionMassPolicy reads attention and has parameters",
     lambda: masked(loud_model(), with_parameters())),
    (r"prefix_len must be in \[1, 11\], not 0", lambda: hidden(0)),
    (r"prefix_len must be in \[1, 11\], not 12", lambda: hidden(12)),
    ("StableLm.*not all of its layers attend", lambda: hidden(model=tiny("stablelm"))),
    ("closed", lambda: closed_pass().hidden(some_ids())),
    # tokens after a cache
    ("token 67 has no embedding",
     lambda: cached(model := loud_model()).inputs(model, torch.tensor([[3, 67]]))),
    ("token 67 has no embedding",
     lambda: kvcat.replay(model := loud_model(), cached(model), torch.tensor([[3, 67]]))),
)  # fmt: skip
def test_what_is_no_usable_model_is_rejected_in_one_line(message, call, request):
    assert re.search(message, refusal_with(request, call))
