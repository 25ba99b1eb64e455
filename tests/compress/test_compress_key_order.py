"""Keys by residual: the greedy choice, computed anew at every step, and its sketch."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from structured_heads import head_batch, structured_head

from kvcat.compress import AttentionMatching, compare, trace
from kvcat.compress.head_attention import dense_attention
from kvcat.compress.key_order import SKETCH_ROWS, KeysByResidual, Sketch
from tiny import loud_model, refusal


def weighted_attention(batch):
    """Attention of every query to every key times the query's weight, by the formula."""
    attention = (batch.queries[0] @ batch.keys[0].mT).double().softmax(-1)
    return (batch.factors[0].double().unsqueeze(1) * attention).numpy()


def greedy_order(attention, ridge, num_keys):
    """The keys with the largest residual one after another, each residual from its definition."""
    gram = attention.T @ attention
    importance = np.diag(gram)
    taken = []
    for _ in range(num_keys):
        residual = (1 + ridge) * importance
        if taken:
            of_taken = gram[np.ix_(taken, taken)] + ridge * np.diag(importance[taken])
            explained = np.linalg.solve(of_taken, gram[taken])
            residual = residual - (gram[taken] * explained).sum(0)
            residual[taken] = -np.inf
        taken.append(int(residual.argmax()))
    by_importance = (-importance).argsort(kind="stable").tolist()
    return taken + [key for key in by_importance if key not in taken]


@pytest.mark.parametrize("ridge", [0.03, 0.1, 1.0])
def test_keys_are_taken_by_their_residual(ridge):
    batch = structured_head(prefix=40, queries=90, dim=8)  # fewer than the sketch has rows
    double = replace(
        batch,
        queries=batch.queries.double(),
        keys=batch.keys.double(),
        values=batch.values.double(),
    )
    expected = greedy_order(weighted_attention(batch), ridge, 25)
    order = dense_attention(double, KeysByResidual(ridge, 25)).order[0].tolist()
    assert order == expected
    assert sorted(order) == list(range(40))
    in_chunks = dense_attention(double, KeysByResidual(ridge, 25), cpu_elements=7 * 40)
    assert in_chunks.order[0].tolist() == expected


@pytest.mark.parametrize("ridge", [0.03, 0.3])
def test_blocks_of_candidates_take_the_same_keys(ridge):
    """With several times as many keys as candidates."""
    batch = structured_head(prefix=300, queries=200, dim=8)
    double = replace(
        batch,
        queries=batch.queries.double(),
        keys=batch.keys.double(),
        values=batch.values.double(),
    )
    order = dense_attention(double, KeysByResidual(ridge, 120)).order[0].tolist()
    assert order[:120] == greedy_order(weighted_attention(batch), ridge, 120)[:120]
    assert sorted(order) == list(range(300))


def test_a_large_ridge_takes_the_keys_by_importance():
    batch = structured_head(prefix=40, queries=90, dim=8)
    plain = dense_attention(batch)
    large = dense_attention(batch, KeysByResidual(1e6, 40))
    assert torch.equal(plain.order, plain.importance.argsort(descending=True, stable=True))
    assert torch.equal(large.order, plain.order)


def test_of_two_equal_keys_one_is_taken_late():
    """By importance they follow each other at once."""
    batch = structured_head(prefix=40, queries=60, dim=8)
    first = int(dense_attention(batch).order[0, 0])
    keys = torch.cat([batch.keys, batch.keys[:, first : first + 1]], dim=1)
    values = torch.cat([batch.values, batch.values[:, :1]], dim=1)
    twins = (first, 40)
    batch = head_batch(batch.queries, keys, values, batch.factors)
    plain = dense_attention(batch).order[0].tolist()
    assert plain.index(twins[1]) == plain.index(twins[0]) + 1
    by_residual = dense_attention(batch, KeysByResidual(0.01, 41)).order[0].tolist()
    assert abs(by_residual.index(twins[1]) - by_residual.index(twins[0])) > 5


def test_products_of_the_sketch_are_right_on_average():
    """The error of the mean over draws of signs falls as its standard error allows."""
    generator = torch.Generator().manual_seed(3)
    attention = torch.rand(2000, 12, generator=generator, dtype=torch.float64) ** 3
    gram = attention.T @ attention
    sums = []
    for draw in range(400):
        signs = 1.0 - 2.0 * torch.randint(2, (2000,), generator=generator.manual_seed(draw))
        rows = torch.zeros(1, SKETCH_ROWS, 12, dtype=torch.float64)
        sketch = Sketch(rows, signs.double())
        sketch.add(attention[:700].unsqueeze(0), slice(0, 700))
        sketch.add(attention[700:].unsqueeze(0), slice(700, 2000))
        sums.append(sketch.rows[0].T @ sketch.rows[0])
    draws = torch.stack(sums)
    standard_error = draws.std(0) / math.sqrt(len(draws))
    error = (draws.mean(0) - gram).abs() / standard_error.clamp_min(1e-12)
    off_diagonal = error[~torch.eye(12, dtype=torch.bool)]
    assert off_diagonal.max() < 4.5
    assert off_diagonal.square().mean().sqrt() < 1.5


def test_the_option_is_in_the_metadata_and_does_not_depend_on_the_group(monkeypatch):
    model = loud_model()
    ids = torch.randint(60, (2, 80), generator=torch.Generator().manual_seed(1))
    traced = trace(model, ids, 64)
    plain = AttentionMatching()(traced, num_slots=9)
    cache = AttentionMatching(key_ridge=0.1)(traced, num_slots=9)
    assert cache.metadata["key_ridge"] == "0.1"
    assert cache.mean_slots == plain.mean_slots
    assert any(
        a.positions.shape != b.positions.shape or not torch.equal(a.positions, b.positions)
        for a, b in zip(cache.layers, plain.layers, strict=True)
    )
    assert (compare(traced, cache).kl < 2 * compare(traced, plain).kl).all()
    monkeypatch.setattr(AttentionMatching, "group_elements", 1)
    alone = AttentionMatching(key_ridge=0.1)(traced, num_slots=9)
    for one, other in zip(cache.layers, alone.layers, strict=True):
        assert torch.equal(one.positions, other.positions)
        torch.testing.assert_close(one.values, other.values, rtol=1e-4, atol=1e-5)
    for wrong in (0.0, -1.0):
        assert "key_ridge must be a number above 0" in refusal(AttentionMatching, key_ridge=wrong)
    for wrong in (math.inf, math.nan):
        assert "must be a finite number" in refusal(AttentionMatching, key_ridge=wrong)
