"""Arguments for which a construction, a bound or an optimum is not defined."""

import math

import pytest
import torch

from kvcat.theory import definitions as d
from kvcat.theory import histogram as h
from kvcat.theory import theorem as t
from kvcat.theory.optimum import (
    enclosing_ball,
    hull_lemma_bound,
    joint_optimum,
    optimal_error,
    paper_bound,
    sharp_constant,
)
from tiny import rejections

POINTS = torch.eye(2, dtype=torch.float64)
ALL = (d.keep_all,) * 2


def network(*, symbols=2, length=3, constant=1.0):
    return t.incompressible_network(d.parity(symbols, length), constant=constant)


def nan_in_second_block(keys, values):
    """A call of ``compress`` with a policy of the second block that divides by these numbers."""
    model = network()
    cache = d.prefix_cache(model, torch.tensor([0]))
    return d.compress((d.keep_all, lambda k, v: (k / keys, v / values)), cache)


@rejections(
    # definitions
    (r"1 slots for 2 tokens, the policy gave \[2\]",
     lambda: d.compressibility(network(), ALL, lambda n: 1)),
    ("block 2 are not finite", lambda: nan_in_second_block(0, 1)),
    ("block 2 are not finite", lambda: nan_in_second_block(1, 0)),
    ("sequences have 1 to 3", lambda: network()(torch.zeros(6, dtype=torch.int64))),
    ("symbols must lie in 0 to 1", lambda: network()(torch.tensor([3]))),
    ("for 1 tokens must lie in 0 to 1, got 2",
     lambda: d.compressibility(network(), ALL, lambda n: 2 * n)),
    ("no prefix to look at", lambda: d.compressibility(network(), ALL, lambda n: n, prefixes=[])),
    ("length 1 needs a finite", lambda: d.tabulate(lambda rows, _: rows.sum(-1) / 0, 2, 2)),
    ("1 to 3 symbols, not 4", lambda: d.parity(2, 3)(torch.zeros(4, dtype=torch.int64))),
    # histogram networks
    ("2 symbols, got 1", lambda: h.incompressible_histogram(1, 4)),
    ("N >= 2, got 1", lambda: h.incompressible_histogram(2, 1)),
    # the hull lemma
    (r"above 1, got 1\.0", lambda: hull_lemma_bound(POINTS, 1.0)),
    ("one at least, got 0", lambda: sharp_constant(POINTS[:0], 2.0)),
    (r"positive and finite, got 0\.0 to 0\.0", lambda: enclosing_ball(POINTS, 0 * POINTS[0])),
    ("finite", lambda: enclosing_ball(POINTS * torch.nan)),
    # the optimum
    ("1 slot at least, got 2 and 0", lambda: optimal_error(2, 3, 1, 0)),
    ("slots must lie in 0 to 3, got 4", lambda: joint_optimum(torch.tensor([3, 0]), 1, 4)),
    ("lengths 3 and 0", lambda: paper_bound(3, 0, 1)),
    # the theorem
    ("must be larger than 0", lambda: network(constant=0.0)),
    ("must be larger than 0", lambda: network(constant=-1.0)),
    ("must be a finite number", lambda: network(constant=math.inf)),
    ("must be a finite number", lambda: network(constant=math.nan)),
    ("the table has N = 1", lambda: t.compressible_network(d.parity(2, 1))),
    ("keeps all of every prefix of 1 to 1 tokens",
     lambda: t.certified_bounds(network(length=2), lambda n: 1)),
    ("got n = 2, k = 1, r = 2", lambda: t.certified_bound(network(), 2, 1, 2)),
)  # fmt: skip
def test_what_is_not_defined_is_rejected(message, call):
    with pytest.raises(ValueError, match=message):
        call()
