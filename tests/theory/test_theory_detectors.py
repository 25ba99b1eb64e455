"""Construction D: values, one slot, and every unit on every input it can meet, exhaustively."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcat.theory.compression import compressibility, prefix_cache
from kvcat.theory.definitions import sequences
from kvcat.theory.detectors import (
    Layout,
    alarm_gain,
    alarm_slack,
    compressible_network,
    differing_rows,
    incompressible_network,
    layout_of,
    least_excess,
    num_parameters,
    one_slot_policy,
    ramp_width,
)
from kvcat.theory.detectors_bound import (
    verify_incompressible,
)
from kvcat.theory.detectors_checks import (
    num_splits,
    units,
    verify_compressible,
    verify_units,
    verify_values,
    widths,
)
from kvcat.theory.functions import FUNCTIONS, FunctionTable, parity, random_function

SIZES = [(2, 2), (2, 6), (3, 4), (5, 3)]
LARGEST = [(2, 6), (3, 5), (4, 4)]


def scaled(table: FunctionTable, factor: float) -> FunctionTable:
    return FunctionTable(table.num_symbols, tuple(factor * rows for rows in table.values))


@pytest.mark.parametrize(("m", "N"), SIZES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_both_networks_compute_the_function_and_differ_in_two_n_rows_of_one_matrix(name: str, m: int, N: int) -> None:
    table = FUNCTIONS[name](m, N)
    first, second = compressible_network(table), incompressible_network(table, constant=2.0)
    assert verify_values(first, table) <= 1e-12
    assert verify_values(second, table) <= 1e-12
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
    assert verify_values(network, table) <= 1e-12
    assert verify_compressible(network).error <= 1e-12


def test_there_are_516_splits_of_two_symbols_in_six_places() -> None:
    pairs = [
        (tokens[:n], tokens[n:])
        for j in range(1, 7)
        for tokens in itertools.product((0, 1), repeat=j)
        for n in range(1, j)
    ]
    assert num_splits(2, 6) == len(set(pairs)) == 516


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_slot_is_enough_for_every_function(name: str) -> None:
    assert verify_compressible(compressible_network(FUNCTIONS[name](3, 4))).error <= 1e-12


def test_large_values_cost_accuracy_in_proportion_alone() -> None:
    table = scaled(random_function(2, 5, d_out=3, seed=2), 1e9)
    network = compressible_network(table)
    assert verify_values(network, table) <= 1e-12 * 1e9
    assert verify_compressible(network).error <= 1e-12 * 1e9
    hard = incompressible_network(table, constant=1e3)
    assert verify_incompressible(hard, 1e3, lambda n: n - 1).margin > 0
    assert verify_values(hard, table) <= 1e-12 * 1e9


def test_the_slot_holds_the_sum_of_codes_in_block_3_and_the_length_in_block_4() -> None:
    layout, network = Layout(3, 4), compressible_network(parity(3, 4))
    prefix = torch.tensor([2, 0, 2])
    ((_, ((keys, values),))) = prefix_cache(network, prefix)
    slot_keys, slot_values = one_slot_policy(3, 4)[1](keys, values)
    expected = torch.zeros(1, layout.width, dtype=torch.float64)
    start = layout.block(3).start
    expected[0, [start + 2, start + 3, start + 8]] = 1.0  # (2, 1), (0, 2), (2, 3) in the order (i - 1) m + a
    expected[0, layout.block(4).start + 2] = 1.0  # e_3
    assert torch.equal(slot_values, expected)
    assert not slot_keys.any()


@pytest.mark.parametrize("constant", [0.5, 50.0])
def test_plain_and_causal_masking_give_the_same_outputs(constant: float) -> None:
    table = random_function(2, 4, d_out=2)
    for network in (compressible_network(table), incompressible_network(table, constant=constant)):
        causal = network.with_causal_mask()
        for length in range(1, 5):
            tokens = sequences(2, length)
            torch.testing.assert_close(causal(tokens), network(tokens), rtol=0, atol=1e-14)
        policy = one_slot_policy(2, 4)
        errors = [compressibility(some, policy, lambda _: 1).error for some in (network, causal)]
        assert errors[0] == pytest.approx(errors[1], rel=1e-12, abs=1e-14)


@pytest.mark.parametrize(("m", "N"), [(2, 5), (3, 4)])
def test_every_unit_is_what_it_claims_on_every_input_it_can_meet(m: int, N: int) -> None:
    table = random_function(m, N)
    for network in (compressible_network(table), incompressible_network(table, constant=1.0)):
        found = verify_units(network)
        assert found.codes == 0.0
        assert found.whole <= 1e-13
        assert found.one_slot <= 1e-13
        assert found.alarm == 0.0
        assert found.num_inputs == layout_of(network).num_sequences + num_splits(m, N)


def test_a_broken_detector_or_code_is_noticed() -> None:
    network = compressible_network(parity(2, 3))
    first, last = network.blocks
    shifted = replace(last.feed_forward, b_1=last.feed_forward.b_1 - 0.2)
    found = verify_units(replace(network, blocks=(first, replace(last, feed_forward=shifted))))
    assert found.whole > 0.1
    assert found.one_slot > 0.1
    doubled = replace(first.feed_forward, w_2=2 * first.feed_forward.w_2)
    assert verify_units(replace(network, blocks=(replace(first, feed_forward=doubled), last))).codes == 1.0
    assert verify_values(replace(network, blocks=(replace(first, feed_forward=doubled), last)), parity(2, 3)) > 0.5


def test_detectors_decide_in_the_middle_between_their_sequence_and_the_nearest_other() -> None:
    m, N = 2, 5
    network = compressible_network(parity(m, N))
    layout, ffn = layout_of(network), network.blocks[1].feed_forward
    start = 0
    for j in range(1, N + 1):
        rows = torch.zeros(m**j, layout.width, dtype=torch.float64)
        rows[:, layout.block(2)] = torch.eye(N, dtype=torch.float64)[j - 1]
        rows[:, layout.block(3)] = layout.code(sequences(m, j)) / j
        h = (rows @ ffn.w_1 + ffn.b_1)[:, layout.detectors[0]]
        own = h[torch.arange(m**j), start + torch.arange(m**j)]
        torch.testing.assert_close(own, torch.full_like(own, 1 / (2 * j)), rtol=1e-12, atol=0)
        h[torch.arange(m**j), start + torch.arange(m**j)] = -1.0
        assert float(h.max()) == pytest.approx(-1 / (2 * j), rel=1e-12)
        assert ramp_width(N) <= 1 / (4 * j)
        start += m**j


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.floats(-3, 6), st.booleans())
def test_for_real_inputs_detectors_stay_in_the_unit_interval_and_alarms_follow_their_formula(
    seed: int, log_scale: float, whole: bool
) -> None:
    network = incompressible_network(parity(2, 4), constant=1.0)
    layout, slack = layout_of(network), alarm_slack(4)
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(20, layout.width, generator=draw, dtype=torch.float64) * 10**log_scale
    if whole:
        rows[:, layout.block(2)] = torch.eye(4, dtype=torch.float64).repeat(5, 1)
    said = units(network, rows)
    rounding = 1e-14 * max(1.0, 10**log_scale) / ramp_width(4)
    assert (said.detectors >= -rounding).all()
    assert (said.detectors <= 1 + rounding).all()
    x, y = rows[:, layout.block(2)], rows[:, layout.block(3)].view(-1, 4, 2)[..., 0]
    above = (y - 1 / torch.arange(1, 5, dtype=torch.float64) - slack + 4 * (x - 1)).relu()
    expected = torch.cat([above, (-y - slack).relu()], -1)
    torch.testing.assert_close(said.alarms, expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.floats(1 / 5, 1))
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
        torch.testing.assert_close(units(network, rows).detectors, wanted, rtol=0, atol=1e-13)
        start += m**j


def test_the_gain_is_the_power_of_two_that_the_bound_needs() -> None:
    table = random_function(2, 4, d_out=2)
    first = torch.cat(table.values)[:, 0]
    room = least_excess(4) - alarm_slack(4)
    needed = 1.125 * (3.0 + first.max() + (-first).clamp(min=0).sum())
    gain = alarm_gain(table, 3.0)
    assert math.log2(gain) == int(math.log2(gain))
    assert gain * room >= needed > gain / 2 * room
    assert least_excess(4) == 1 / 24
    assert least_excess(4) == pytest.approx(
        min((n - r) / (2 * (r + k) * (n + k)) for n in range(1, 4) for r in range(n) for k in range(1, 5 - n)),
        rel=1e-14,
    )


@pytest.mark.parametrize(("m", "N", "d_out"), [(2, 3, 1), (2, 6, 1), (3, 4, 2), (5, 2, 5)])
def test_sizes_are_those_of_the_closed_form(m: int, N: int, d_out: int) -> None:
    network, sizes = compressible_network(random_function(m, N, d_out=d_out)), widths(m, N, d_out)
    assert sizes.num_parameters == num_parameters(network)
    assert sizes.embedding == network.embedding.shape[2]
    assert (sizes.embedding, sizes.first_hidden) == network.blocks[0].feed_forward.w_1.shape
    assert (sizes.residual, sizes.second_hidden) == network.blocks[1].feed_forward.w_1.shape


def test_the_smallest_size_has_the_widths_that_one_counts_by_hand() -> None:
    sizes = widths(2, 2, 1)  # 6 sequences; d_0 = 4, d = 12, 4 alarms
    assert (sizes.embedding, sizes.first_hidden, sizes.residual, sizes.second_hidden) == (4, 4, 12, 16)
    te, block_1, block_2 = 4 * 4, 4 * 16 + (16 + 4 + 48 + 12), 4 * 144 + (192 + 16 + 16 + 1)
    assert sizes.num_parameters == te + block_1 + block_2


def test_rows_that_differ_are_named_by_matrix() -> None:
    network = compressible_network(parity(2, 3))
    assert differing_rows(network, network) == {}
    embedding = network.embedding.clone()
    embedding[1, 2, 0] += 1e-9
    first, last = network.blocks
    b_1 = last.feed_forward.b_1.clone()
    b_1[5] = 0.0
    changed = replace(last, feed_forward=replace(last.feed_forward, b_1=b_1))
    other = replace(network, embedding=embedding, blocks=(first, changed))
    assert differing_rows(network, other) == {"te": (5,), "block 2 b_1": (5,)}
