"""Presses with options for a prefix of 64 tokens, a model, and what caches hold (a module of the tests, not a test)."""

import importlib.util

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from kvcat.compress.kvpress import KVPress, presses, version

needs_kvpress = pytest.mark.skipif(importlib.util.find_spec("kvpress") is None, reason="kvpress is not installed")
PREFIX, SLOTS = 64, 20
SNAPKV = {"press.window_size": 8}
CHUNKED = {
    "ChunkKVPress+SnapKVPress": {**SNAPKV, "chunk_length": 4}, "ChunkPress+KnormPress": {"chunk_length": 16},
    "EntropyGatedChunkKVPress+KnormPress": {},
}  # fmt: skip
# what needs no trained part, and one option set that fits a prefix of 64 tokens
PRESSES = {
    **{f"{name}+SnapKVPress": SNAPKV for name in ("AdaKVPress", "CriticalAdaKVPress", "CriticalKVPress")},
    "BlockPress+KeyDiffPress": {"block_size": 16}, "KeyRerotationPress+StreamingLLMPress": {},
    "LagKVPress": {"lag_size": 8}, "MergingPress+KnormPress": {}, "SnapKVPress": {"window_size": 8},
    "PyramidKVPress": {"window_size": 2, "beta": 4}, **CHUNKED,
    **{f"{name}Press": {} for name in (
        "Cap", "Compactor", "CUR", "ExpectedAttention", "KeyDiff", "Knorm", "KVCompose", "KVgrad", "KVzip",
        "LeverageScore", "NonCausalAttn", "ObservedAttention", "Random", "StreamingLLM", "TOVA",
    )},
}  # fmt: skip


def press(name):
    """A ``KVPress``; skips where the installed kvpress is too old to have it."""
    if missing := {*name.split("+")} - presses().keys():
        pytest.skip(f"kvpress {version()} has no {missing}")
    return KVPress(name, **PRESSES[name])


def heads(cache, row):
    """Keys and values of every head of one example, whether the layer is ragged or not."""
    return [x for layer in cache.layers for h in range(layer.counts.shape[1]) for x in layer.head(row, h)[:2]]


def positions_of(cache, found):
    pairs = zip(cache.layers, found.keys, strict=True)
    near = [((layer.keys.unsqueeze(3) - keys.unsqueeze(2)).abs() < 1e-4).all(-1) for layer, keys in pairs]
    return [same.float().argmax(-1).sort(-1).values for same in near]


def random_model(folder):
    """The model of a folder with larger weights, which attend less evenly."""
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(std=0.2)
    return model


def distinct_texts():
    """Two texts of 80 tokens, none twice: in the first layer, keys of one token tie in norm, and ties break freely."""
    draw = torch.Generator().manual_seed(3)
    return torch.stack([torch.randperm(250, generator=draw)[:80] for _ in range(2)])
