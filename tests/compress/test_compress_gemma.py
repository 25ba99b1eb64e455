"""Gemma 3 270M, whose layers of sliding windows keep their state whole: make test-gemma."""

from pathlib import Path

import pytest
import torch

import kvcat
from kvcat.cache import CompactCache
from kvcat.compress import Eviction, make_compressor
from kvcat.models import self_test
from states_oracle import stock_logits, visible

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "out" / "gemma3-270m"
PREFIX, TOKENS = 768, 832  # the window has 512

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not FOLDER.exists(), reason="no Gemma 3 270M here (make test-gemma)"),
]


@pytest.fixture(scope="module")
def loaded():
    return kvcat.load(FOLDER)


@pytest.fixture(scope="module")
def ids(loaded):
    _, tokenizer = loaded
    text = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    tokens = tokenizer(text).input_ids
    assert tokens[0] == tokenizer.bos_token_id
    return torch.tensor([tokens[:TOKENS]])


@pytest.fixture(scope="module")
def trace(loaded, ids):
    return kvcat.trace(loaded[0], ids, PREFIX)


def test_an_evicted_cache_answers_as_transformers_with_a_mask(loaded, ids, trace):
    model, _ = loaded
    self_test(model)
    cache = Eviction("keynorm")(trace, num_slots=200)
    actual = kvcat.replay(model, cache, ids[:, PREFIX:])
    expected = stock_logits(model, ids, PREFIX, visible(cache, TOKENS))
    dense = stock_logits(model, ids, PREFIX)
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-3)
    torch.testing.assert_close(trace.logits, dense, rtol=0, atol=2e-3)
    assert (expected - dense).abs().max() > 1


def test_slots_of_three_layers_and_windows_of_fifteen_are_kept_and_counted(loaded, trace):
    model, _ = loaded
    types = model.config.layer_types
    full = [number for number, kind in enumerate(types) if kind == "full_attention"]
    cache = kvcat.AttentionMatching()(trace, keep_ratio=0.1)
    assert list(cache.layer_numbers) == full
    assert sorted(cache.states) == sorted(set(range(18)) - set(full))
    window = 511 * 256 * 2 * 4  # earlier tokens, channels, keys and values, bytes of a float32
    slots = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    bias = sum(layer.log_bias.nbytes for layer in cache.layers if layer.log_bias is not None)
    assert cache.nbytes == slots + bias + 15 * window


@pytest.mark.parametrize("keep", [0.05, 0.2])
def test_attention_matching_is_closer_than_eviction(trace, keep):
    def kl(name):
        return kvcat.compare(trace, make_compressor(name)(trace, keep_ratio=keep)).kl.mean()

    closest = min(kl("snapkv"), kl("h2o"), kl("streaming"))
    assert 0 < kl("attention-matching") < 0.5 * closest


def test_a_saved_cache_generates_the_same_and_a_whole_one_as_transformers(
    loaded, ids, trace, tmp_path
):
    model, _ = loaded
    question = ids[:, PREFIX : PREFIX + 16]

    def generated(**inputs):
        return model.generate(**inputs, max_new_tokens=12, do_sample=False)[0].tolist()

    cache = kvcat.AttentionMatching()(trace, keep_ratio=0.2)
    cache.save(tmp_path / "cache.safetensors")
    again = CompactCache.load(tmp_path / "cache.safetensors", model)
    assert generated(**again.inputs(model, question)) == generated(**cache.inputs(model, question))
    whole = generated(**trace.dense_cache().inputs(model, question))
    assert whole == generated(input_ids=ids[:, : PREFIX + 16])[PREFIX:]
