"""The two least-squares problems of Attention Matching, against SciPy and NumPy."""

import math

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import lsq_linear

from kvcat.compress import fit_log_bias, fit_values
from kvcat.compress.solvers import largest_eigenvalue, least_squares_by_qr, products_of_columns
from naive import normal

LOW = math.exp(-3)
HIGH = math.exp(3)


def problem(kept, dense):
    top = dense.amax(-1, keepdim=True)
    return (kept - top).exp(), (dense - top).exp().sum(-1)


def bounded(design, mass):
    return lsq_linear(np.asarray(design), np.asarray(mass), (LOW, HIGH), method="bvls", tol=1e-14)


@pytest.mark.parametrize("copies", [1, 2, 20])
def test_a_slot_that_represents_k_equal_slots_gets_log_k(copies):
    kept = normal(3, 40, 6)
    dense = kept.repeat_interleave(copies, dim=-1)
    assert torch.allclose(
        fit_log_bias(kept, dense), torch.full((3, 6), math.log(copies)).double(), atol=1e-6
    )


@settings(max_examples=25, deadline=None)
@given(
    queries=st.integers(5, 40),
    slots=st.integers(1, 30),
    spread=st.floats(0.1, 3),
    seed=st.integers(0, 999),
)
def test_the_converged_log_bias_reaches_the_cost_of_scipy(queries, slots, spread, seed):
    dense = spread * normal(queries, 30, seed=seed).float().double()
    design, mass = problem(dense[:, :slots], dense)
    for dtype, rounding in ((torch.float64, 1e-9), (torch.float32, 1e-6)):
        weights = fit_log_bias(dense[:, :slots].to(dtype), dense.to(dtype)).exp().double()
        cost = 0.5 * (design @ weights - mass).square().sum().item()
        assert cost <= bounded(design, mass).cost + 1e-9 * mass.square().sum().item()
        assert weights.min() >= LOW * (1 - rounding)
        assert weights.max() <= HIGH * (1 + rounding)


def squared_size(design, relative_to):
    """What a pull is relative to, by its definition."""
    if relative_to == "spectral":
        return np.linalg.norm(design, 2) ** 2
    squares = sorted((design**2).sum(0))
    return np.mean(squares[:-1])


@pytest.mark.parametrize("relative_to", ["spectral", "columns"])
@pytest.mark.parametrize("pull", [1e-2, 0.1, 10.0])
@pytest.mark.parametrize(("queries", "slots"), [(40, 8), (6, 30)])
def test_weights_pulled_to_one_equal_scipy_on_the_system_with_the_pull_as_rows(
    queries, slots, pull, relative_to
):
    """A step that moves no weight by 1e-5 leaves at most the condition number times that."""
    dense = 2 * normal(1, queries, 50, seed=slots)
    rows = torch.linspace(0.2, 2, queries).double()
    design, mass = problem(dense[0, :, :slots], dense[0])
    design = design * rows.unsqueeze(-1)
    mass = mass * rows
    shift = math.sqrt(pull * squared_size(design.numpy(), relative_to))
    stacked = np.concatenate([design.numpy(), shift * np.eye(slots)])
    expected = bounded(stacked, np.concatenate([mass.numpy(), shift * np.ones(slots)])).x
    condition = 1 + squared_size(design.numpy(), "spectral") / shift**2
    for dtype in (torch.float64, torch.float32):
        scores = dense.to(dtype)
        weights = rows.to(dtype)[None]
        fitted = fit_log_bias(
            scores[..., :slots], scores, pull=pull, relative_to=relative_to, weights=weights
        ).exp()
        assert fitted.dtype == dtype
        assert np.allclose(fitted[0], expected, atol=2e-5 * condition)


def test_an_attention_sink_does_not_change_the_pull_of_the_other_slots():
    """A column that is orthogonal to the others, a hundred times as long or a thousand times."""
    others = normal(1, 30, 6, seed=3).abs()
    fitted = []
    for length in (1e2, 1e3):
        design = torch.zeros(1, 31, 7).double()
        design[:, :30, :6] = others
        design[:, 30, 6] = length
        scores = design.log()
        mass = (design.sum(-1, keepdim=True) + 1.0).log()
        bias = fit_log_bias(
            scores, mass, pull=0.1, relative_to="columns", weights=mass[..., 0].exp()
        )
        fitted.append(bias[0, :6])
    assert fitted[0].abs().min() > 0.01
    assert torch.allclose(fitted[0], fitted[1], atol=1e-4)


def test_heads_are_solved_as_alone_whatever_the_order_of_slots_and_slots_that_none_sees():
    dense = 2 * normal(2, 3, 50, 40, seed=5)
    targets = normal(2, 3, 50, 8)
    order = torch.randperm(15, generator=torch.Generator().manual_seed(0))
    together = fit_log_bias(dense[..., :15], dense)
    values = fit_values(dense.softmax(-1)[..., :15], targets)
    assert torch.allclose(
        fit_log_bias(dense[..., :15][..., order], dense), together[..., order], atol=1e-7
    )
    for a in range(2):
        for b in range(3):
            head_scores = dense[a, b]
            assert torch.allclose(
                together[a, b], fit_log_bias(head_scores[:, :15], head_scores), atol=1e-8
            )
            assert torch.allclose(
                values[a, b], fit_values(head_scores.softmax(-1)[:, :15], targets[a, b]), atol=1e-9
            )
    blind = torch.cat([head_scores[:, :10], torch.full((50, 1), -torch.inf).double()], dim=-1)
    assert torch.allclose(
        fit_log_bias(blind, head_scores)[:10],
        fit_log_bias(head_scores[:, :10], head_scores),
        atol=1e-6,
    )


