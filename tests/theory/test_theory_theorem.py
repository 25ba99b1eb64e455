"""Construction D: values and one slot, exhaustively; the bound on the error of every policy, and
what a cache can do.

A sum of K products of size s is rounded by at most K s 2^-52; the tolerances are such bounds.
"""

import pytest
import torch

from kvcat.theory import definitions as d
from kvcat.theory import theorem as t


@pytest.mark.parametrize(("m", "N"), [(2, 2), (2, 5), (3, 4)])
@pytest.mark.parametrize("name", d.FUNCTIONS)
def test_both_networks_compute_the_function_and_differ_in_two_n_rows_of_one_matrix(name, m, N):
    table = d.FUNCTIONS[name](m, N)
    first = t.compressible_network(table)
    second = t.incompressible_network(table, constant=2.0)
    assert t.value_error(first, table) <= 1e-12
    assert t.value_error(second, table) <= 1e-12
    assert d.compressibility(first, t.summary_policy(m, N), lambda _: 1).error <= 1e-12
    units_of_last = 2 * sum(m**j for j in range(1, N + 1)) + 2 * N
    assert t.differing_rows(first, second) == {
        "block 2 W_2": tuple(range(units_of_last - 2 * N, units_of_last))
    }
    alarms = second.blocks[1].feed_forward.w_2[-2 * N :]
    assert not first.blocks[1].feed_forward.w_2[-2 * N :].any()
    assert (alarms[:, 0] == t.alarm_gain(table, 2.0)).all()
    assert not alarms[:, 1:].any()


def layout_of(network):
    return t.Layout(network.num_symbols, network.num_positions)


def cache_of_sum(network, total, num_slots):
    """Random slots whose values in block 3 have this sum."""
    draw = torch.Generator().manual_seed(0)
    rows = layout_of(network).block(3)
    (head,), (second,) = (block.heads for block in network.blocks)
    shapes = [(num_slots, w.shape[1]) for w in (head.w_k, head.w_v, second.w_k, second.w_v)]
    states = [10 * torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]
    states[3][:, rows] += (total - states[3][:, rows].sum(0)) / max(1, num_slots)
    return ((states[0], states[1]),), ((states[2], states[3]),)


@pytest.mark.parametrize("name", d.FUNCTIONS)
def test_caches_of_any_sum_and_those_that_balance_both_alarms_err_by_the_certified_bound(name):
    network = t.incompressible_network(d.FUNCTIONS[name](2, 4), constant=2.0)
    layout = layout_of(network)
    draw = torch.Generator().manual_seed(1)
    for n, k, r in [(1, 2, 0), (2, 1, 1), (2, 2, 1), (3, 1, 2)]:
        bound = t.certified_bound(network, n, k, r)
        suffixes = d.sequences(2, k)
        for prefix in d.sequences(2, n):
            balanced = layout.code(prefix) * (r + k) / (n + k)
            balanced[layout.watched[n + k - 1]] = -(n - r) / (2 * (n + k))
            random = torch.randn(3, layout.code_width, generator=draw, dtype=torch.float64)
            for total in (
                layout.code(prefix),
                balanced,
                *(random * torch.tensor([[0.1], [10.0], [1e6]])),
            ):
                errors = d.suffix_error(network, cache_of_sum(network, total, r), prefix, suffixes)
                assert float(errors.max()) >= bound * (1 - 1e-9) >= 2.2


def test_two_tokens_suffice_with_an_empty_cache():
    network = t.incompressible_network(d.parity(2, 2), constant=1.0)
    assert t.certified_bounds(network, lambda n: 0).bound.min() > 1.0


@pytest.mark.parametrize("constant", [0.1, 100.0])
@pytest.mark.parametrize("name", d.FUNCTIONS)
def test_the_certified_error_exceeds_the_constant_for_the_largest_budget(name, constant):
    network = t.incompressible_network(d.FUNCTIONS[name](2, 4), constant=constant)
    bounds = t.certified_bounds(network, lambda n: n - 1)
    assert bounds[["n", "k", "r"]].to_numpy().tolist() == [
        [n, k, n - 1] for n in range(1, 4) for k in range(1, 5 - n)
    ]
    assert bounds.bound.min() >= 1.1 * constant


def test_the_summary_policy_fails_on_the_incompressible_network_and_the_other_has_no_bound():
    hard = t.incompressible_network(d.parity(2, 4), constant=1.0)
    for prefix in d.sequences(2, 2):
        assert (
            d.compressibility(
                hard, t.summary_policy(2, 4), lambda _: 1, prefixes=[prefix.tolist()]
            ).error
            > 1.0
        )
    assert t.certified_bound(t.compressible_network(d.parity(2, 4)), 2, 1, 1) <= 0.0


@pytest.mark.parametrize(
    ("message", "block", "matrix", "row", "column"),
    [
        ("block 1 ignores", 0, "w_o", 0, 0),
        ("block 1 gives codes", 0, "w_2", 0, 0),
        ("uniform", 1, "w_q", 0, 0),
        ("a cache reaches y and z alone", 1, "w_o", 0, 0),
        ("a token adds its code to y", 1, "w_o", 9, 9),
        ("no unit reads z", 1, "w_1", -1, 0),
        ("detectors are pairs", 1, "w_2", 0, 0),
        ("alarms only add", 1, "w_2", -1, 0),
        ("an alarm reads", 1, "w_1", 10, -1),
    ],
)
def test_the_bound_is_rejected_for_weights_on_which_its_argument_does_not_hold(
    message, block, matrix, row, column
):
    network = t.incompressible_network(d.parity(2, 3), constant=1.0)
    t.check_argument(network)
    changed = network.blocks[block]
    owner = {"w_o": changed, "w_q": changed.heads[0]}.get(matrix, changed.feed_forward)
    getattr(owner, matrix)[row, column] -= 1e4
    with pytest.raises(ValueError, match=message):
        t.certified_bound(network, 2, 1, 1)
