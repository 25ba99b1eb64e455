"""Compact caches as ordinary prefixes: keys turned to other positions, in a cache of stock
transformers."""

import json

import pytest
import safetensors.torch
import torch
from evicted_caches import LLAMA3, evicted, ids, make_model, our_logits, rope
from transformers import DynamicCache

from kvcat.cache import CompactCache, cache_argument
from kvcat.errors import InputError
from kvcat.serving import export_prefix, plain_prefix
from tiny import TRANSFORMERS

KINDS = ["sliding_attention", "full_attention"]
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
ROTARY = {
    "llama": ("llama", {}),
    "linear scaling": ("llama", rope("linear", factor=4.0)),
    "llama 3 scaling": ("llama", rope("llama3", **LLAMA3)),
    "yarn": ("llama", rope("yarn", **YARN)),
    "yarn with an attention factor": ("qwen2", rope("yarn", attention_factor=1.7, **YARN)),
    "a quarter of the channels": ("gpt_neox", {}),
    "half of the channels": ("phi", {}),
    "interleaved channels": ("cohere", {}),
    "two embeddings, by type of layer": ("gemma3_text", {"head_dim": 8, "layer_types": KINDS}),
    "normalised keys": ("qwen3", {"head_dim": 8}),
    "a layer without positions": ("smollm3", {"no_rope_layers": [1, 0]}),
}


def stock_cache(layers):
    """A stock transformers cache of the given keys and values."""
    cache = DynamicCache()
    for index, layer in enumerate(layers):
        cache.update(layer.keys, layer.values, index)
    return cache


def stock_logits(model, layers, suffix, start):
    """Logits on a stock cache, the tokens at the given position and after."""
    at = torch.arange(start, start + suffix.shape[1]).expand(len(suffix), -1)
    return model(suffix, **cache_argument(stock_cache(layers)), position_ids=at).logits.detach()


@pytest.mark.parametrize(("kind", "options"), ROTARY.values(), ids=ROTARY)
def test_a_stock_cache_of_the_exported_keys_answers_as_the_compact_cache(kind, options):
    model = make_model(kind, options)
    cache = evicted(model, ids(2, 30), 7)
    suffix = ids(2, 6)
    ours = our_logits(model, cache, suffix)
    plain = plain_prefix(cache, model)
    assert (plain.num_tokens, plain.num_slots) == (7, 7)
    assert torch.allclose(stock_logits(model, plain.layers, suffix, 7), ours, atol=1e-4, rtol=1e-4)
    assert torch.allclose(our_logits(model, plain, suffix), ours, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(
    TRANSFORMERS < (5, 21), reason="generate gives chunks behind a cache a wrong mask"
)
def test_layers_with_different_numbers_of_slots_answer_in_a_stock_cache_token_by_token():
    model = make_model()
    question = ids(1, 4)
    counts = (3, 8)
    cache = evicted(model, ids(1, 30), counts)
    ours = model.generate(
        **cache.inputs(model, question), max_new_tokens=8, do_sample=False, pad_token_id=0
    )
    model.set_attn_implementation("sdpa")
    plain = plain_prefix(cache, model)
    assert (plain.num_tokens, [layer.max_slots for layer in plain.layers]) == (
        counts[0],
        list(counts),
    )
    theirs = model.generate(
        question,
        attention_mask=torch.ones(1, counts[0] + 4, dtype=torch.long),
        **cache_argument(stock_cache(plain.layers)),
        prefill_chunk_size=1,
        max_new_tokens=8,
        do_sample=False,
        pad_token_id=0,
    )
    assert torch.equal(ours, theirs)


def test_the_file_holds_all_that_a_reader_needs(tmp_path):
    model = make_model("qwen2", dtype=torch.bfloat16)
    cache = evicted(model, ids(2, 30), (3, 8))
    export_prefix(cache, model, tmp_path / "p")
    with safetensors.safe_open(tmp_path / "p", "pt") as file:
        metadata = file.metadata()
        assert sorted(file.keys()) == [
            f"layers.{i}.{kind}" for i in (0, 1) for kind in ("keys", "values")
        ]
    plain = plain_prefix(cache, model)
    for name, tensor in safetensors.torch.load_file(tmp_path / "p").items():
        _, layer, kind = name.split(".")
        assert torch.equal(tensor, getattr(plain.layers[int(layer)], kind))
    metadata.pop("sha256")
    assert json.loads(metadata.pop("record")) == {
        "method": "random",
        "options": {"original_num_tokens": "30"},
    }
    assert metadata == {
        "format": "kvcat-prefix-2",
        "num_layers": "2",
        "num_slots": "3",
        "num_tokens": "30",
        "next_position": "3",
        "dtype": "bfloat16",
        "model_type": "qwen2",
        "fingerprint": cache.fingerprint,
    }
    with pytest.raises(
        InputError, match="p is an exported prefix of kvcat, not a compact cache of kvcat"
    ):
        CompactCache.load(tmp_path / "p")


def test_a_log_bias_is_dropped_on_demand():
    model = make_model()
    suffix = ids(2, 6)
    cache = evicted(model, ids(2, 30))
    biased = evicted(model, ids(2, 30), log_bias=True)
    dropped = plain_prefix(biased, model, drop_log_bias=True)
    expected = our_logits(model, cache, suffix)
    assert dropped.metadata["log_bias"] == "dropped"
    assert torch.allclose(
        stock_logits(model, dropped.layers, suffix, 7), expected, atol=1e-4, rtol=1e-4
    )
    assert not torch.allclose(our_logits(model, biased, suffix), expected, atol=1e-2)
