"""Construction D: values, one slot, and every unit on every input it can meet, exhaustively.

A sum of K products of size s is rounded by at most K s 2^-52; the tolerances are such bounds.
"""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcat.theory.definitions import (
    FUNCTIONS,
    FeedForward,
    Transformer,
    answer,
    compress,
    compressibility,
    parity,
    prefix_cache,
    random_function,
    sequences,
)
from kvcat.theory.theorem import (
    Layout,
    alarm_gain,
    compressible_network,
    differing_rows,
    incompressible_network,
    matrices,
    summary_policy,
    value_error,
)

LARGEST = [(2, 6), (3, 5), (4, 4)]


def layout_of(network: Transformer) -> Layout:
    return Layout(network.num_symbols, network.num_positions)


def one_slot_error(network: Transformer) -> float:
    policy = summary_policy(network.num_symbols, network.num_positions)
    return compressibility(network, policy, lambda _: 1).error


def units(network: Transformer, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Detectors' answers [relu(h_a) - relu(h_a - q)] / q and alarms (before U) at rows [w, x, y, z]."""
    layout, ffn = layout_of(network), network.blocks[-1].feed_forward
    (rise, saturate, above, _), active = layout.units, torch.relu(rows @ ffn.w_1 + ffn.b_1)
    answers = (active[..., rise] - active[..., saturate]) / (ffn.b_1[rise] - ffn.b_1[saturate])
    return answers, active[..., above.start :]


def exposed(network: Transformer) -> Transformer:
    """The network with relu(x) - relu(-x) for its last map: it returns the rows that the map would read."""
    last = network.blocks[-1]
    one = torch.eye(last.w_o.shape[1], dtype=torch.float64)
    identity = FeedForward(torch.cat([one, -one], 1), 0 * one.repeat(1, 2)[0], torch.cat([one, -one]), 0 * one[0])
    return replace(network, blocks=(*network.blocks[:-1], replace(last, feed_forward=identity)))


@pytest.mark.parametrize(("m", "N"), [(2, 2), (2, 5), (3, 4)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_both_networks_compute_the_function_and_differ_in_two_n_rows_of_one_matrix(name: str, m: int, N: int) -> None:
    table = FUNCTIONS[name](m, N)
    first, second = compressible_network(table), incompressible_network(table, constant=2.0)
    assert value_error(first, table) <= 1e-12
    assert value_error(second, table) <= 1e-12
    assert one_slot_error(first) <= 1e-12
    units_of_last = 2 * sum(m**j for j in range(1, N + 1)) + 2 * N
    assert differing_rows(first, second) == {"block 2 W_2": tuple(range(units_of_last - 2 * N, units_of_last))}
    alarms = second.blocks[1].feed_forward.w_2[-2 * N :]
    assert not first.blocks[1].feed_forward.w_2[-2 * N :].any()
    assert (alarms[:, 0] == alarm_gain(table, 2.0)).all()
    assert not alarms[:, 1:].any()


@pytest.mark.parametrize(("m", "N"), LARGEST)
def test_behind_one_slot_the_compressible_network_is_itself(m: int, N: int) -> None:
    table = random_function(m, N, d_out=2, seed=1)
    network = compressible_network(table)
    assert value_error(network, table) <= 1e-12
    assert one_slot_error(network) <= 1e-12


def test_there_are_516_splits_of_two_symbols_in_six_places() -> None:
    pairs = [(n, k, a, b) for n in range(1, 6) for k in range(1, 7 - n) for a in range(2**n) for b in range(2**k)]
    assert len(pairs) == sum((j - 1) * 2**j for j in range(2, 7)) == 516


def test_the_slot_holds_the_sum_of_codes_in_block_3_and_the_length_in_block_4() -> None:
    layout, network = Layout(3, 4), compressible_network(parity(3, 4))
    prefix = torch.tensor([2, 0, 2])
    ((_, ((keys, values),))) = prefix_cache(network, prefix)
    slot_keys, slot_values = summary_policy(3, 4)[1](keys, values)
    expected = torch.zeros(1, layout.width, dtype=torch.float64)
    start = layout.block(3).start
    expected[0, [start + 2, start + 3, start + 8]] = 1.0  # (2, 1), (0, 2), (2, 3) in the order (i - 1) m + a
    expected[0, layout.block(4).start + 2] = 1.0  # e_3
    assert torch.equal(slot_values, expected)
    assert not slot_keys.any()


@pytest.mark.parametrize(("m", "N"), [(2, 5), (3, 4)])
def test_every_unit_is_what_it_claims_on_every_input_it_can_meet(m: int, N: int) -> None:
    table = random_function(m, N)
    for network in (compressible_network(table), incompressible_network(table, constant=1.0)):
        bare, policy, start = exposed(network), summary_policy(m, N), 0
        wanted = torch.eye(layout_of(network).num_sequences, dtype=torch.float64)
        for j in range(1, N + 1):
            own = wanted[start : start + m**j]
            detectors, alarms = units(network, bare(sequences(m, j)))
            torch.testing.assert_close(detectors, own, rtol=0, atol=1e-12)
            assert not alarms.any()
            for n in range(1, j):
                for number, prefix in enumerate(sequences(m, n)):
                    cache = compress(policy, prefix_cache(bare, prefix))
                    detectors, _ = units(network, answer(bare, cache, n, sequences(m, j - n)))
                    some = own[number * m ** (j - n) : (number + 1) * m ** (j - n)]
                    torch.testing.assert_close(detectors, some, rtol=0, atol=1e-12)
            start += m**j


@pytest.mark.parametrize("scale", [1 / 5, 1 / 3, 0.77, 1.0])
def test_one_pair_of_units_detects_its_sequence_at_every_scale(scale: float) -> None:
    network, m, N = compressible_network(parity(2, 5)), 2, 5
    layout = layout_of(network)
    start = 0
    for j in range(1, N + 1):
        rows = torch.zeros(m**j, layout.width, dtype=torch.float64)
        rows[:, layout.block(2)] = torch.eye(N, dtype=torch.float64)[j - 1]
        rows[:, layout.block(3)] = scale * layout.code(sequences(m, j))
        wanted = torch.zeros(m**j, layout.num_sequences, dtype=torch.float64)
        wanted[:, start : start + m**j] = torch.eye(m**j, dtype=torch.float64)
        torch.testing.assert_close(units(network, rows)[0], wanted, rtol=0, atol=1e-12)
        start += m**j


def test_lengths_and_constants_that_make_no_sense_are_refused() -> None:
    for constant in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="must be positive and finite"):
            incompressible_network(parity(2, 3), constant=constant)
    with pytest.raises(ValueError, match="the table has N = 1"):
        compressible_network(parity(2, 1))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.01, 1.0, 1e4]))
