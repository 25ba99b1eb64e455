"""A cache whose values were fitted with a log-bias, fitted again without."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from structured_heads import first_slots

from kvcat.cache import CompactLayer
from kvcat.compress import AttentionMatching, refit_without_log_bias, trace
from kvcat.compress.queries import fitted_queries
from kvcat.errors import InputError

PLAIN = {"own_weight": 0.0}  # the trace's queries alone, which the oracles know
COUNTS = [[[1, 3], [4, 2], [2, 2]], [[3, 3], [3, 3], [3, 3]]]


@pytest.fixture(scope="module")
def found(double, windows):
    return trace(double, windows, 48)


def systems(found, cache):
    """Of every head: its index, weighted attention over its slots without log-bias, and the dense outputs."""
    rest = fitted_queries(found, 0.0, by_share=True).log_rest
    for index, b, h in np.ndindex(2, 3, 2):
        queries = found.queries[index][b, 2 * h : 2 * h + 2].flatten(0, 1) * found.scales[index]
        every = queries @ found.keys[index][b, h].mT
        share = (every.logsumexp(-1) - rest[index][b, 2 * h : 2 * h + 2].flatten()).sigmoid().unsqueeze(-1)
        weights = (queries @ cache.layers[index].head(b, h)[0].mT).softmax(-1)
        yield (index, b, h), weights * share, every.softmax(-1) @ found.values[index][b, h] * share


def test_values_of_equal_and_unequal_heads_are_the_least_squares_solution(found):
    ragged = first_slots(AttentionMatching(budgets="equal")(found, num_slots=4), COUNTS)
    refitted = refit_without_log_bias(found, ragged, ridge=1e-13, **PLAIN)
    far = refit_without_log_bias(found, ragged, ridge=1e12)
    assert [layer.counts.tolist() for layer in refitted.layers] == COUNTS
    assert torch.equal(refitted.layers[0].positions, ragged.layers[0].positions)
    assert refitted.metadata == {**ragged.metadata, "log_bias": "none, values refitted"}
    for (index, b, h), weights, outputs in systems(found, ragged):
        (keys, values, bias), old = refitted.layers[index].head(b, h), ragged.layers[index].head(b, h)
        assert bias is None
        assert torch.equal(keys, old[0])
        expected = np.linalg.lstsq(weights.numpy(), outputs.numpy(), rcond=None)[0]
        assert torch.allclose(values, torch.from_numpy(expected), atol=1e-5)
        assert torch.allclose(far.layers[index].head(b, h)[1], old[1], atol=1e-5)


def test_layers_without_log_bias_stay_and_a_row_is_fitted_as_alone(model, windows, traced):
    cache = AttentionMatching(budgets="equal")(traced, num_slots=9)
    mixed = replace(cache, layers=[CompactLayer(cache.layers[0].keys, cache.layers[0].values), cache.layers[1]])
    refitted = refit_without_log_bias(traced, mixed)
    assert torch.equal(refitted.layers[0].values, mixed.layers[0].values)
    assert not torch.equal(refitted.layers[1].values, mixed.layers[1].values)
    alone = refit_without_log_bias(trace(model, windows[1:2], 48), mixed.select([1]))
    assert torch.allclose(refitted.layers[1].values[1], alone.layers[1].values[0], atol=2e-3, rtol=2e-3)


def test_what_does_not_belong_together_is_refused(model, windows, traced):
    cache = AttentionMatching(budgets="equal")(traced, num_slots=9)
    for wrong in (replace(cache, num_tokens=47), cache.select([0]), replace(cache, fingerprint="0" * 64)):
        with pytest.raises(InputError, match="does not belong to a trace of 3 prefixes of 48"):
            refit_without_log_bias(traced, wrong)
    with pytest.raises(InputError, match="supervision='self' has no predictions"):
        refit_without_log_bias(trace(model, windows[:, :48], supervision="self"), cache)
    with pytest.raises(InputError, match="ridge must be larger than 0"):
        refit_without_log_bias(traced, cache, ridge=0.0)
