"""The two least-squares problems of Attention Matching, against SciPy and NumPy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import lsq_linear

from kvcat.compress import fit_log_bias, fit_values
from kvcat.compress.solvers import largest_eigenvalue
from kvcat.errors import InputError


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def problem(kept, dense):
    top = dense.amax(-1, keepdim=True)
    return (kept - top).exp(), (dense - top).exp().sum(-1)


@pytest.mark.parametrize("copies", [1, 2, 5, 20])
def test_a_slot_that_stands_for_k_equal_slots_gets_log_k(copies):
    kept = normal(3, 40, 6)
    dense = kept.repeat_interleave(copies, dim=-1)
    assert torch.allclose(fit_log_bias(kept, dense), torch.full((3, 6), math.log(copies)).double(), atol=1e-6)


def test_a_mass_beyond_the_box_ends_at_its_side():
    kept = normal(1, 30, 4)
    assert torch.allclose(fit_log_bias(kept, kept.repeat(1, 1, 50)), torch.tensor(3.0).double(), atol=1e-6)
    assert torch.allclose(fit_log_bias(kept + 9, kept), torch.tensor(-3.0).double(), atol=1e-6)


@settings(max_examples=25, deadline=None)
@given(queries=st.integers(5, 40), slots=st.integers(1, 12), spread=st.floats(0.1, 3), seed=st.integers(0, 999))
def test_the_converged_log_bias_reaches_the_cost_of_scipy(queries, slots, spread, seed):
    dense = spread * normal(queries, 30, seed=seed)
    kept = dense[:, :slots]
    design, mass = problem(kept, dense)
    expected = lsq_linear(design.numpy(), mass.numpy(), (math.exp(-3), math.exp(3)), method="bvls", tol=1e-14)
    found = fit_log_bias(kept, dense).exp()
    cost = 0.5 * (design @ found - mass).square().sum().item()
    assert cost <= expected.cost + 1e-9 * mass.square().sum().item()
    assert found.min() >= math.exp(-3) - 1e-12
    assert found.max() <= math.exp(3) + 1e-9


@pytest.mark.parametrize(("queries", "slots"), [(6, 40), (12, 60), (20, 30)])
def test_with_more_slots_than_queries_the_log_bias_reaches_the_cost_of_scipy(queries, slots):
    dense = 2 * normal(3, queries, 80, seed=queries)
    found = fit_log_bias(dense[..., :slots], dense).exp()
    for head in range(3):
        design, mass = problem(dense[head, :, :slots], dense[head])
        expected = lsq_linear(design.numpy(), mass.numpy(), (math.exp(-3), math.exp(3)), method="bvls", tol=1e-14)
        cost = 0.5 * (design @ found[head] - mass).square().sum().item()
        assert cost <= expected.cost + 1e-9 * mass.square().sum().item()
    assert found.log().abs().max() <= 3 + 1e-9


@pytest.mark.parametrize("pull", [1e-2, 0.1, 10.0])
@pytest.mark.parametrize(("queries", "slots"), [(40, 8), (6, 30)])
def test_weights_pulled_to_one_equal_scipy_on_the_system_with_the_pull_as_rows(queries, slots, pull):
    """A step that moves no weight by 1e-5 leaves at most the condition number times that."""
    dense, rows = 2 * normal(1, queries, 50, seed=slots), torch.linspace(0.2, 2, queries).double()
    design, mass = problem(dense[0, :, :slots], dense[0])
    design, mass = design * rows.unsqueeze(-1), mass * rows
    shift = math.sqrt(pull) * np.linalg.norm(design.numpy(), 2)
    left = np.concatenate([design.numpy(), shift * np.eye(slots)])
    right = np.concatenate([mass.numpy(), shift * np.ones(slots)])
    expected = lsq_linear(left, right, (math.exp(-3), math.exp(3)), method="bvls", tol=1e-14).x
    for dtype in (torch.float64, torch.float32):
        scores, weights = dense.to(dtype), rows.to(dtype)[None]
        found = fit_log_bias(scores[..., :slots], scores, pull=pull, weights=weights).exp()
        assert np.allclose(found[0], expected, atol=2e-5 * (1 + 1 / pull))


def test_a_column_of_the_log_of_the_whole_mass_stands_for_the_prefix():
    dense = 2 * normal(2, 50, 40, seed=3)
    merged = dense.logsumexp(-1, keepdim=True)
    # relative masses are the masses divided by each query's sum: the same equations with other weights
    sums = (dense - dense.amax(-1, keepdim=True)).exp().sum(-1)
    assert torch.allclose(
        fit_log_bias(dense[..., :10], merged, weights=sums), fit_log_bias(dense[..., :10], dense), atol=1e-6
    )


def test_a_well_posed_fit_equals_scipy_in_every_weight():
    dense = 2 * normal(4, 200, 60)
    found = fit_log_bias(dense[..., :10], dense)
    for head in range(4):
        design, mass = problem(dense[head, :, :10], dense[head])
        expected = lsq_linear(design.numpy(), mass.numpy(), (math.exp(-3), math.exp(3)), method="bvls", tol=1e-14)
        assert np.allclose(found[head].exp(), expected.x, atol=1e-6)


def test_the_converged_log_bias_satisfies_the_optimality_conditions():
    dense = 3 * normal(5, 50, 40, seed=4)
    design, mass = problem(dense[..., :20], dense)
    found = fit_log_bias(dense[..., :20], dense).exp()
    gradient = (design.mT @ ((design @ found.unsqueeze(-1)) - mass.unsqueeze(-1))).squeeze(-1)
    scale = mass.square().sum(-1, keepdim=True)
    low, high = found <= math.exp(-3) * 1.0001, found >= math.exp(3) * 0.9999
    assert (gradient.abs() <= 1e-6 * scale)[~low & ~high].all()
    assert (gradient >= -1e-6 * scale)[low].all()
    assert (gradient <= 1e-6 * scale)[high].all()
    assert (low | high).any()
    assert (~low & ~high).any()


def test_heads_solved_together_equal_heads_solved_alone():
    dense = 2 * normal(2, 3, 50, 40, seed=5)
    together = fit_log_bias(dense[..., :15], dense)
    values = fit_values(dense.softmax(-1)[..., :15], normal(2, 3, 50, 8))
    for a in range(2):
        for b in range(3):
            assert torch.allclose(together[a, b], fit_log_bias(dense[a, b, :, :15], dense[a, b]), atol=1e-8)
            alone = fit_values(dense[a, b].softmax(-1)[:, :15], normal(2, 3, 50, 8)[a, b])
            assert torch.allclose(values[a, b], alone, atol=1e-9)


def test_the_order_of_slots_does_not_matter():
    dense, order = 2 * normal(50, 40, seed=6), torch.randperm(15, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(
        fit_log_bias(dense[:, :15][:, order], dense), fit_log_bias(dense[:, :15], dense)[order], atol=1e-7
    )


def test_a_slot_that_no_query_sees_leaves_the_others_as_they_were():
    dense = 2 * normal(50, 40, seed=7)
    blind = torch.cat([dense[:, :10], torch.full((50, 1), -torch.inf).double()], dim=-1)
    assert torch.allclose(fit_log_bias(blind, dense)[:10], fit_log_bias(dense[:, :10], dense), atol=1e-6)


def test_projected_gradient_steps_stay_in_the_box_and_never_raise_the_cost():
    dense = 2 * normal(60, 80, seed=8)
    design, mass = problem(dense[:, :25], dense)
    costs = []
    for steps in (0, 1, 2, 8, 64):
        found = fit_log_bias(dense[:, :25], dense, num_iters=steps)
        assert found.abs().max() <= 3 + 1e-9
        costs.append((design @ found.exp() - mass).square().sum().item())
    assert costs == sorted(costs, reverse=True)
    converged = (design @ fit_log_bias(dense[:, :25], dense).exp() - mass).square().sum().item()
    assert converged <= costs[-1]


@pytest.mark.parametrize(("queries", "slots"), [(60, 12), (12, 60), (20, 20)])
@pytest.mark.parametrize("ridge", [1e-6, 1e-3])
def test_values_equal_numpy_on_the_system_with_the_ridge_as_rows(queries, slots, ridge):
    weights, targets = normal(2, queries, slots).softmax(-1), normal(2, queries, 5, seed=1)
    found = fit_values(weights, targets, ridge=ridge)
    for head in range(2):
        shift = math.sqrt(ridge) * np.linalg.norm(weights[head].numpy(), 2)
        left = np.concatenate([weights[head].numpy(), shift * np.eye(slots)])
        right = np.concatenate([targets[head].numpy(), np.zeros((slots, 5))])
        assert np.allclose(found[head], np.linalg.lstsq(left, right, rcond=None)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("queries", "slots"), [(60, 12), (12, 60)])
def test_without_ridge_the_values_are_numpys_minimum_norm_solution(queries, slots):
    weights, targets = normal(queries, slots).softmax(-1), normal(queries, 5, seed=1)
    expected = np.linalg.lstsq(weights.numpy(), targets.numpy(), rcond=None)[0]
    assert np.allclose(fit_values(weights, targets, ridge=None), expected, atol=1e-8)


def test_a_ridge_towards_given_values_pulls_there():
    weights, targets, towards = normal(40, 10).softmax(-1), normal(40, 5, seed=1), normal(10, 5, seed=2)
    shift = math.sqrt(1e-2) * np.linalg.norm(weights.numpy(), 2)
    left = np.concatenate([weights.numpy(), shift * np.eye(10)])
    right = np.concatenate([targets.numpy(), shift * towards.numpy()])
    expected = np.linalg.lstsq(left, right, rcond=None)[0]
    assert np.allclose(fit_values(weights, targets, ridge=1e-2, towards=towards), expected, atol=1e-5)
    assert torch.allclose(fit_values(weights, targets, ridge=1e12, towards=towards), towards)


def test_primal_and_dual_agree_at_the_border():
    weights, targets = normal(30, 30).softmax(-1), normal(30, 4, seed=2)
    primal = fit_values(torch.cat([weights, torch.zeros(1, 30).double()]), torch.cat([targets, targets[:1] * 0]))
    dual = fit_values(torch.cat([weights, torch.zeros(30, 1).double()], dim=1), targets)
    assert torch.allclose(primal, dual[:30], rtol=1e-6, atol=1e-7)


def test_the_largest_eigenvalue_is_the_spectral_norm_of_the_gram_matrix():
    weights = normal(3, 50, 20).softmax(-1)
    expected = torch.linalg.matrix_norm(weights, 2).square()
    assert torch.allclose(largest_eigenvalue(weights.mT @ weights), expected, rtol=1e-6)


def test_the_largest_eigenvalue_of_matrices_of_low_rank_is_found():
    weights = normal(4, 3, 30).exp()
    expected = torch.linalg.matrix_norm(weights, 2).square()
    assert torch.allclose(largest_eigenvalue(weights.mT @ weights), expected, rtol=1e-6)
    assert torch.equal(largest_eigenvalue(torch.zeros(2, 5, 5)), torch.zeros(2))
    assert torch.allclose(largest_eigenvalue(torch.full((2, 1, 1), 7.0)), torch.tensor(7.0))


def test_a_large_ridge_in_single_precision_gives_the_values_of_double():
    weights, targets = normal(2, 40, 60).softmax(-1), normal(2, 40, 5, seed=1)
    single = fit_values(weights.float(), targets.float(), ridge=1e-4)
    assert torch.allclose(single.double(), fit_values(weights, targets, ridge=1e-4), rtol=1e-2, atol=1e-2)


def test_single_precision_scores_give_the_answer_of_double():
    dense = 2 * normal(100, 40, seed=9)
    single = fit_log_bias(dense[:, :8].float(), dense.float())
    assert single.dtype == torch.float32
    assert torch.allclose(single.double(), fit_log_bias(dense[:, :8], dense), atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bounds": (3.0, -3.0)}, "bounds must increase"),
        ({"bounds": (-60.0, 3.0)}, "lie within 50 nats"),
        ({"num_iters": -1}, "num_iters must not be negative, not -1"),
        ({"pull": -0.1}, "pull must be at least 0 and finite, not -0.1"),
        ({"pull": 0.1, "num_iters": 2}, "num_iters=2 steps are without a pull"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        fit_log_bias(normal(3, 2), normal(3, 4), **options)


def test_a_ridge_of_zero_is_refused():
    with pytest.raises(InputError, match="ridge must be larger than 0"):
        fit_values(normal(3, 2), normal(3, 4), ridge=0.0)
