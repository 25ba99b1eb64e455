"""Our own methods and compact caches against kvpress' own runs; most need kvpress installed."""

import importlib

import pytest
import torch
from presses import PREFIX, SLOTS, distinct_texts, needs_kvpress, positions_of, press, random_model
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvcat.compress import Eviction, replay, trace
from kvcat.compress.base import received_mass
from kvcat.compress.kvpress import KVPress, _press_prefix, removed_fraction

# fire 0.6, which kvpress pins, imports a module that Python 3.13 drops
pytestmark = pytest.mark.filterwarnings("ignore:'pipes' is deprecated:DeprecationWarning")


@pytest.fixture(scope="module")
def texts():
    return distinct_texts()


@pytest.fixture(scope="module")
def qwen(tiny_folder):
    return random_model(tiny_folder)


@pytest.fixture(scope="module")
def found(qwen, texts):
    return trace(qwen, texts, PREFIX)


@needs_kvpress
@pytest.mark.parametrize(
    "name",
    [
        "SnapKVPress",
        "AdaKVPress+SnapKVPress",
        "KVzipPress",
        "MergingPress+KnormPress",
        "KeyRerotationPress+StreamingLLMPress",
    ],
)
def test_the_suffix_scores_as_in_kvpress_own_run(qwen, texts, found, monkeypatch, name):
    """kvpress itself: prefill under the press, then the suffix on its cache, hidden slots masked by its own patch."""
    method = press(name)
    cache, own = method(found, num_slots=SLOTS), method._build()
    kvpress = importlib.import_module("kvpress")
    own.compression_ratio = removed_fraction(SLOTS, PREFIX, counts_removed=name == "KVzipPress")
    stock = AutoModelForCausalLM.from_pretrained(qwen.name_or_path, attn_implementation="sdpa").eval()
    stock.load_state_dict(qwen.state_dict())
    monkeypatch.setitem(
        ALL_ATTENTION_FUNCTIONS, "sdpa", kvpress.attention_patch.attention_patch(ALL_ATTENTION_FUNCTIONS["sdpa"])
    )
    positions = torch.arange(PREFIX)

    def give_position(module, args, kwargs):
        start = kwargs["past_key_values"].get_seq_length(module.layer_idx)
        return args, {"cache_position": positions[:1] + start + kwargs["hidden_states"].shape[1] - 1, **kwargs}

    for layer in stock.model.layers:
        layer.self_attn.register_forward_pre_hook(give_position, with_kwargs=True)
    past = DynamicCache()
    with torch.no_grad(), own(stock):
        stock.model(input_ids=texts[:1, :PREFIX], past_key_values=past)
    start = SLOTS if "Rerotation" in name else PREFIX
    with torch.no_grad():
        # one by one: kvpress finds no key that all of many queries ignore
        steps = [
            stock(texts[:1, PREFIX + i, None], past_key_values=past, position_ids=torch.tensor([[start + i]])).logits
            for i in range(6)
        ]
    logits = replay(qwen, cache.select([0]), texts[:1, PREFIX : PREFIX + 6])
    assert torch.allclose(logits, torch.cat(steps, dim=1), atol=2e-4)


@needs_kvpress
@pytest.mark.parametrize("num_slots", [9, 16, 40])
@pytest.mark.parametrize(
    ("name", "options", "theirs", "their_options"),
    [
        ("keynorm", {}, "KnormPress", {}),
        ("streaming", {"num_sinks": 4}, "StreamingLLMPress", {"n_sink": 4}),
        ("streaming", {"num_sinks": 1}, "StreamingLLMPress", {"n_sink": 1}),
        # the paper's experiments: window 32, kernel 7, max pooling; kvpress: 64, 5, average
        (
            "snapkv",
            {"window": 8, "kernel_size": 5, "pooling": "average"},
            "SnapKVPress",
            {"window_size": 8, "kernel_size": 5},
        ),
    ],
)
def test_our_method_keeps_the_positions_that_kvpress_keeps(found, name, options, theirs, their_options, num_slots):
    ours = Eviction(name, **options)(found, num_slots=num_slots)
    press = KVPress(theirs, **their_options)(found, num_slots=num_slots)
    for left, right in zip(positions_of(ours, found), positions_of(press, found), strict=True):
        assert torch.equal(left, right)


def scores_of(method, found):
    """Per layer, the scores that kvpress' own press gives to the first example's positions."""
    own, seen = method._build(), []
    score = own.score

    def record(*arguments):
        seen.append(score(*arguments))
        return seen[-1]

    own.score = record
    _press_prefix(own, found, 0, SLOTS)
    return seen


@needs_kvpress
def test_our_tova_scores_as_kvpress_but_lets_the_last_position_compete(found):
    ours = Eviction("tova").scorer.measure(found)
    for left, right in zip(ours, scores_of(KVPress("TOVAPress"), found), strict=True):
        assert torch.allclose(left[:1, ..., :-1], right[..., :-1], atol=1e-6)
        assert torch.equal(right[..., -1], right.amax(-1))


@needs_kvpress
def test_observed_attention_is_our_accumulated_attention_per_query_that_sees_the_position(found):
    seeing = torch.arange(PREFIX, 0, -1)
    theirs = scores_of(KVPress("ObservedAttentionPress"), found)
    for mass, scores in zip(received_mass(found, 0), theirs, strict=True):
        assert torch.allclose(mass[:1] / seeing / 2, scores, atol=1e-5)
