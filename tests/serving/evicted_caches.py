"""Tiny models, and caches of their own random slots (a module of the tests, not a test)."""

import torch

from kvcat.cache import CompactCache, CompactLayer, fingerprint
from kvcat.models import capture
from tiny import stock_model

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip


def make_model(kind="llama", options=None, dtype=torch.float32):
    """Random weights that make attention look at some keys more than at others."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = stock_model(kind, **{**SIZES, **(options or {})})
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(std=0.3)
    return model.to(dtype).eval()


def ids(*shape, seed=5):
    return torch.randint(0, 96, shape, generator=torch.Generator().manual_seed(seed))


def evicted(model, tokens, num_slots=7, log_bias=False):
    """A cache of every head's own random slots of a prefix, without any compressor.

    num_slots: of every layer, or a tuple with one for each.
    """
    seen, draw, other = capture(model, tokens), *(torch.Generator().manual_seed(seed) for seed in (1, 2))
    counts = num_slots if isinstance(num_slots, tuple) else (num_slots,) * len(seen.keys)
    layers = []
    for keys, values, count in zip(seen.keys, seen.values, counts, strict=True):
        order = torch.rand(keys.shape[:3], generator=draw).argsort(-1)[..., :count].sort(-1).values
        kept = [states.gather(2, order[..., None].expand(-1, -1, -1, states.shape[-1])) for states in (keys, values)]
        layers.append(CompactLayer(*kept, torch.randn(order.shape, generator=other) if log_bias else None))
    return CompactCache(layers, tokens.shape[1], fingerprint(model), {"method": "random"})


def ragged(cache):
    """The same cache, of whose heads in every layer the first holds all slots and each next one slot less."""
    layers = []
    for layer in cache.layers:
        slots, heads = layer.num_slots, range(layer.keys.shape[1])
        parts = (layer.keys, layer.values, layer.log_bias)
        layers.append(
            CompactLayer.ragged(*([[x[b, h, : slots - h] for h in heads] for b in range(len(x))] for x in parts))
        )
    return CompactCache(layers, cache.num_tokens, cache.fingerprint)


def our_logits(model, cache, suffix):
    return model(**cache.inputs(model, suffix)).logits.detach()
