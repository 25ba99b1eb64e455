"""Attention Matching layer by layer, and every option under every source of queries."""

from dataclasses import replace

import pytest
import torch
from structured_heads import positions_of

from kvcat.attention import Recorder
from kvcat.cache import CompactCache
from kvcat.compress import AttentionMatching, Eviction, Reconstruction, trace
from kvcat.compress.asking import ask, own_queries
from kvcat.compress.freezing import frozen
from kvcat.errors import InputError
from kvcat.models import hidden_states

SOURCES = {
    "suffix": lambda model, ids: trace(model, ids, 48),
    "reconstruction": lambda model, ids: trace(model, Reconstruction(ids[:1], 28, 36)),
    "self": lambda model, ids: trace(model, ids, 48, supervision="self"),
}
OPTIONS = [
    {}, {"preset": "paper"}, {"num_queries": 9}, {"num_iters": 3}, {"ridge": None}, {"log_bias": False},
    {"values": "original"}, {"log_bias": False, "values": "original"}, {"selection": "mean"}, {"selection": "max"},
    {"selection": "omp", "picks": 3}, {"kernel_size": 3, "pooling": "max"},
]  # fmt: skip


@torch.no_grad()
def one_forward_per_layer(found, num_slots, **options):
    """The twin: layer i is compressed alone, its queries from a forward over i compact and other evicted layers."""
    method = AttentionMatching(**options)
    layers = list(Eviction("first")(found, num_slots=num_slots).layers)
    start = found.supervision_start - found.prefix_len
    for index in range(len(layers)):
        mixed = CompactCache(layers, found.prefix_len, found.fingerprint)
        recorder = Recorder(start)
        with frozen(found.model):
            hidden_states(found.model, **mixed.inputs(found.model, found.suffix_ids), kv_recorder=recorder)
        queries = [recorder.queries[i] for i in range(len(layers))]
        seen = replace(found, queries=queries, _memo={})
        keys = {i: recorder.keys[i][:, :, num_slots:] for i in range(len(layers))}
        own = own_queries(found) if method.options().own_weight else None
        by_share = method.options().weights == "share"
        asked = ask(seen, own, method.options().own_weight, by_share=by_share, later_keys=keys)
        seen.memo(("asked", method.options().weights, method.options().own_weight), lambda asked=asked: asked)
        layers[index] = method(seen, num_slots=num_slots).layers[index]
    return layers


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("suffix", {}),
        ("suffix", {"preset": "paper", "num_queries": 20}),
        ("suffix", {"log_bias": False}),
        ("suffix", {"selection": "omp", "picks": 3}),
        ("reconstruction", {}),
    ],
)
def test_one_pass_gives_what_one_forward_per_layer_gives(make_model, windows, source, options):
    model = make_model(torch.float64, num_hidden_layers=3)
    found = SOURCES[source](model, windows)
    cache = AttentionMatching(on_policy=True, **options)(found, num_slots=6)
    for layer, expected in zip(cache.layers, one_forward_per_layer(found, 6, **options), strict=True):
        assert torch.equal(layer.keys, expected.keys)
        assert torch.allclose(layer.values, expected.values, rtol=1e-4, atol=1e-5)
        assert (layer.log_bias is None) == (expected.log_bias is None)
        if layer.log_bias is not None:
            assert torch.allclose(layer.log_bias, expected.log_bias, atol=1e-5)


def test_on_policy_changes_no_first_layer_and_every_later_one(traced):
    off, on = (AttentionMatching(on_policy=policy)(traced, num_slots=6) for policy in (False, True))
    assert torch.allclose(on.layers[0].values, off.layers[0].values, atol=1e-3)
    assert not torch.allclose(on.layers[1].values, off.layers[1].values, atol=1e-3)
    assert (on.metadata["on_policy"], off.metadata["on_policy"]) == ("True", "False")


@torch.no_grad()
def test_on_policy_fits_the_queries_that_come_over_the_compact_layers_below(traced):
    caches = [AttentionMatching(on_policy=policy)(traced, num_slots=12) for policy in (False, True)]
    recorder = Recorder()
    inputs = caches[1].inputs(traced.model, traced.suffix_ids)
    hidden_states(traced.model, **inputs, kv_recorder=recorder)
    queries = recorder.queries[1].unflatten(1, (2, 2)).flatten(2, 3) * traced.scales[1]
    dense = (queries @ traced.keys[1].mT).softmax(-1) @ traced.values[1]
    off, on = (
        ((queries @ layer.keys.mT + layer.log_bias.unsqueeze(2)).softmax(-1) @ layer.values - dense).square().sum()
        for layer in (cache.layers[1] for cache in caches)
    )
    assert on < 0.9 * off


def test_on_policy_needs_queries_after_the_prefix(model, windows):
    with pytest.raises(InputError, match="on_policy needs a suffix or a reconstruction sequence"):
        AttentionMatching(on_policy=True)(SOURCES["self"](model, windows), num_slots=6)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_works_with_every_source_of_queries(model, windows, source, options):
    found = SOURCES[source](model, windows[:2])
    for policy in (False, True)[: 1 if source == "self" else 2]:
        cache = AttentionMatching(on_policy=policy, **options)(found, num_slots=7)
        assert cache.has_log_bias == options.get("log_bias", True)
        for index, layer in enumerate(cache.layers):
            assert layer.keys.shape == (found.batch_size, 2, 7, 8)
            assert all(tensor.isfinite().all() for tensor in layer.tensors().values())
            at = positions_of(layer.keys, found.keys[index])
            assert (at.diff(dim=-1) > 0).all()
            own = found.values[index].gather(2, at.unsqueeze(-1).expand(-1, -1, -1, 8))
            assert torch.equal(layer.values, own) == (options.get("values") == "original")


def test_without_log_bias_and_with_original_values_the_kept_slots_are_those_of_the_prefix(traced):
    cache = AttentionMatching(log_bias=False, values="original")(traced, num_slots=9)
    assert not cache.has_log_bias
    # layer 0 has equal values for equal tokens
    layer = cache.layers[1]
    assert torch.equal(positions_of(layer.keys, traced.keys[1]), positions_of(layer.values, traced.values[1]))


def test_the_log_bias_alone_makes_eviction_of_the_same_keys_no_worse_on_the_fitted_queries(traced):
    """Attention output of the fitted queries, head by head: the guard lets no head lose."""
    plain, biased = (
        AttentionMatching(log_bias=on, values="original", weights="equal", own_weight=0.0)(traced, num_slots=9).layers
        for on in (False, True)
    )
    better = 0
    for index in range(2):
        queries = traced.queries[index].unflatten(1, (2, 2)).flatten(2, 3) * traced.scales[index]
        dense = (queries @ traced.keys[index].mT).softmax(-1) @ traced.values[index]
        errors = []
        for layer in (plain[index], biased[index]):
            scores = queries @ layer.keys.mT
            if layer.log_bias is not None:
                scores = scores + layer.log_bias.unsqueeze(2)
            errors.append((scores.softmax(-1) @ layer.values - dense).square().sum((2, 3)))
        assert (errors[1] <= errors[0] * 1.0001).all()
        better += (errors[1] < 0.99 * errors[0]).sum().item()
    assert better > 0


@pytest.mark.parametrize("options", [{"values": "none"}, {"values": "least squares"}])
def test_values_of_an_unknown_kind_are_refused(options):
    with pytest.raises(InputError, match=r"values must be 'fitted' or 'original', not"):
        AttentionMatching(**options)
