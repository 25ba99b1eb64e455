"""Unequal budgets: error curves from one pass, and slots shared out by them."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structured_heads import head_batch, structured_head

from kvcat.compress.budgets import (
    add_peaks,
    allocate,
    error_curves,
    num_peaks,
    share_out_segments,
    slot_sizes,
)
from kvcat.compress.head_attention import NUM_SAMPLED, dense_attention


def curves(batch, sizes, ridge):
    """The error curve of each head of a batch."""
    return error_curves(dense_attention(batch).sampled(batch, max(sizes)), sizes, ridge)


def ridge_error(batch, num_slots, ridge):
    """The error of the ridge regression on the dense weights of the first slots, from all queries,
    in float64."""
    weights = (batch.queries[0] @ batch.keys[0].mT).softmax(-1).double()
    weights = batch.factors[0].double().unsqueeze(1) * weights
    outputs = weights @ batch.values[0].double()
    order = weights.square().sum(0).argsort(descending=True)
    shift = ridge * weights.square().sum()
    kept = weights[:, order[:num_slots]]
    kept_values = batch.values[0, order[:num_slots]].double()
    gram = kept.mT @ kept + shift * torch.eye(num_slots)
    values = kept_values + torch.linalg.solve(gram, kept.mT @ (outputs - kept @ kept_values))
    moved = (values - kept_values).square().sum()
    return float((kept @ values - outputs).square().sum() + shift * moved)


def test_a_curve_is_the_ridge_regression_on_the_dense_weights_of_the_first_slots():
    batch = structured_head(prefix=40, queries=60, dim=8)
    (curve,) = curves(batch, [7, 1, 30, 99], ridge=1e-2)
    assert list(curve) == [1, 7, 30, 40]
    for count, error in curve.items():
        assert error == pytest.approx(ridge_error(batch, count, 1e-2), rel=1e-3, abs=1e-9)


def test_a_curve_draws_supervising_queries_apart_from_the_many_of_the_prefix():
    """All own queries are equal, so that any sample of them is exact, and all supervising ones are
    drawn: the curve must be that of all queries. One draw from all would have about nine
    supervising ones."""
    supervising = structured_head(prefix=40, queries=100, dim=8)
    repeated = supervising.queries[:, :1].expand(-1, 10 * NUM_SAMPLED, -1)
    queries = torch.cat([supervising.queries, repeated], dim=1)
    weights = torch.ones(1, queries.shape[1])
    weights[:, :100] = 3.0
    batch = head_batch(queries, supervising.keys, supervising.values, weights)
    batch = replace(batch, num_supervising=100)
    ridge = 1e-2
    (curve,) = curves(batch, [1, 7, 30], ridge)
    for count, error in curve.items():
        assert error == pytest.approx(ridge_error(batch, count, ridge), rel=1e-3, abs=1e-9)


@pytest.mark.parametrize("period", [2, 3, 7, 9])
def test_the_queries_of_a_curve_are_a_fair_sample_of_rows_in_which_query_heads_take_turns(period):
    """In one head of ``period`` the queries attend to random keys, in the others to one key; the
    sample has both kinds."""
    draw = torch.Generator().manual_seed(0)
    rows = 9 * NUM_SAMPLED
    queries = 8 * torch.eye(8)[torch.randint(8, (1, rows), generator=draw)]
    queries[:, torch.arange(rows) % period != 1] = 8 * torch.eye(8)[0]
    states = torch.eye(8)[None], torch.randn(1, 8, 4, generator=draw)
    batches = [head_batch(queries, *states), head_batch(queries[:, 1::period], *states)]
    (sampled,), (alone,) = (curves(batch, [1], 1e-2) for batch in batches)
    assert 1 / 3 < sampled[1] / alone[1] < 3


@pytest.mark.parametrize("ridge", [0.0, 1e-12, 1e-8])
def test_a_curve_needs_no_ridge_that_single_precision_can_hold(ridge):
    """Queries that are nearly equal, and a few queries that alone count, all in the sample."""
    alike = structured_head(prefix=60, queries=1, dim=8)
    queries = alike.queries + 1e-3 * torch.randn(
        1, 4096, 8, generator=torch.Generator().manual_seed(1)
    )
    factors = torch.full((1, 4096), 1e-4)
    drawn = torch.randperm(4096, generator=torch.Generator().manual_seed(0))[:5]
    for weights in (torch.ones_like(factors), factors.index_fill(1, drawn, 1.0)):
        batch = head_batch(queries, alike.keys, alike.values, weights)
        (curve,) = curves(batch, [1, 4, 30, 60], ridge)
        errors = torch.tensor(list(curve.values()))
        assert ((errors >= 0) & (errors < 2 * 128 * 60)).all()
        assert errors[-1] < 1e-2 * errors[0]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 999), heads=st.integers(1, 4))
def test_what_is_shared_out_is_close_to_the_best_choice_and_never_worse_than_equal_sizes(
    seed, heads
):
    draw = torch.Generator().manual_seed(seed)
    sizes = [1, 2, 4, 8]
    costs = torch.tensor(sizes).unsqueeze(1).expand(-1, heads)
    errors = torch.rand(4, heads, generator=draw).cumsum(0).flip(0)
    for total in range(heads, 8 * heads + 1):
        chosen = allocate(costs, errors, total).tolist()
        spent = sum(sizes[i] for i in chosen)
        assert spent <= total
        error = sum(errors[i, h].item() for h, i in enumerate(chosen))
        fewer = max(
            heads, total - 7
        )  # the greedy choice is at least that of the largest step fewer
        choices = (
            c
            for c in itertools.product(range(4), repeat=heads)
            if sum(sizes[i] for i in c) <= fewer
        )
        assert (
            error
            <= min(sum(errors[i, h].item() for h, i in enumerate(choice)) for choice in choices)
            + 1e-6
        )
        equal = max(i for i in range(4) if sizes[i] * heads <= total)
        assert error <= errors[equal].sum().item() + 1e-6


def curve(errors: torch.Tensor, num_slots: int) -> dict[int, float]:
    """Errors of 1, 2, ... slots, at the sizes that heads may have if the average is this number."""
    sizes = {min(size, len(errors)) for size in slot_sizes(num_slots, 40)}
    return {size: errors[size - 1].item() for size in sorted(sizes)}


def share_out(curves):
    """The slots of the heads of one segment, 10 a head on average of 40 tokens."""
    (slots,) = share_out_segments([curves], 10, slot_sizes(10, 40), by_head=False)
    return slots


def test_a_head_with_a_steep_curve_gets_more_and_a_head_cannot_get_more_than_it_has():
    flat = curve(torch.full((40,), 1.0), 10)
    steep = 10 / torch.arange(1, 41)
    curves = {
        (0, 0, 0): flat,
        (0, 0, 1): curve(steep, 10),
        (1, 0, 0): flat,
        (1, 0, 1): curve(steep, 10),
    }
    plan = share_out(curves)
    assert plan[0, 0, 1] > 10 > plan[0, 0, 0]
    assert sum(plan.values()) == 40
    short = share_out({**curves, (0, 0, 1): curve(steep[:12], 10)})
    assert short[0, 0, 1] <= 12


def test_slots_that_no_step_to_a_larger_size_uses_go_to_the_head_with_the_largest_error():
    # two heads need 5 slots each, the third gains nothing: of 30 slots 19 would be left
    curves = {(0, 0, head): curve(torch.tensor([9.0] * 4 + [0.0] * 36), 10) for head in range(2)}
    curves[0, 0, 2] = curve(torch.full((40,), 7.0), 10)
    assert share_out(curves) == {(0, 0, 0): 5, (0, 0, 1): 5, (0, 0, 2): 20}


def test_the_slots_with_the_largest_peaks_of_all_heads_and_segments_are_kept_too():
    """Two segments, two examples; heads of three and of four slots. By hand."""

    def attention(order, peaks):
        batch = structured_head(prefix=len(peaks), queries=2, dim=4)
        (dense,) = dense_attention(batch).split()
        return dense._replace(order=torch.tensor(order), peaks=torch.tensor(peaks))

    attentions = [
        {
            (0, 0, 0): attention([2, 0, 1], [0.5, 0.1, 0.9]),
            (0, 0, 1): attention([0, 1, 2, 3], [0.0, 0.0, 0.3, 0.8]),
            (0, 1, 0): attention([0, 1, 2], [0.0, 0.2, 0.0]),
        },
        {(0, 0, 0): attention([1, 0, 2], [0.6, 0.7, 0.4])},
    ]
    slots = [{(0, 0, 0): 1, (0, 0, 1): 2, (0, 1, 0): 1}, {(0, 0, 0): 1}]
    added, counts = add_peaks(attentions, slots, 1)
    # the first example has two heads: its two largest peaks that are not kept yet are .8 and .6
    assert counts == [{(0, 0, 0): 1, (0, 0, 1): 3, (0, 1, 0): 2}, {(0, 0, 0): 2}]
    orders = [{head: dense.order.tolist() for head, dense in of.items()} for of in added]
    assert orders[0] == {(0, 0, 0): [2, 0, 1], (0, 0, 1): [0, 1, 3, 2], (0, 1, 0): [0, 1, 2]}
    assert orders[1] == {(0, 0, 0): [1, 0, 2]}
    assert attentions[0][0, 0, 1].order.tolist() == [0, 1, 2, 3]
    # no more than there are
    _, counts = add_peaks(attentions, slots, 9)
    assert counts == [{(0, 0, 0): 3, (0, 0, 1): 4, (0, 1, 0): 3}, {(0, 0, 0): 3}]


@pytest.mark.parametrize(
    ("num_slots", "prefix_len", "count"),
    [(6, 600, 1), (30, 600, 6), (60, 600, 3), (120, 600, 1), (240, 600, 0), (4, 600, 0)],
)
def test_a_fifth_of_few_slots_is_kept_for_their_peaks_and_less_of_more(
    num_slots, prefix_len, count
):
    assert num_peaks(num_slots, prefix_len) == count
