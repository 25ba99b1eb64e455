"""What plain prefixes, widened checkpoints and engines reject, each in one line."""

import re

import pytest
import torch
from evicted_caches import evicted, ids, make_model, ragged, rope

import kvcat
from kvcat.cache import CompactCache, CompactLayer
from kvcat.serving import export_prefix, plain_prefix, read_prefix, widen, write_gguf
from kvcat.serving.placing import Share, place, rotation_model
from tiny import loud_model, refusal_with, rejections

SLIDING = ["sliding_attention", "full_attention"]
GEMMA3 = {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8, "layer_types": SLIDING}
ON_CPU = {"share": Share(), "device": torch.device("cpu")}


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture
def biased(model):
    return evicted(model, ids(1, 30), log_bias=True)


def with_states():
    """A model of which only some layers see the whole text, and a cache of it."""
    model = loud_model("gemma3_text", **GEMMA3)
    traced = kvcat.trace(model, torch.arange(3, 33)[None], supervision="self")
    return model, kvcat.Eviction("keynorm")(traced, num_slots=6)


def prefix_with_states():
    model, cache = with_states()
    return plain_prefix(cache, model)


def composed_with_states():
    model, cache = with_states()
    return kvcat.compose(model, [cache, cache])


def placed_with_states():
    model, cache = with_states()
    return place([cache] * 2, rotation_model(model.config), dtype=torch.float32, **ON_CPU)


def placed_in_half_precision():
    model = make_model()
    cache = evicted(model, ids(1, 40))
    layers = [CompactLayer(layer.keys * 1e6, layer.values) for layer in cache.layers]
    far = CompactCache(layers, cache.num_tokens, cache.fingerprint)
    return place([far], rotation_model(model.config), dtype=torch.float16, **ON_CPU)


def read_back(cache, model, folder, **options):
    export_prefix(cache, model, folder / "p", **options)
    return read_prefix(folder / "p")


def widened(kind, head_dim, **options):
    return widen(make_model(kind, options), head_dim)


@rejections(
    # plain prefixes
    ("has a log-bias, which engines do not support",
     lambda biased, model: plain_prefix(biased, model)),
    (r"up to 7 and on average 6\.5 slots: .* with budgets=equal",
     lambda biased, model: plain_prefix(ragged(biased), model)),
    ("head_dim must be even and larger than the 8 of the cache, not 8",
     lambda biased, model: plain_prefix(biased, model, head_dim=8)),
    ("keeps its log-bias",
     lambda biased, model: plain_prefix(biased, model, head_dim=12, drop_log_bias=True)),
    ("belongs to another model",
     lambda model: plain_prefix(evicted(model, ids(1, 30)), make_model("qwen2"))),
    ("Gemma3ForCausalLM", prefix_with_states),
    (
        "equally many slots in every layer",
        lambda model, tmp_path: read_back(
            evicted(model, ids(1, 30), (7, 3), log_bias=True), model, tmp_path, drop_log_bias=True
        ),
    ),
    ("must hold one example",
     lambda model, tmp_path: read_back(evicted(model, ids(2, 30)), model, tmp_path)),
    ("not a widened checkpoint", lambda model, tmp_path: write_gguf(model, tmp_path / "m.gguf")),
    # several documents, and numbers of an engine
    ("Gemma3ForCausalLM: layers with a sliding window", composed_with_states),
    ("layers with a sliding window shorter than the document", placed_with_states),
    ("do not fit in float16", placed_in_half_precision),
    # widened checkpoints
    ("Qwen3ForCausalLM cannot be widened; what can: llama, .*pack without widening",
     lambda: widen(make_model("qwen3", {"head_dim": 8}), 12)),
    ("its sliding windows would lose the slots", lambda: widened("mistral", 12, sliding_window=16)),
    ("'dynamic' depend on the length of the text",
     lambda: widened("llama", 12, **rope("dynamic", factor=4.0))),
    ("head_dim must be even and larger than the model's 8, not 8", lambda: widened("llama", 8)),
    ("head_dim must be even", lambda: widened("llama", 11)),
    ("a head_dim of 100000000 is too large: above 77 the rotary base 10000",
     lambda: widened("llama", 10**8)),
)  # fmt: skip
def test_what_no_engine_can_serve_is_rejected_in_one_line(message, call, request):
    assert re.search(message, refusal_with(request, call))
