"""A prefix that is compact already and grows: traced, compressed again and replayed."""

from dataclasses import replace

import pytest
import torch
from structured_heads import first_slots, positions_of, tensors

from kvcat.compress import (
    AttentionMatching,
    Eviction,
    GradientCompression,
    make_compressor,
    replay,
    trace,
)

COUNTS = [[[9, 4], [1, 9], [5, 5]], [[3, 8], [9, 9], [2, 1]]]
NEW = 16


@pytest.fixture(scope="module")
def compact(double, windows):
    return AttentionMatching(budgets="equal")(trace(double, windows, 32), num_slots=9)


@pytest.fixture(scope="module")
def ragged(compact):
    return first_slots(compact, COUNTS)


@pytest.fixture(params=["equal", "ragged"])
def past(request, compact, ragged):
    return compact if request.param == "equal" else ragged


@pytest.mark.parametrize("options", [{}, {"preset": "paper"}, {"budgets": "adaptive"}], ids=str)
def test_behind_a_cache_of_all_slots_trace_and_fit_are_those_of_the_dense_forward(
    double, windows, options
):
    dense = trace(double, windows, 48)
    again = trace(double, windows, 48, past=trace(double, windows, 32).dense_cache())
    assert (again.past_len, again.max_slots) == (32, 48)
    again_tensors, dense_tensors = (
        [x.keys, x.values, x.queries, [each.suffix_keys for each in x.layers], x.logits]
        for x in (again, dense)
    )
    torch.testing.assert_close(again_tensors, dense_tensors, rtol=0, atol=1e-12)
    # behind a past the prefix has no queries of its own
    method = AttentionMatching(**{"own_weight": 0.0, **options})
    caches = [
        tensors(method(one_trace, num_slots=7), "keys", "values", "log_bias")
        for one_trace in (again, dense)
    ]
    torch.testing.assert_close(*caches, rtol=0, atol=1e-6, check_dtype=False)


def test_all_slots_of_a_grown_cache_replay_what_follows_it(double, windows, past):
    grown = trace(double, windows, 48, past=past)
    cache = grown.dense_cache()
    assert [x.counts.tolist() for x in cache.layers] == [
        (x.counts + NEW).tolist() for x in past.layers
    ]
    assert all(
        torch.equal(grown.layers[i].slots.ranks().amax(-1) + 1, x.counts)
        for i, x in enumerate(cache.layers)
    )
    followed = replay(double, past, windows[:, 32:])[:, NEW:]
    assert torch.allclose(grown.logits, followed, atol=1e-12)
    assert torch.allclose(replay(double, cache, windows[:, 48:]), followed, atol=1e-12)
    kept = AttentionMatching()(grown, num_slots=30)
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(kept.layers, cache.layers, strict=True))
    chunked = trace(double, windows, 48, past=past, chunk_tokens=7)
    assert torch.allclose(chunked.logits, followed, atol=1e-12)


METHODS = [
    AttentionMatching(),
    AttentionMatching("paper"),
    AttentionMatching(log_bias=False),
    AttentionMatching(budgets="adaptive"),
    Eviction("first"),
    Eviction("random"),
    Eviction("streaming"),
    Eviction("keynorm"),
    GradientCompression(num_steps=2),
    GradientCompression(num_steps=2, init="random"),
]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_every_method_compresses_a_grown_cache_and_a_row_as_alone(double, windows, past, method):
    grown = trace(double, windows, 48, past=past)
    cache = method(grown, num_slots=12)
    assert all(x.isfinite().all() for layer in cache.layers for x in layer.tensors().values())
    assert all(layer.positions is None for layer in cache.layers)
    assert cache.num_tokens == 48
    assert cache.mean_slots <= 12
    alone = method(trace(double, windows[1:2], 48, past=past.select([1])), num_slots=12)
    torch.testing.assert_close(tensors(cache.select([1])), tensors(alone), atol=2e-3, rtol=2e-3)


def test_without_a_fitted_log_bias_slots_keep_the_one_they_have(double, windows, compact):
    grown = trace(double, windows, 48, past=compact)
    cache = AttentionMatching(log_bias=False, budgets="equal")(grown, num_slots=12)
    for index, layer in enumerate(cache.layers):
        at = positions_of(layer.keys, grown.keys[index])
        assert torch.equal(layer.log_bias, grown.layers[index].slots.log_bias.gather(2, at))
    assert any((layer.log_bias != 0).any() for layer in cache.layers)
    plain = Eviction("streaming")(trace(double, windows, 24), num_slots=9)
    cache = AttentionMatching(log_bias=False)(trace(double, windows, 48, past=plain), num_slots=12)
    assert all(layer.log_bias is None for layer in cache.layers)


@pytest.mark.parametrize("bits", [8, 4])
def test_all_slots_of_a_grown_cache_in_few_bits_hold_no_padding(double, windows, ragged, bits):
    grown = trace(double, windows, 48, past=ragged)
    for method in (AttentionMatching(bits=bits), Eviction("first", bits=bits)):
        cache = method(grown, num_slots=48)
        counts = [layer.counts.tolist() for layer in grown.dense_cache().layers]
        assert [layer.counts.tolist() for layer in cache.layers] == counts


@pytest.mark.parametrize("name", ["attention-matching", "refined"])
def test_layers_without_a_log_bias_are_fitted_next_to_padded_ones_as_if_theirs_were_0(
    double, windows, name
):
    plain = Eviction("streaming")(trace(double, windows, 32), num_slots=9)
    # heads of 9 slots in the first layer, which is not padded, and in the second one, which is
    layers = first_slots(with_zeros(plain), [[[9, 9]] * 3, COUNTS[1]]).layers
    mixed = replace(plain, layers=[plain.layers[0], replace(layers[1], log_bias=None)])
    zeros = replace(plain, layers=layers)
    caches = [
        make_compressor(name, log_bias=False)(trace(double, windows, 48, past=past), num_slots=12)
        for past in (mixed, zeros)
    ]
    pairs = zip(*(tensors(cache, "keys", "values", "counts") for cache in caches), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


def with_zeros(cache):
    """The cache with a log-bias of 0 and positions, which change nothing."""
    layers = [
        replace(x, log_bias=torch.zeros_like(x.keys[..., 0]), positions=torch.zeros_like(x.ranks()))
        for x in cache.layers
    ]
    return replace(cache, layers=layers)


def test_a_choice_of_a_pasts_examples_continues_their_texts(double, windows, compact):
    order = [0, 2, 1]
    continued = trace(double, windows[order], 48, past=compact.select(order))
    whole = trace(double, windows, 48, past=compact)
    torch.testing.assert_close(continued.layers[1].queries, whole.layers[1].queries[order])
