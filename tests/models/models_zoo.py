"""Tiny models with random weights (a helper of the tests)."""

import torch

from tiny import loud_model

BASE = {
    "vocab_size": 61,
    "num_hidden_layers": 3,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SUPPORTED = {
    "qwen2": {},
    "llama": {},
    "gemma": {"head_dim": 8},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 5, "head_dim": 8},
    "smollm3": {},
    "gemma3_text": {
        "head_dim": 8,
        "sliding_window": 5,
        "query_pre_attn_scalar": 8,
        "final_logit_softcapping": 3.0,
    },
    "cohere2": {"logit_scale": 0.3, "sliding_window": 5},
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.2},
    "phi": {},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
}


def tiny(kind, *, dtype=torch.float64, **options):
    return loud_model(kind, dtype, 0.12, **{**BASE, **options})


def some_ids(length=12, seed=0):
    return torch.randint(3, 61, (2, length), generator=torch.Generator().manual_seed(seed))


def supported(kind, **options):
    return tiny(kind, **SUPPORTED[kind], **options)