def test_projected_gradient_steps_stay_in_the_box_and_never_raise_the_cost():
    dense = 2 * normal(60, 80, seed=8)
    design, mass = problem(dense[:, :25], dense)
    costs = []
    for steps in (0, 1, 2, 8, 64, None):
        log_bias = fit_log_bias(dense[:, :25], dense, num_iters=steps)
        assert log_bias.abs().max() <= 3 + 1e-9
        costs.append((design @ log_bias.exp() - mass).square().sum().item())
    assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize(("queries", "slots"), [(60, 12), (12, 60), (20, 20)])
@pytest.mark.parametrize("relative_to", ["spectral", "columns"])
@pytest.mark.parametrize("ridge", [1e-6, 1e-3])
def test_values_equal_numpy_on_the_system_with_the_ridge_as_rows(
    queries, slots, ridge, relative_to
):
    weights = normal(2, queries, slots).softmax(-1)
    targets = normal(2, queries, 5, seed=1)
    towards = normal(2, slots, 5, seed=2)
    plain = fit_values(weights, targets, ridge=ridge, relative_to=relative_to)
    pulled = fit_values(weights, targets, ridge=ridge, towards=towards, relative_to=relative_to)
    for head in range(2):
        shift = ridge * squared_size(weights[head].numpy(), relative_to)
        if relative_to == "columns":
            shift = max(shift, 1e-6 * squared_size(weights[head].numpy(), "spectral"))
        shift = math.sqrt(shift)
        stacked = np.concatenate([weights[head].numpy(), shift * np.eye(slots)])
        for values, there in ((plain, np.zeros((slots, 5))), (pulled, towards[head].numpy())):
            right = np.concatenate([targets[head].numpy(), shift * there])
            assert np.allclose(
                values[head], np.linalg.lstsq(stacked, right, rcond=None)[0], rtol=1e-5, atol=1e-6
            )
    assert torch.allclose(fit_values(weights, targets, ridge=1e12, towards=towards), towards)
    single = fit_values(weights.float(), targets.float(), ridge=1e-4)
    assert torch.allclose(
        single.double(), fit_values(weights, targets, ridge=1e-4), rtol=1e-2, atol=1e-2
    )


@pytest.mark.parametrize(("queries", "slots"), [(60, 12), (12, 60)])
def test_without_ridge_the_values_are_numpys_minimum_norm_solution(queries, slots):
    weights = normal(queries, slots).softmax(-1)
    targets = normal(queries, 5, seed=1)
    expected = np.linalg.lstsq(weights.numpy(), targets.numpy(), rcond=None)[0]
    assert np.allclose(fit_values(weights, targets, ridge=None), expected, atol=1e-8)


@pytest.mark.parametrize(("queries", "slots"), [(60, 20), (20, 60), (20, 20)])
@pytest.mark.parametrize(("dim", "scale"), [(32, 1.0), (2, 0.3)])
def test_least_squares_for_gpus_give_the_solutions_of_lapack(queries, slots, dim, scale):
    """Heads of full rank with conditions of 1e3 to 1e8, with equal slots and queries, with slots
    that no query sees and queries that see none, and with nothing."""
    scores = scale * normal(queries, dim) @ normal(dim, 200, seed=1)
    design, mass = problem(scores[:, :slots], scores)
    equal = design.clone()
    equal[:, 5] = equal[:, 4]
    equal[7] = equal[6]
    unseen = design.clone()
    unseen[:, 3] = 0
    unseen[2] = 0
    heads = torch.stack([design, equal, unseen, torch.zeros_like(design)]).float().double()
    targets = torch.stack([mass, mass.sqrt()], dim=-1).expand(4, -1, -1)
    actual = least_squares_by_qr(heads, targets)
    rounding = np.finfo(float).eps * max(queries, slots)
    for head, ours, target in zip(heads, actual, targets, strict=True):
        expected, *_ = scipy.linalg.lstsq(head, target, cond=rounding, lapack_driver="gelsd")
        difference = ours.numpy() - expected
        assert np.linalg.norm(difference) <= 1e-5 * np.linalg.norm(expected)
    assert torch.equal(least_squares_by_qr(heads[1], targets[1]), actual[1])


@pytest.mark.parametrize("columns", [1, 511, 512, 515, 700])
def test_products_of_columns_are_numpys(columns):
    design = torch.randn(2, 9, columns, dtype=torch.float64)
    expected = np.einsum("hqi,hqj->hij", design.numpy(), design.numpy())
    gram = products_of_columns(design)
    assert np.allclose(gram.numpy(), expected, atol=1e-12)


def test_the_largest_eigenvalue_is_the_spectral_norm_of_the_gram_matrix():
    for weights in (
        normal(3, 50, 20).softmax(-1),
        normal(4, 3, 30).exp(),
    ):  # the second of low rank
        expected = torch.linalg.matrix_norm(weights, 2).square()
        assert torch.allclose(largest_eigenvalue(weights.mT @ weights), expected, rtol=1e-6)
    assert torch.equal(largest_eigenvalue(torch.zeros(2, 5, 5)), torch.zeros(2))
