"""Minimisation of many independent functions at once by L-BFGS."""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from kvcat.types import Float, Tensor

Values = Float[Tensor, " problems"]
Points = Float[Tensor, "problems rows columns"]
Function = Callable[[Points], tuple[Values, Points]]
"""Values and gradients of all problems at a point of each."""

_MEMORY = 8
_ENOUGH_DECREASE = 1e-4  # of the decrease that the slope promises (Armijo)
_BACKTRACK = 0.3
_LEAST_CURVATURE = 1e-10  # of a pair of steps, relative to the squared change of the gradient


class _Pair(NamedTuple):
    """A step and the change of the gradient along it; zeros where a problem took no step."""

    step: Points
    change: Points
    inverse_product: Values  # 1 / (step . change); 0: the pair is not used


def minimise(
    function: Function, start: Points, num_steps: int, *, first_step: float = 0.5
) -> Points:
    """A point of each problem whose value is at most that of its start.

    Every problem has its line search: it takes a step if that lowers its value enough, and
    otherwise tries a shorter one while the others go on. A value that is not finite counts as too
    large.

    Args:
        function: called ``num_steps`` + 1 times with a point of every problem.
        start: where each problem begins.
        num_steps: steps that are tried, at least 0.
        first_step: length of the first step, relative to the gradient.

    References: Nocedal and Wright 2006, "Numerical Optimization", algorithm 7.4.
    """
    point = start
    value, gradient = function(point)
    gradient = gradient.nan_to_num(0.0, 0.0, 0.0)
    pairs: deque[_Pair] = deque(maxlen=_MEMORY)
    scale = torch.full_like(value, first_step)
    length = torch.ones_like(value)
    direction = -_of_each(scale) * gradient
    for _ in range(num_steps):
        slope = _dot(gradient, direction)
        tried = point + _of_each(length) * direction
        tried_value, tried_gradient = function(tried)
        is_lower = tried_value <= value + _ENOUGH_DECREASE * length * slope
        takes = _of_each(is_lower)
        step = torch.where(takes, tried - point, 0.0)
        change = torch.where(takes, tried_gradient - gradient, 0.0)
        pair, new_scale = _measured(step, change)
        pairs.append(pair)
        scale = torch.where(pair.inverse_product > 0, new_scale, scale)
        point = torch.where(takes, tried, point)
        value = torch.where(is_lower, tried_value, value)
        gradient = torch.where(takes, tried_gradient, gradient)
        new_direction = -_times_inverse_hessian(gradient, pairs, scale)
        direction = torch.where(takes, new_direction, direction)
        length = torch.where(is_lower, 1.0, _BACKTRACK * length)
    return point


def _measured(step: Points, change: Points) -> tuple[_Pair, Values]:
    """The pair of a step, and the inverse curvature along it."""
    product = _dot(step, change)
    square = _dot(change, change)
    is_convex = product > _LEAST_CURVATURE * square
    inverse_product = torch.where(is_convex, 1 / product, 0.0)
    return _Pair(step, change, inverse_product), product / square


def _times_inverse_hessian(gradient: Points, pairs: deque[_Pair], scale: Values) -> Points:
    """The approximate inverse Hessian of the pairs, times the gradient (two-loop recursion)."""
    vector = gradient
    factors = []
    for pair in reversed(pairs):
        factor = pair.inverse_product * _dot(pair.step, vector)
        vector = vector - _of_each(factor) * pair.change
        factors.append(factor)
    vector = _of_each(scale) * vector
    for pair, factor in zip(pairs, reversed(factors), strict=True):
        other = pair.inverse_product * _dot(pair.change, vector)
        vector = vector + _of_each(factor - other) * pair.step
    return vector


def _dot(first: Points, second: Points) -> Values:
    """Inner product of every problem."""
    return (first * second).sum((1, 2))


def _of_each(numbers: Tensor) -> Tensor:
    """One number per problem, to be combined with points."""
    return numbers.view(-1, 1, 1)
