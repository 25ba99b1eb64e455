"""A tiny model, noise as a text, and its prefixes with their suffixes (a module of the tests, not a test)."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvcat.evals.profile_suffixes import SuffixPlan, draw_suffixes, prefix_windows

PREFIX, SUFFIX, VOCAB = 12, 4, 40
PLAN = SuffixPlan(PREFIX, SUFFIX, num_fit=3, num_choice=2, num_test=4)


def tiny(seed, vocab=VOCAB):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, initializer_range=0.4,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def noise():
    draw = torch.Generator().manual_seed(0)
    return [(name, torch.randint(VOCAB, (length,), generator=draw).tolist()) for name, length in [("a", 60), ("b", 40)]]


def drawn(model, documents, plan=PLAN):
    return draw_suffixes(prefix_windows(documents, plan, 2), documents, plan, model, VOCAB)
