"""Which keys Attention Matching keeps: by attention, and by orthogonal matching pursuit."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import lsq_linear
from structured_heads import positions_of, structured_head

from kvcat.compress import AttentionMatching
from kvcat.compress.fitting import FitOptions, fit_slots
from kvcat.compress.heads import HeadBlock
from kvcat.compress.matching_pursuit import pursue
from kvcat.compress.selection import KeySelection, select_slots, summarise
from kvcat.errors import InputError

BOX = (-3.0, 3.0)


def stacked(*seeds, **sizes):
    heads = [structured_head(seed=seed, **sizes) for seed in seeds]
    return HeadBlock(*(torch.cat([getattr(h, name) for h in heads]) for name in ("queries", "keys", "values")), None)


def chosen(block, num_slots, picks=1, bounds=BOX):
    dense = summarise(block)
    return pursue(block, dense.top, dense.mass, num_slots, bounds=bounds, picks=picks)


def pursue_one_head(queries, keys, num_slots, picks=1, bounds=BOX, positions=None):
    """The twin: one head, whole matrices, SciPy for every refit, a Python loop over picks."""
    scores = queries.double().numpy() @ keys.double().numpy().T
    if positions is not None:
        scores[np.arange(len(keys))[None] > positions.numpy()[:, None]] = -np.inf
    atoms = np.exp(scores - scores.max(1, keepdims=True))
    mass = atoms.sum(1)
    kept, residual = [], mass
    while len(kept) < num_slots:
        correlation = atoms.T @ residual
        correlation[kept] = -np.inf
        kept += np.argsort(-correlation, kind="stable")[: min(picks, num_slots - len(kept))].tolist()
        box = (math.exp(bounds[0]), math.exp(bounds[1]))
        fit = lsq_linear(atoms[:, kept], mass, box, method="bvls", tol=1e-14)
        residual = mass - atoms[:, kept] @ fit.x
    return sorted(kept)


@pytest.mark.parametrize("score", ["rms", "mean", "max"])
def test_keys_are_kept_by_the_statistic_of_their_attention(traced, score):
    cache = AttentionMatching(selection=score, weights="equal", own_weight=0.0)(traced, num_slots=6)
    for index in range(2):
        queries = traced.queries[index].unflatten(1, (2, 2)).flatten(2, 3)
        weights = (queries @ traced.keys[index].mT * traced.scales[index]).softmax(-1)
        statistic = {"rms": weights.square().mean(2).sqrt(), "mean": weights.mean(2), "max": weights.amax(2)}[score]
        kept = statistic.topk(6).indices.sort(-1).values
        assert torch.equal(positions_of(cache.layers[index].keys, traced.keys[index]), kept)
        assert cache.metadata["selection"] == score


def test_the_statistics_differ_where_one_query_looks_at_one_key_alone():
    keys = torch.eye(4)[None]
    queries = torch.cat([torch.eye(4)[[0, 0, 0, 0, 1]], 3 * torch.eye(4)[[2]]])[None]
    dense = {score: summarise(HeadBlock(queries, keys, keys, None), score).importance[0] for score in ("mean", "max")}
    assert dense["mean"].argmax() == 0
    assert dense["max"].argmax() == 2


@pytest.mark.parametrize(("pooling", "kept"), [("avg", [2, 3, 4]), ("max", [2, 3, 4])])
def test_pooling_keeps_the_neighbours_of_the_most_attended_key(pooling, kept):
    keys = torch.zeros(1, 9, 2)
    keys[0, 3, 0], keys[0, 8, 1] = 4.0, 1.0
    block = HeadBlock(torch.ones(1, 5, 2), keys, keys, None)
    pooled = select_slots(block, summarise(block), 3, KeySelection(kernel_size=3, pooling=pooling), BOX)
    assert pooled[0].tolist() == kept
    assert 8 in select_slots(block, summarise(block), 3, KeySelection(), BOX)[0]


def test_average_pooling_does_not_count_positions_beyond_the_ends():
    keys = torch.zeros(1, 6, 2)
    keys[0, 0] = 1.0
    block = HeadBlock(torch.ones(1, 4, 2), keys, keys, None)
    assert select_slots(block, summarise(block), 1, KeySelection(kernel_size=3), BOX).item() == 0


@pytest.mark.parametrize("picks", [1, 3])
def test_pursuit_of_many_heads_chooses_what_the_twin_chooses_head_by_head(picks):
    block = stacked(0, 10, 20, prefix=60, queries=50, dim=8)
    found = chosen(block, 14, picks)
    for head in range(3):
        assert found[head].tolist() == pursue_one_head(block.queries[head], block.keys[head], 14, picks)


def test_pursuit_with_narrow_bounds_chooses_what_the_twin_chooses():
    block = structured_head(prefix=40, queries=60, dim=8, seed=5)
    bounds = (-0.5, 0.5)
    expected = pursue_one_head(block.queries[0], block.keys[0], 12, bounds=bounds)
    assert chosen(block, 12, bounds=bounds)[0].tolist() == expected
    assert chosen(block, 12)[0].tolist() != expected


def test_pursuit_honours_that_a_query_sees_no_later_key():
    block = structured_head(prefix=40, queries=40, dim=8, seed=3)
    positions = torch.arange(40)
    causal = HeadBlock(block.queries, block.keys, block.values, positions[None])
    expected = pursue_one_head(block.queries[0], block.keys[0], 12, positions=positions)
    assert chosen(causal, 12)[0].tolist() == expected


@settings(max_examples=8, deadline=None)
@given(prefix=st.integers(2, 30), share=st.floats(0, 1), picks=st.integers(1, 5), seed=st.integers(0, 99))
def test_pursuit_never_chooses_a_key_twice(prefix, share, picks, seed):
    num_slots = 1 + int(share * (prefix - 1))
    copies = structured_head(prefix=prefix, queries=12, dim=4, seed=seed).keys.repeat(1, 2, 1)
    block = HeadBlock(structured_head(queries=12, dim=4, seed=seed).queries, copies, copies, None)
    kept = chosen(block, num_slots, picks)[0].tolist()
    assert len(set(kept)) == num_slots
    assert kept == sorted(kept)


def test_pursuit_takes_one_of_each_group_of_copies_first():
    keys = 3 * torch.eye(6).repeat_interleave(5, 0)[None]
    block = HeadBlock(3 * torch.eye(6).repeat(4, 1)[None], keys, keys, None)
    assert sorted(position // 5 for position in chosen(block, 6)[0].tolist()) == list(range(6))


def test_pursuit_leaves_less_of_the_mass_unexplained_than_the_most_attended_keys():
    block = stacked(0, 1, 2, 3)
    dense = summarise(block)
    errors = {}
    for score in ("rms", "omp"):
        slots, _, log_bias = fit_slots(block, dense, 16, FitOptions(KeySelection(score), guard=False))
        found = (block.scores(slice(None), slots) + log_bias.unsqueeze(1) - dense.top).exp().sum(-1)
        errors[score] = (found - dense.mass).square().sum(-1)
    assert (errors["omp"] < errors["rms"]).all()


def test_pursuit_in_chunks_of_queries_chooses_the_same(monkeypatch):
    block = stacked(0, 1, prefix=60, queries=50, dim=8)
    whole = chosen(block, 15)
    monkeypatch.setattr("kvcat.compress.heads._BLOCK_ELEMENTS", 60 * 2 * 7)
    assert len(list(block.query_chunks())) == 8
    assert torch.equal(chosen(block, 15), whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"selection": "sum"}, "selection must be one of rms, mean, max, omp, not 'sum'"),
        ({"kernel_size": 2}, "kernel_size must be odd and at least 1, not 2"),
        ({"pooling": "min"}, "pooling must be one of avg, max, not 'min'"),
        ({"selection": "omp", "picks": 0}, "picks must be at least 1, not 0"),
        ({"selection": "omp", "kernel_size": 3}, "kernel_size 3 pools attention, which selection 'omp' does not read"),
        ({"picks": 4}, "picks 4 is an option of selection 'omp', not of 'rms'"),
    ],
)
def test_selections_that_make_no_sense_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        AttentionMatching(**options)
