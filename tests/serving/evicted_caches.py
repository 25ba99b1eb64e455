"""Tiny models, and caches of their own random slots (a helper of the tests)."""

import torch

from kvcat.cache import CacheRecord, CompactCache, CompactLayer, fingerprint
from kvcat.models import capture
from tiny import layer_of, loud_model

SIZES = {"vocab_size": 96, "max_position_embeddings": 256, "pad_token_id": None}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def make_model(kind="llama", options=None, dtype=torch.float32):
    return loud_model(kind, dtype, **{**SIZES, **(options or {})})


def rope(kind, **options):
    return {"rope_parameters": {"rope_theta": 10000.0, "rope_type": kind, **options}}


def ids(*shape, seed=5):
    return torch.randint(0, 96, shape, generator=torch.Generator().manual_seed(seed))


def evicted(model, tokens, num_slots=7, log_bias=False):
    """A cache of random slots of a prefix, different in every head, without any compressor.

    num_slots: of every layer, or a tuple with one for each.
    """
    seen = capture(model, tokens)
    draw, other = (torch.Generator().manual_seed(seed) for seed in (1, 2))
    counts = num_slots if isinstance(num_slots, tuple) else (num_slots,) * len(seen.keys)
    layers = []
    for keys, values, count in zip(seen.keys, seen.values, counts, strict=True):
        order = torch.rand(keys.shape[:3], generator=draw).argsort(-1)[..., :count].sort(-1).values
        kept = [
            states.gather(2, order[..., None].expand(-1, -1, -1, states.shape[-1]))
            for states in (keys, values)
        ]
        layers.append(
            CompactLayer(*kept, torch.randn(order.shape, generator=other) if log_bias else None)
        )
    return CompactCache(layers, tokens.shape[1], fingerprint(model), CacheRecord("random"))


def ragged(cache):
    """The same cache with unequal heads: the first of a layer holds all slots, each next one a slot
    less."""
    layers = []
    for layer in cache.layers:
        slots = layer.max_slots
        heads = range(layer.keys.shape[1])
        states = (layer.keys, layer.values, layer.log_bias)
        layers.append(
            layer_of(
                *([[x[b, h, : slots - h] for h in heads] for b in range(len(x))] for x in states)
            )
        )
    return CompactCache(layers, cache.num_tokens, cache.fingerprint)


def our_logits(model, cache, suffix):
    return model(**cache.inputs(model, suffix)).logits.detach()
