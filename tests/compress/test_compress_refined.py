"""Refinement of Attention Matching: keys, log-bias and values moved together."""

from dataclasses import replace

import pytest
import torch
from structured_heads import head_batch, structured_head, tensors

from kvcat.cache import HeadSlots
from kvcat.compress import compare, make_compressor, split_supervision, supervised_kl, trace
from kvcat.compress.fitting import match_attention
from kvcat.compress.head_attention import dense_attention
from kvcat.compress.refinement import Objective, refine_slots


def in_double(batch):
    states = {
        name: getattr(batch, name).double()
        for name in ("queries", "factors", "log_elsewhere", "keys", "values")
    }
    return replace(batch, **states)


def with_later_mass(batch, nats=3.0, seed=5):
    """Queries that give part of their attention to later tokens, and do not count alike."""
    draw = torch.Generator().manual_seed(seed)
    later = nats + torch.randn(batch.factors.shape, generator=draw)
    factors = 0.5 + torch.rand(batch.factors.shape, generator=draw)
    return replace(batch, log_elsewhere=later.to(batch.keys), factors=factors.to(batch.keys))


def matched(batch, num_slots):
    """Dense attention and the slots of Attention Matching."""
    dense = dense_attention(batch)
    fit = match_attention(batch, dense, num_slots)
    return dense, fit


def output_error(batch, slots):
    """Squared error of the attention outputs by the formula, each query times its weight."""
    dense = torch.softmax(batch.queries @ batch.keys.mT, -1) @ batch.values
    mass = (batch.queries @ batch.keys.mT).logsumexp(-1)
    weights = batch.factors * torch.sigmoid(mass - batch.log_elsewhere)
    compact = torch.softmax(batch.queries @ slots.keys.mT + slots.log_bias.unsqueeze(1), -1)
    return ((compact @ slots.values - dense) * weights.unsqueeze(-1)).square().sum((1, 2))


@pytest.fixture
def heads():
    return with_later_mass(in_double(structured_head(prefix=60, queries=70, dim=6)))


def objective_of(heads, num_slots=7, **options):
    dense, start = matched(heads, num_slots)
    return Objective.of(heads, dense, start, **{"pull": 0.02, "ridge": 0.05, **options})


def plain_objective(heads, start, point_slots, divisor_pull):
    """The objective's formula with values by torch's least squares, from keys and log-bias."""
    scores = heads.queries @ heads.keys.mT
    dense = torch.softmax(scores, -1) @ heads.values
    share = torch.sigmoid(scores.logsumexp(-1) - heads.log_elsewhere)
    weights = heads.factors * share
    norm = (dense * weights.unsqueeze(-1)).square().sum((1, 2))

    def attention_of(slots):
        return torch.softmax(heads.queries @ slots.keys.mT + slots.log_bias.unsqueeze(1), -1)

    squares = (attention_of(start) * weights.unsqueeze(-1)).square().sum(1)
    mu = 0.05 * (squares.sum(1) - squares.amax(1)) / (squares.shape[1] - 1)
    weighted = attention_of(point_slots) * weights.unsqueeze(-1)
    ridge_rows = mu.sqrt().view(-1, 1, 1) * torch.eye(squares.shape[1], dtype=torch.float64)
    design = torch.cat([weighted, ridge_rows], 1)
    target = torch.cat([dense * weights.unsqueeze(-1), ridge_rows @ start.values], 1)
    values = torch.linalg.lstsq(design, target).solution
    value = (design @ values - target).square().sum((1, 2))
    slot_scores = heads.queries @ point_slots.keys.mT + point_slots.log_bias.unsqueeze(1)
    new_share = torch.sigmoid(slot_scores.logsumexp(-1) - heads.log_elsewhere)
    mean_square = norm / weights.square().sum(1)
    share_errors = heads.factors * (new_share - share)
    value = value + mean_square * share_errors.square().sum(1)
    return value / norm + divisor_pull, values


