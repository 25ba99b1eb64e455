"""Construction D: values, one slot, and every unit on every input it can meet, exhaustively.

A sum of K products of size s is rounded by at most K s 2^-52; the tolerances are such bounds.
"""

import math
from dataclasses import replace

import pytest
import torch

from kvcat.theory import definitions as d
from kvcat.theory import theorem as t


def layout_of(network):
    return t.Layout(network.num_symbols, network.num_positions)


def one_slot_error(network):
    policy = t.summary_policy(network.num_symbols, network.num_positions)
    return d.compressibility(network, policy, lambda _: 1).error


def units(network, rows):
    """Detectors' answers [relu(h_a) - relu(h_a - q)] / q and alarms (before U) at rows [w, x, y, z]."""
    layout, ffn = layout_of(network), network.blocks[-1].feed_forward
    (rise, saturate, above, _), active = layout.units, torch.relu(rows @ ffn.w_1 + ffn.b_1)
    answers = (active[..., rise] - active[..., saturate]) / (ffn.b_1[rise] - ffn.b_1[saturate])
    return answers, active[..., above.start :]


def exposed(network):
    """The network with relu(x) - relu(-x) for its last map: it returns the rows that the map would read."""
    last = network.blocks[-1]
    one = torch.eye(last.w_o.shape[1], dtype=torch.float64)
    identity = d.FeedForward(torch.cat([one, -one], 1), 0 * one.repeat(1, 2)[0], torch.cat([one, -one]), 0 * one[0])
    return replace(network, blocks=(*network.blocks[:-1], replace(last, feed_forward=identity)))


@pytest.mark.parametrize(("m", "N"), [(2, 2), (2, 5), (3, 4)])
@pytest.mark.parametrize("name", d.FUNCTIONS)
def test_both_networks_compute_the_function_and_differ_in_two_n_rows_of_one_matrix(name, m, N):
    table = d.FUNCTIONS[name](m, N)
    first, second = t.compressible_network(table), t.incompressible_network(table, constant=2.0)
    assert t.value_error(first, table) <= 1e-12
    assert t.value_error(second, table) <= 1e-12
    assert one_slot_error(first) <= 1e-12
    units_of_last = 2 * sum(m**j for j in range(1, N + 1)) + 2 * N
    assert t.differing_rows(first, second) == {"block 2 W_2": tuple(range(units_of_last - 2 * N, units_of_last))}
    alarms = second.blocks[1].feed_forward.w_2[-2 * N :]
    assert not first.blocks[1].feed_forward.w_2[-2 * N :].any()
    assert (alarms[:, 0] == t.alarm_gain(table, 2.0)).all()
    assert not alarms[:, 1:].any()


@pytest.mark.parametrize(("m", "N"), [(2, 5), (3, 4)])
def test_every_unit_is_what_it_claims_on_every_input_it_can_meet(m, N):
    table = d.random_function(m, N)
    for network in (t.compressible_network(table), t.incompressible_network(table, constant=1.0)):
        bare, policy, start = exposed(network), t.summary_policy(m, N), 0
        wanted = torch.eye(layout_of(network).num_sequences, dtype=torch.float64)
        for j in range(1, N + 1):
            own = wanted[start : start + m**j]
            detectors, alarms = units(network, bare(d.sequences(m, j)))
            torch.testing.assert_close(detectors, own, rtol=0, atol=1e-12)
            assert not alarms.any()
            for n in range(1, j):
                for number, prefix in enumerate(d.sequences(m, n)):
                    cache = d.compress(policy, d.prefix_cache(bare, prefix))
                    detectors, _ = units(network, d.answer(bare, cache, n, d.sequences(m, j - n)))
                    some = own[number * m ** (j - n) : (number + 1) * m ** (j - n)]
                    torch.testing.assert_close(detectors, some, rtol=0, atol=1e-12)
            start += m**j


def test_lengths_and_constants_that_make_no_sense_are_refused():
    for constant in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="must be positive and finite"):
            t.incompressible_network(d.parity(2, 3), constant=constant)
    with pytest.raises(ValueError, match="the table has N = 1"):
        t.compressible_network(d.parity(2, 1))
