from dataclasses import replace

import pytest
import torch

from kvcat.compress import fitted_rows
from kvcat.compress.fitted_rows import draw, fitted_attention, most_fitted
from kvcat.compress.head_attention import HeadBatch, PastAttention, dense_attention

NUM_ROWS = 300


@pytest.fixture
def batch():
    """Two heads of 20 slots; 200 of their 300 queries are supervising ones."""
    torch.manual_seed(0)
    queries, keys, values = (
        torch.randn(2, count, 8, dtype=torch.float64) for count in (NUM_ROWS, 20, 20)
    )
    keys[:, 3] *= 3  # a sink
    factors = torch.rand(2, NUM_ROWS, dtype=torch.float64)
    elsewhere = torch.randn(2, NUM_ROWS, dtype=torch.float64)
    return HeadBatch(queries, factors, elsewhere, keys, values, num_supervising=200)


@pytest.fixture
def fit_to_40(monkeypatch):
    """A head of 20 slots is fitted to 40 queries."""
    monkeypatch.setattr(fitted_rows, "LEAST_FITTED", 0)


def test_a_query_is_drawn_in_proportion_to_what_it_contributes():
    # a = 1/4: the first is sure, and the others have the probabilities 1/4, 1/4 and 1/2
    rows, factors = draw(torch.tensor([[4.0, 1.0, 1.0, 2.0]]), 2)
    assert rows.tolist() == [[0, 2]]
    torch.testing.assert_close(factors, torch.tensor([[1.0, 2.0]]))
    # one that exceeds 1 is sure, and the others share what is left
    rows, factors = draw(torch.tensor([[1.0, 98.0, 1.0]]), 2)
    assert rows.tolist() == [[1, 2]] or rows.tolist() == [[0, 1]]
    assert sorted(factors[0].tolist()) == [1.0, pytest.approx(2**0.5)]


def test_equal_contributions_are_drawn_at_equal_steps():
    rows, factors = draw(torch.ones(3, 100), 25)
    assert rows.diff().unique().tolist() == [4]
    torch.testing.assert_close(factors, torch.full((3, 25), 2.0))


@pytest.mark.parametrize("count", [1, 7, 50, 199, 200])
def test_the_drawn_ones_represent_the_sum_of_all(count):
    torch.manual_seed(1)
    contributions = torch.rand(4, 200, dtype=torch.float64) ** 8
    contributions[0] = 0.0
    contributions[0, 5] = 1.0
    contributions[1, 100:] = 0.0
    rows, factors = draw(contributions, count)
    assert rows.shape == (4, count)
    assert (rows.diff() > 0).all()
    represented = (factors.square() * contributions.gather(1, rows)).sum(-1)
    torch.testing.assert_close(represented, contributions.sum(-1))


@pytest.mark.parametrize("log_bias", [False, True])
def test_all_queries_order_the_slots_and_some_are_fitted_to(batch, fit_to_40, log_bias):
    if log_bias:
        batch = replace(batch, log_bias=torch.randn(2, 20, dtype=torch.float64))
    fitted, attention = fitted_attention(batch)
    every = dense_attention(batch)
    assert most_fitted(20) == attention.rows.shape[1] == 40
    assert fitted.num_supervising == (attention.rows[0] < 200).sum() == 24
    torch.testing.assert_close(attention.importance, every.importance)
    assert torch.equal(attention.order, every.order)
    assert torch.equal(attention.peaks, every.peaks)
    boosts = attention.boosts
    torch.testing.assert_close(attention.log_mass, every.log_mass.gather(1, attention.rows))
    weights = boosts * every.weights.gather(1, attention.rows)
    torch.testing.assert_close(attention.weights, weights)
    for head in range(2):
        outputs = boosts[head, :, None] * every.outputs[head, attention.rows[head]]
        torch.testing.assert_close(attention.outputs[head], outputs)
    # the batch of the same rows can be made again
    again = batch.with_queries(attention.rows, attention.boosts)
    assert torch.equal(again.queries, fitted.queries)
    assert torch.equal(again.factors, fitted.factors)


def test_queries_that_attend_to_the_sink_alone_are_seldom_drawn(batch, fit_to_40):
    at_sink = batch.queries.clone()
    at_sink[:, 100:200] = 5 * batch.keys[:, 3:4]
    _, attention = fitted_attention(replace(batch, queries=at_sink))
    rows = attention.rows[0]
    assert attention.importance.argmax(-1).tolist() == [3, 3]
    assert (rows < 100).sum() > 10 * ((rows >= 100) & (rows < 200)).sum()


def test_a_head_with_few_queries_is_fitted_to_all(batch):
    fitted, attention = fitted_attention(batch)
    assert fitted is batch
    assert attention.rows.tolist() == [list(range(NUM_ROWS))] * 2
    assert (attention.boosts == 1).all()


def test_kept_queries_are_never_left_out(batch, fit_to_40):
    log_mass = torch.full((2, 10), 4.0, dtype=torch.float64)
    outputs = torch.randn(2, 10, 8, dtype=torch.float64)
    past = PastAttention(first_row=200, num_new=5, log_mass=log_mass, outputs=outputs)
    fitted, attention = fitted_attention(replace(batch, past=past))
    assert fitted.past is not None
    kept = fitted.past.rows
    assert attention.rows[:, kept].tolist() == [list(range(200, 210))] * 2
    assert (attention.boosts[:, kept] == 1).all()
    whole = dense_attention(replace(batch, past=past))
    torch.testing.assert_close(attention.log_mass[:, kept], whole.log_mass[:, 200:210])
    torch.testing.assert_close(attention.outputs[:, kept], whole.outputs[:, 200:210])


@pytest.mark.parametrize("cpu_elements", [1, 20 * 7, 10**9])
def test_a_peak_is_the_largest_attention_of_a_supervising_query(batch, cpu_elements):
    """In chunks of one, of seven and of all queries."""
    dense = dense_attention(batch, cpu_elements=cpu_elements)
    mass = (batch.queries @ batch.keys.mT).exp()
    attention = mass / (mass.sum(-1, keepdim=True) + batch.log_elsewhere.exp().unsqueeze(-1))
    torch.testing.assert_close(dense.peaks, attention[:, :200].amax(1).square())
    none = dense_attention(replace(batch, num_supervising=0), cpu_elements=cpu_elements)
    assert not none.peaks.any()