@pytest.mark.parametrize("log_bias", [True, False])
def test_value_and_values_follow_the_formula_and_the_gradient_is_that_of_autograd(heads, log_bias):
    objective = objective_of(heads, log_bias=log_bias)
    draw = torch.Generator().manual_seed(1)
    point = 0.3 * torch.randn(objective.origin().shape, generator=draw, dtype=torch.float64)
    point.requires_grad_(True)
    slots = objective.slots_at(point)
    pull = 0.02 * point.square().sum((1, 2))
    value, values = plain_objective(heads, objective.start, slots, pull)
    (gradient,) = torch.autograd.grad(value.sum(), point)
    with torch.no_grad():
        evaluation = objective(point)
    # up to the millionth of a ridge that single precision needs
    torch.testing.assert_close(evaluation.value, value.detach(), rtol=1e-4, atol=0)
    torch.testing.assert_close(evaluation.gradient, gradient, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(slots.values, values, rtol=1e-3, atol=1e-3)
    assert log_bias or torch.equal(slots.log_bias, objective.start.log_bias)


@pytest.mark.parametrize("log_bias", [True, False])
def test_the_slots_of_a_point_have_the_scores_of_the_point(heads, log_bias):
    objective = objective_of(heads, log_bias=log_bias)
    point = torch.randn(objective.origin().shape, dtype=torch.float64)
    slots = objective.slots_at(point)
    scores = heads.queries @ slots.keys.mT + slots.log_bias.unsqueeze(1)
    moved = objective.features @ (point * objective.scale).mT
    torch.testing.assert_close(scores, objective.start_scores + moved)


def test_slots_that_are_the_whole_prefix_have_no_error_and_stay(heads):
    dense = dense_attention(heads)
    start = HeadSlots(heads.keys, heads.values, torch.zeros_like(heads.keys[..., 0]))
    objective = Objective.of(heads, dense, start, pull=0.1, ridge=0.05)
    assert objective(objective.origin()).value.item() < 1e-20
    torch.testing.assert_close(vars(refine_slots(objective, 5)), vars(start), atol=1e-8, rtol=0)


def test_one_slot_moves_to_the_mean_of_two_keys_that_no_query_tells_apart():
    """The keys differ only across the queries: the dense attention is that of their mean with
    log-bias log 2."""
    draw = torch.Generator().manual_seed(2)
    queries = torch.randn(1, 40, 4, generator=draw, dtype=torch.float64)
    queries[..., 3] = 0
    across = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    key = torch.randn(4, generator=draw, dtype=torch.float64)
    other = torch.zeros(4, dtype=torch.float64)
    keys = torch.stack([key + across, key - across, other]).unsqueeze(0)
    values = torch.randn(1, 3, 4, generator=draw, dtype=torch.float64)
    heads = with_later_mass(head_batch(queries, keys, values), nats=1.0)
    # it starts elsewhere: without log-bias, at a wrong key
    start = HeadSlots(
        torch.stack([key + 0.3, other]).unsqueeze(0),
        torch.stack([values[0, 0], values[0, 2]]).unsqueeze(0),
        torch.zeros(1, 2, dtype=torch.float64),
    )
    objective = Objective.of(heads, dense_attention(heads), start, pull=1e-9, ridge=1e-6)
    slots = refine_slots(objective, 60)
    scores = queries @ slots.keys.mT + slots.log_bias.unsqueeze(1)
    exact = queries @ torch.stack([key, other]).T
    exact = exact + torch.tensor([2.0, 1.0], dtype=torch.float64).log()
    torch.testing.assert_close(scores, exact, atol=5e-3, rtol=0)
    mean_value = torch.stack([values[0, :2].mean(0), values[0, 2]])
    torch.testing.assert_close(slots.values[0], mean_value, atol=5e-3, rtol=0)


def test_steps_lower_the_output_error_of_attention_matching_by_half():
    heads = with_later_mass(structured_head())
    dense, start = matched(heads, 19)
    objective = Objective.of(heads, dense, start, pull=0.02, ridge=0.01)
    refined = refine_slots(objective, 12)
    assert output_error(heads, refined).item() < 0.5 * output_error(heads, start).item()


@pytest.mark.parametrize("options", [{}, {"preset": "known"}, {"log_bias": False}])
def test_a_refined_cache_is_closer_where_it_is_fitted(traced, options):
    plain = make_compressor("attention-matching", **options)(traced, num_slots=8)
    refined = make_compressor("refined", **options)(traced, num_slots=8)
    assert supervised_kl(traced, refined).mean() < 0.9 * supervised_kl(traced, plain).mean()
    counts = [layer.counts.tolist() for layer in plain.layers]
    assert [layer.counts.tolist() for layer in refined.layers] == counts
    assert refined.has_log_bias == plain.has_log_bias


def test_no_steps_keep_the_keys_and_improve_the_values_alone(traced):
    plain = make_compressor("attention-matching")(traced, num_slots=6)
    refined = make_compressor("refined", num_steps=0)(traced, num_slots=6)
    torch.testing.assert_close(
        tensors(refined, "keys", "log_bias"), tensors(plain, "keys", "log_bias")
    )


def test_a_prefix_alone_is_refined_on_its_queries_behind_it(model, windows):
    alone = trace(model, windows[:, :48], supervision="self")
    whole = trace(model, windows, 48)
    refined = make_compressor("refined")(alone, num_slots=12)
    assert compare(whole, refined).kl.mean() < 1.1 * (
        compare(whole, make_compressor("attention-matching")(alone, num_slots=12)).kl.mean()
    )


def test_a_conversation_behind_a_compact_cache_is_refined_with_it(model, windows):
    first = trace(model, windows[:, :40], 32)
    past = make_compressor("refined")(first, num_slots=8)
    longer = trace(model, windows, 48, past=past)
    shorter = make_compressor("refined")(longer, num_slots=12)
    assert (shorter.num_slots, shorter.num_tokens) == (12, 48)
    plain = make_compressor("attention-matching")(longer, num_slots=12)
    fitted, _ = split_supervision(longer, 0.5)
    assert supervised_kl(fitted, shorter).mean() < supervised_kl(fitted, plain).mean()
