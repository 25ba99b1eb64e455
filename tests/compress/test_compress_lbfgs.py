"""L-BFGS on many problems at once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import rosen, rosen_der

from kvcat.compress.lbfgs import minimise


def quadratics(num_problems=3, size=6, seed=0):
    """Function and exact minima of x.Hx / 2 - b.x with different H and b."""
    draw = torch.Generator().manual_seed(seed)
    root = torch.randn(num_problems, size, size, generator=draw, dtype=torch.float64)
    hessian = root @ root.mT + torch.eye(size)
    right = torch.randn(num_problems, size, 1, generator=draw, dtype=torch.float64)

    def function(point):
        column = point.flatten(1).unsqueeze(-1)
        product = hessian @ column
        value = (column * (product / 2 - right)).sum((1, 2))
        return value, (product - right).view_as(point)

    return function, torch.linalg.solve(hessian, right)


def rosenbrock(point):
    rows = point.flatten(1).numpy()
    values = torch.tensor([rosen(row) for row in rows])
    gradients = torch.tensor([rosen_der(row).tolist() for row in rows])
    return values, gradients.view_as(point)


def test_quadratic_functions_reach_their_exact_minima():
    function, minima = quadratics()
    reached = minimise(function, torch.zeros(3, 2, 3, dtype=torch.float64), 60)
    torch.testing.assert_close(reached.flatten(1), minima.squeeze(-1), atol=1e-6, rtol=0)


def test_rosenbrocks_valley_is_followed_to_its_end():
    start = torch.tensor([[[-1.2, 1.0]], [[0.5, 2.0]]], dtype=torch.float64)
    reached = minimise(rosenbrock, start, 150, first_step=1e-3)
    torch.testing.assert_close(reached, torch.ones_like(start), atol=1e-4, rtol=0)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(-3, 3), min_size=4, max_size=4), st.integers(0, 12))
def test_no_number_of_steps_raises_a_value(start, num_steps):
    point = torch.tensor(start, dtype=torch.float64).view(2, 1, 2)
    reached = minimise(rosenbrock, point, num_steps)
    assert (rosenbrock(reached)[0] <= rosenbrock(point)[0]).all()


def test_a_problem_has_the_same_result_alone_as_among_others():
    function, _ = quadratics()
    start = torch.ones(3, 2, 3, dtype=torch.float64)
    together = minimise(function, start, 7)
    for row in range(3):

        def alone(point, row=row):
            rows = point.expand(3, -1, -1)
            value, gradient = function(rows)
            return value[row : row + 1], gradient[row : row + 1]

        torch.testing.assert_close(minimise(alone, start[row : row + 1], 7)[0], together[row])


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_step_to_where_the_function_is_not_finite_is_not_taken(bad):
    def barrier(point):
        inside = (point < 1).all(-1).all(-1)
        value = -point.sum((1, 2))
        return value.where(inside, torch.tensor(bad)), torch.full_like(point, -1.0)

    reached = minimise(barrier, torch.zeros(1, 1, 1), 30, first_step=5.0)
    assert 0.3 < reached.item() < 1


def test_no_step_leaves_the_start():
    function, _ = quadratics()
    start = torch.ones(3, 2, 3, dtype=torch.float64)
    assert torch.equal(minimise(function, start, 0), start)