def test_for_real_inputs_every_detector_stays_in_the_unit_interval(seed: int, scale: float) -> None:
    network = incompressible_network(parity(2, 4), constant=1.0)
    draw, layout = torch.Generator().manual_seed(seed), layout_of(network)
    rows = torch.randn(20, layout.width, generator=draw, dtype=torch.float64) * scale
    detectors, _ = units(network, rows)
    rounding = 1e-14 * max(1.0, scale) / layout.ramp
    assert -rounding <= float(detectors.min()) <= float(detectors.max()) <= 1 + rounding


def test_the_gain_is_the_power_of_two_that_the_bound_needs() -> None:
    table = random_function(2, 4, d_out=2)
    first, least = torch.cat(table.values)[:, 0], Layout(2, 4).least_excess
    needed = 1.125 * (3.0 + first.max() + (-first).clamp(min=0).sum())
    gain = alarm_gain(table, 3.0)
    assert math.log2(gain) == int(math.log2(gain))
    assert gain * 0.75 * least >= needed > gain / 2 * 0.75 * least
    gaps = [(n - r) / (2 * (r + k) * (n + k)) for n in range(1, 4) for r in range(n) for k in range(1, 5 - n)]
    assert least == pytest.approx(min(gaps), rel=1e-14)
    assert least == 1 / 24


def test_rows_that_differ_are_named_by_matrix_and_all_parameters_are_counted() -> None:
    network = compressible_network(parity(2, 4))
    assert differing_rows(network, network) == {}
    assert sum(matrix.numel() for matrix in matrices(network).values()) == 4537
    embedding = network.embedding.clone()
    embedding[1, 2, 0] += 1e-9
    assert differing_rows(network, replace(network, embedding=embedding)) == {"te": (6,)}
