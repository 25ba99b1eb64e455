"""The preset "paper" in float32 on a pretrained model, against the paper's formulas in NumPy and
SciPy."""

import math

import numpy as np
import pytest
import scipy.linalg
import scipy.special

import kvcat
from kvcat.compress import fit_log_bias

LOW = math.exp(-3)
HIGH = math.exp(3)
PREFIX_LEN = 200
NUM_QUERIES = 12
TEXT = "def area(width, height):\n    return width * height\n\n\nclass Shape:\n    pass\n\n\n" * 8


@pytest.fixture(scope="module")
def pretrained_trace():
    """Six layers of two KV heads, two query heads each: 24 queries a head behind 200 tokens."""
    model, tokenizer = kvcat.load("kvcat-base")
    ids = tokenizer(TEXT, return_tensors="pt").input_ids[:, : PREFIX_LEN + NUM_QUERIES]
    assert ids.shape[1] == PREFIX_LEN + NUM_QUERIES
    return kvcat.trace(model, ids, PREFIX_LEN)


def heads_of(trace):
    """Of every layer and KV head: keys, values and queries in float64, and the factor on q.k."""
    for layer, keys in enumerate(trace.keys):
        num_kv_heads = keys.shape[1]
        grouped = trace.queries[layer][0].unflatten(0, (num_kv_heads, -1)).flatten(1, 2)
        for head in range(num_kv_heads):
            tensors = (keys[0, head], trace.values[layer][0, head], grouped[head])
            yield layer, head, *(x.double().numpy() for x in tensors), trace.scales[layer]


def paper_log_bias(kept_scores, scores, num_iters=2):
    """Two projected-gradient steps from the clamped minimum-norm least squares."""
    largest = scores.max(1, keepdims=True)
    design = np.exp(kept_scores - largest)
    mass = np.exp(scores - largest).sum(1)
    weights = scipy.linalg.lstsq(design, mass, lapack_driver="gelsd")[0].clip(LOW, HIGH)
    for _ in range(num_iters):
        gradient = design.T @ (design @ weights - mass)
        weights = (weights - gradient / np.linalg.norm(design, 2) ** 2).clip(LOW, HIGH)
    return np.log(weights)


def paper_head(keys, values, queries, scale, num_slots):
    """Slots and log-bias of one head, and the values that follow from a log-bias.

    AM-HighestAttnKeys as the paper's appendix has it.
    """
    scores = scale * queries @ keys.T
    attention = scipy.special.softmax(scores, axis=1)
    importance = np.sqrt((attention**2).mean(0))
    slots = np.sort(np.argsort(-importance, kind="stable")[:num_slots])

    def fitted_values(log_bias):
        weights = scipy.special.softmax(scores[:, slots] + log_bias, axis=1)
        ridge = 1e-4 * np.linalg.norm(weights, 2) ** 2
        gram = weights.T @ weights + ridge * np.eye(num_slots)
        return np.linalg.solve(gram, weights.T @ attention @ values)

    return slots, paper_log_bias(scores[:, slots], scores), fitted_values


@pytest.mark.parametrize("num_slots", [6, 20, 100])
def test_slots_log_bias_and_values_are_those_of_the_papers_formulas(pretrained_trace, num_slots):
    """With 24 queries a head, 100 slots are more than the equations determine: the start
    decides."""
    cache = kvcat.AttentionMatching("paper", num_queries=None)(
        pretrained_trace, num_slots=num_slots
    )
    for layer, head, keys, values, queries, scale in heads_of(pretrained_trace):
        slots, log_bias, fitted_values = paper_head(keys, values, queries, scale, num_slots)
        compact = cache.layers[layer]
        assert np.array_equal(compact.positions[0, head], slots)
        assert np.allclose(compact.log_bias[0, head], log_bias, atol=2e-2)
        # the rounding of the scores reaches the values through the log-bias: take the cache's
        log_bias = compact.log_bias[0, head].double().numpy()
        fitted = fitted_values(log_bias)
        weights = scipy.special.softmax(scale * queries @ keys[slots].T + log_bias, axis=1)
        outputs = weights @ fitted
        difference = weights @ (compact.values[0, head].double().numpy() - fitted)
        assert np.linalg.norm(difference) <= 2e-3 * np.linalg.norm(outputs)


@pytest.mark.parametrize("num_iters", [0, 2, 8])
def test_the_steps_start_from_least_squares_without_a_ridge_in_single_precision(
    pretrained_trace, num_iters
):
    """More slots than queries: a ridge of 1e-5 in the start would move log-biases by .1 to 6
    nats."""
    for layer, head, keys, _, queries, scale in heads_of(pretrained_trace):
        scores = scale * queries @ keys.T
        kept = scores[:, : 3 * len(queries)]
        expected = paper_log_bias(kept, scores, num_iters)
        single = pretrained_trace.keys[layer].new_tensor(scores)
        log_bias = fit_log_bias(single[:, : kept.shape[1]], single, num_iters=num_iters)
        assert log_bias.dtype == single.dtype
        assert np.allclose(log_bias, expected, atol=5e-3), (layer, head)
