"""A cache whose values were fitted with a log-bias, fitted again without."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvcat.cache import CompactLayer
from kvcat.compress import AttentionMatching, compare, trace
from kvcat.compress.queries import fitted_queries, log_mass
from kvcat.compress.refit import refit_without_log_bias
from kvcat.errors import InputError

PLAIN = {"own_weight": 0.0}  # the trace's queries alone, which the oracles know


def shares_of(found, layer):
    """The part of each query's attention that goes to the prefix: (batch, heads, queries)."""
    fitted = fitted_queries(found, 0.0, by_share=True)
    mass = log_mass(found.queries[layer], found.keys[layer], found.scales[layer])
    return (mass - fitted.log_rest[layer]).sigmoid()


def dropped(cache):
    return replace(cache, layers=[CompactLayer(x.keys, x.values) for x in cache.layers])


def output_errors(traced, cache, layer):
    """Squared error of every head's attention output over all queries, one head and one query at a time."""
    group = traced.queries[layer].shape[1] // traced.keys[layer].shape[1]
    shares = shares_of(traced, layer)
    errors = torch.zeros(traced.keys[layer].shape[:2], dtype=torch.float64)
    for b, h in np.ndindex(*errors.shape):
        keys, values, bias = (x if x is None else x.double() for x in cache.layers[layer].head(b, h))
        own = slice(h * group, (h + 1) * group)
        queries, weights = traced.queries[layer][b, own].flatten(0, 1), shares[b, own].flatten()
        for query, weight in zip(queries.double(), weights.double(), strict=True):
            scores = traced.scales[layer] * keys @ query
            kept = (scores if bias is None else scores + bias).softmax(0) @ values
            dense = (traced.scales[layer] * traced.keys[layer][b, h].double() @ query).softmax(0)
            errors[b, h] += (kept - dense @ traced.values[layer][b, h].double()).square().sum() * weight.square()
    return errors


@pytest.fixture
def cache(traced):
    return AttentionMatching("paper", num_queries=None)(traced, num_slots=9)


def test_no_head_does_worse_than_with_the_log_bias_dropped(traced, cache):
    refitted = refit_without_log_bias(traced, cache, **PLAIN)
    for layer in range(2):
        assert (output_errors(traced, refitted, layer) <= output_errors(traced, dropped(cache), layer) + 1e-9).all()
    assert compare(traced, refitted).kl.mean() < compare(traced, dropped(cache)).kl.mean()


def test_keys_stay_and_the_log_bias_is_gone(traced, cache):
    refitted = refit_without_log_bias(traced, cache)
    assert cache.has_log_bias
    assert not refitted.has_log_bias
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(refitted.layers, cache.layers, strict=True))
    assert refitted.metadata == {**cache.metadata, "log_bias": "none, values refitted"}


def test_with_hardly_any_ridge_the_values_are_the_least_squares_solution(make_model, windows):
    double = trace(make_model(torch.float64), windows, 48)
    cache = AttentionMatching()(double, num_slots=4)
    refitted = refit_without_log_bias(double, cache, ridge=1e-13, **PLAIN)
    keys, queries = cache.layers[1].keys[2, 1], double.queries[1][2, 2:].flatten(0, 1) * double.scales[1]
    weights = (queries @ keys.mT).softmax(-1)
    outputs = (queries @ double.keys[1][2, 1].mT).softmax(-1) @ double.values[1][2, 1]
    share = shares_of(double, 1)[2, 2:].flatten().unsqueeze(-1)
    expected = np.linalg.lstsq((weights * share).numpy(), (outputs * share).numpy(), rcond=None)[0]
    assert torch.allclose(refitted.layers[1].values[2, 1], torch.from_numpy(expected), atol=1e-6)


def test_an_enormous_ridge_leaves_the_values(traced, cache):
    refitted = refit_without_log_bias(traced, cache, ridge=1e12)
    for new, old in zip(refitted.layers, cache.layers, strict=True):
        assert torch.allclose(new.values, old.values, atol=1e-5)


def test_layers_without_log_bias_stay_as_they_are(traced, cache):
    mixed = replace(cache, layers=[CompactLayer(cache.layers[0].keys, cache.layers[0].values), cache.layers[1]])
    refitted = refit_without_log_bias(traced, mixed)
    assert torch.equal(refitted.layers[0].values, mixed.layers[0].values)
    assert not torch.equal(refitted.layers[1].values, mixed.layers[1].values)


def test_a_batch_gives_what_its_examples_give_alone(model, windows, traced, cache):
    together = refit_without_log_bias(traced, cache)
    for row in range(3):
        alone = refit_without_log_bias(trace(model, windows[row : row + 1], 48), cache.select([row]))
        assert torch.allclose(together.layers[1].values[row], alone.layers[1].values[0], atol=2e-3, rtol=2e-3)


def test_what_does_not_belong_together_is_refused(model, windows, traced, cache):
    for wrong in (replace(cache, num_tokens=47), cache.select([0]), replace(cache, fingerprint="0" * 64)):
        with pytest.raises(InputError, match="does not belong to a trace of 3 prefixes of 48"):
            refit_without_log_bias(traced, wrong)
    with pytest.raises(InputError, match="supervision='self' lacks"):
        refit_without_log_bias(trace(model, windows[:, :48], supervision="self"), cache)
    with pytest.raises(InputError, match="ridge must be larger than 0"):
        refit_without_log_bias(traced, cache, ridge=0.0)


def test_heads_of_unequal_slots_are_fitted_each_as_the_least_squares_solution(make_model, windows):
    double = trace(make_model(torch.float64), windows, 48)
    full = AttentionMatching()(double, num_slots=4)
    counts = [[[1, 3], [4, 2], [2, 2]], [[3, 3], [3, 3], [3, 3]]]
    layers = []
    for layer, rows in zip(full.layers, counts, strict=True):
        parts = [
            [[part[b, h, :n] for h, n in enumerate(row)] for b, row in enumerate(rows)]
            for part in (layer.keys, layer.values, layer.log_bias, layer.positions)
        ]
        layers.append(CompactLayer.ragged(*parts))
    ragged = replace(full, layers=layers)
    shares = [shares_of(double, layer) for layer in range(2)]
    for ridge, tolerance in ((1e-13, 1e-5), (1e12, None)):
        refitted = refit_without_log_bias(double, ragged, ridge=ridge, **PLAIN)
        assert [layer.counts.tolist() for layer in refitted.layers] == counts
        assert torch.equal(refitted.layers[0].positions, ragged.layers[0].positions)
        for index, b, h in np.ndindex(2, 3, 2):
            (keys, values, bias), old = refitted.layers[index].head(b, h), ragged.layers[index].head(b, h)
            assert bias is None
            assert torch.equal(keys, old[0])
            queries = double.queries[index][b, 2 * h : 2 * h + 2].flatten(0, 1) * double.scales[index]
            outputs = (queries @ double.keys[index][b, h].mT).softmax(-1) @ double.values[index][b, h]
            share = shares[index][b, 2 * h : 2 * h + 2].flatten().unsqueeze(-1)
            weights = (queries @ keys.mT).softmax(-1)
            expected = np.linalg.lstsq((weights * share).numpy(), (outputs * share).numpy(), rcond=None)[0]
            wanted = old[1] if tolerance is None else torch.from_numpy(expected)
            assert torch.allclose(values, wanted, atol=tolerance or 1e-5)
