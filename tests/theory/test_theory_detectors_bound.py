"""Lemma 2: what a cache can do, and the bound on the error of every policy."""

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from scipy.optimize import linprog

from kvcat.theory.compression import Cache, answer, compressibility, suffix_error
from kvcat.theory.definitions import Transformer, sequences
from kvcat.theory.detectors import (
    alarm_gain,
    alarm_slack,
    compressible_network,
    differing_rows,
    incompressible_network,
    layout_of,
    one_slot_policy,
)
from kvcat.theory.detectors_bound import (
    certified_bound,
    check_argument,
    least_alarm,
    least_maximum,
    verify_incompressible,
)
from kvcat.theory.detectors_checks import (
    verify_values,
)
from kvcat.theory.detectors_search import outputs_behind_sum, search_policies, slots_of_sum
from kvcat.theory.functions import FUNCTIONS, parity, random_function


def random_cache(network: Transformer, num_slots: int, scale: float, seed: int) -> Cache:
    draw = torch.Generator().manual_seed(seed)
    return tuple(
        tuple(
            (
                torch.randn(num_slots, head.w_k.shape[1], generator=draw, dtype=torch.float64) * scale,
                torch.randn(num_slots, head.w_v.shape[1], generator=draw, dtype=torch.float64) * scale,
            )
            for head in block.heads
        )
        for block in network.blocks
    )


@pytest.mark.parametrize("num_slots", [0, 1, 2])
def test_a_cache_acts_through_its_sum_of_values_in_block_3_alone(num_slots: int) -> None:
    table = random_function(3, 4, d_out=2)
    suffixes = sequences(3, 2)
    for network in (compressible_network(table), incompressible_network(table, constant=1.0)):
        for seed in range(5):
            cache = random_cache(network, num_slots, 3.0, seed)
            total = cache[1][0][1].sum(0)[layout_of(network).block(3)]
            found = outputs_behind_sum(network, total, num_slots, 2, suffixes)
            torch.testing.assert_close(found, answer(network, cache, 2, suffixes), rtol=1e-11, atol=1e-9)


def test_the_length_in_block_4_is_read_by_no_unit_so_lemma_2_keeps_w_o() -> None:
    table = random_function(2, 4)
    for network in (compressible_network(table), incompressible_network(table, constant=1.0)):
        layout, (first, last) = layout_of(network), network.blocks
        alone = replace(network, blocks=(first, replace(last, w_o=layout.move(3, 3))))
        suffixes, cache = sequences(2, 2), random_cache(network, 1, 2.0, 0)
        torch.testing.assert_close(answer(alone, cache, 2, suffixes), answer(network, cache, 2, suffixes))
        assert verify_values(alone, table) <= 1e-12


def test_the_least_maximum_of_lines_is_a_linear_program() -> None:
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        slopes, offsets = torch.randn(2, 7, generator=draw, dtype=torch.float64)
        slopes[0] = 0.0
        program = linprog(
            [0, 1], torch.stack([slopes, -torch.ones(7)], 1).numpy(), -offsets.numpy(), bounds=(None, None)
        )
        assert least_maximum(slopes, offsets) == pytest.approx(program.fun, rel=1e-9)
    with pytest.raises(ValueError, match="no minimum"):
        least_maximum(torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize(("m", "N"), [(2, 5), (3, 4)])
def test_the_least_alarm_is_the_gain_times_half_the_gap_of_the_intervals_less_the_slack(m: int, N: int) -> None:
    network, gain = incompressible_network(parity(m, N), constant=1.0), alarm_gain(parity(m, N), 1.0)
    layout = layout_of(network)
    for n in range(2, N):
        for r, k in itertools.product(range(1, n), range(1, N - n + 1)):
            closed = gain * ((n - r) / (2 * (r + k) * (n + k)) - alarm_slack(N))
            assert least_alarm(network, n + k, r + k) == pytest.approx(closed, rel=1e-12)
            values = torch.linspace(-2, 2, 2001, dtype=torch.float64)
            totals = torch.zeros(len(values), layout.code_width, dtype=torch.float64)
            totals[:, (n + k - 1) * m] = values
            suffixes = torch.tensor([[1] * k, [1] * (k - 1) + [0]])
            alarms = replace_detectors(network)
            loudest = outputs_behind_sum(alarms, totals, r, n, suffixes)[..., 0].amax(-1)
            assert float(loudest.min()) >= closed * (1 - 1e-12)
            assert float(loudest.min()) <= closed + gain * 4 / 2000 / (r + k)


def replace_detectors(network: Transformer) -> Transformer:
    """The network with its alarms alone."""
    first, last = network.blocks
    w_2 = last.feed_forward.w_2.clone()
    w_2[: layout_of(network).alarms[0].start] = 0
    return replace(network, blocks=(first, replace(last, feed_forward=replace(last.feed_forward, w_2=w_2))))


@pytest.mark.parametrize(("m", "N"), [(2, 5), (3, 4), (4, 3)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_certified_error_exceeds_the_constant_for_every_budget(name: str, m: int, N: int) -> None:
    table = FUNCTIONS[name](m, N)
    for constant in (0.1, 100.0):
        network = incompressible_network(table, constant=constant)
        for n in range(1, N):
            for r, k in itertools.product(range(n), range(1, N - n + 1)):
                assert certified_bound(network, n, k, r) >= 1.1 * constant
        found = verify_incompressible(network, constant, lambda n: n - 1)
        assert found.margin >= 0.1 * constant
        assert found.num_lengths == N * (N - 1) // 2
        assert found.bound == certified_bound(network, found.prefix_len, found.suffix_len, found.num_slots)


def test_random_caches_of_any_size_err_by_more_than_the_constant_for_every_prefix_and_suffix_length() -> None:
    network = incompressible_network(random_function(2, 4, d_out=2, seed=3), constant=5.0)
    for n in range(1, 4):
        for prefix, r, k in itertools.product(sequences(2, n), range(n), range(1, 4 - n + 1)):
            for seed, scale in enumerate((0.1, 1.0, 10.0, 1e3, 1e6)):
                cache = random_cache(network, r, scale, seed)
                assert float(suffix_error(network, cache, prefix, sequences(2, k)).max()) > 5.0
            kept = slots_of_sum(network, prefix, layout_of(network).code(prefix), r)
            assert {keys.shape[0] for heads in kept for keys, _ in heads} == {r}
            assert float(suffix_error(network, kept, prefix, sequences(2, k)).max()) > 5.0


def exact_output(network: Transformer, total: list[Fraction], num_slots: int, tokens: list[int]) -> Fraction:
    """What the network of one output gives for the tokens behind slots of the sum ``total`` in block 3, unrounded."""
    layout, ffn = layout_of(network), network.blocks[1].feed_forward
    n, k = network.num_positions - len(tokens), len(tokens)
    code = layout.code(torch.tensor([[0] * n + tokens]))[0].tolist()
    code[: n * layout.num_symbols] = [0.0] * (n * layout.num_symbols)
    rows = [Fraction(0)] * layout.width
    rows[layout.block(2).stop - 1] = Fraction(1)
    rows[layout.block(3)] = [(s + Fraction(c)) / (num_slots + k) for s, c in zip(total, code, strict=True)]
    used = [at for at, value in enumerate(rows) if value]
    outputs = []
    for weights, bias, out in zip(ffn.w_1.T.tolist(), ffn.b_1.tolist(), ffn.w_2[:, 0].tolist(), strict=True):
        hidden = Fraction(bias) + sum(rows[at] * Fraction(weights[at]) for at in used)
        outputs.append(max(hidden, Fraction(0)) * Fraction(out))
    return sum(outputs, Fraction(0))


@pytest.mark.parametrize("size", [1, 2**20, 2**60, 2**200])
@pytest.mark.parametrize("sign", [-1, 1])
def test_in_exact_arithmetic_slots_of_any_size_err_by_the_certified_bound(size: int, sign: int) -> None:
    table = random_function(2, 3)
    network = incompressible_network(table, constant=1.0)
    bound = certified_bound(network, 2, 1, 1)
    for at in range(layout_of(network).code_width):
        total = [Fraction(0), Fraction(0), Fraction(0), Fraction(-1, 48), Fraction(2, 7), Fraction(1, 3)]
        total[at] = Fraction(sign * size)
        answers = [exact_output(network, total, 1, [b]) for b in (0, 1)]
        for prefix in ([0, 1], [1, 1]):
            wanted = [Fraction(float(table(torch.tensor([*prefix, b])))) for b in (0, 1)]
            assert max(abs(a - w) for a, w in zip(answers, wanted, strict=True)) >= bound * (1 - 1e-12)


def test_the_exact_output_is_the_networks_where_float64_rounds_little() -> None:
    network = incompressible_network(random_function(2, 3), constant=1.0)
    total = [Fraction(v) for v in (0, 1, 0, -0.5, 0.25, 3)]
    found = outputs_behind_sum(
        network, torch.tensor([float(v) for v in total], dtype=torch.float64), 1, 2, sequences(2, 1)
    )
    for row, b in zip(found[:, 0].tolist(), (0, 1), strict=True):
        assert row == pytest.approx(float(exact_output(network, total, 1, [b])), rel=1e-12)


def test_each_of_two_suffixes_that_differ_in_the_last_token_can_be_the_one_that_fails() -> None:
    network, prefix = incompressible_network(parity(2, 4), constant=1.0), torch.tensor([0, 1])
    suffixes = torch.tensor([[0], [1]])
    layout = layout_of(network)
    at = 2 * layout.num_symbols  # (t, 3)
    failing = []
    for value in (0.0, -1.0):
        total = layout.code(prefix) * 2 / 3
        total[at] = value
        errors = suffix_error(network, slots_of_sum(network, prefix, total, 1), prefix, suffixes)
        failing.append((errors > 1.0).tolist())
    assert failing[0][0]
    assert failing[1][1]


@pytest.mark.parametrize("n", [2, 3])
def test_the_one_slot_policy_fails_on_the_incompressible_network_and_its_bound_is_void_on_the_other(n: int) -> None:
    table = parity(2, 4)
    easy, hard = compressible_network(table), incompressible_network(table, constant=1.0)
    for prefix in sequences(2, n):
        worst = compressibility(hard, one_slot_policy(2, 4), lambda _: 1, prefixes=[prefix.tolist()])
        assert worst.error > 1.0
    assert certified_bound(easy, n, 1, 1) <= 0.0


def test_two_tokens_suffice_with_an_empty_cache() -> None:
    network = incompressible_network(parity(2, 2), constant=1.0)
    assert verify_incompressible(network, 1.0, lambda n: 0).margin > 0
    with pytest.raises(ValueError, match="keeps all of every prefix of 1 to 1 tokens"):
        verify_incompressible(network, 1.0, lambda n: 1)


def test_budgets_and_constants_that_make_no_sense_are_refused() -> None:
    table = parity(2, 3)
    network = incompressible_network(table, constant=1.0)
    with pytest.raises(ValueError, match="2 tokens can have 0 to 2 slots, the budget says 3"):
        verify_incompressible(network, 1.0, lambda n: 1 if n == 1 else 3)
    for constant in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="must be positive and finite"):
            incompressible_network(table, constant=constant)
    for build in (compressible_network, lambda some: incompressible_network(some, constant=1.0)):
        with pytest.raises(ValueError, match="the table has N = 1"):
            build(parity(2, 1))
    with pytest.raises(ValueError, match="got n = 2, k = 1, r = 2"):
        certified_bound(network, 2, 1, 2)
    with pytest.raises(ValueError, match="got -1 and 3"):
        search_policies(network, lambda n: 0, num_starts=-1, num_steps=3)
    with pytest.raises(ValueError, match="different architectures"):
        differing_rows(network, incompressible_network(parity(2, 4), constant=1.0))
    with pytest.raises(ValueError, match="2 symbols and 3 positions, the table 2 and 4"):
        verify_values(network, parity(2, 4))


def broken(network: Transformer, part: str) -> Transformer:
    first, last = network.blocks
    ffn, layout = last.feed_forward, layout_of(network)
    w_1, w_2, w_o = ffn.w_1.clone(), ffn.w_2.clone(), last.w_o.clone()
    if part == "no unit reads z":
        w_1[layout.block(4).start, 0] = 1.0
    elif part == "detectors are pairs":
        w_2[0] += 1.0
    elif part == "an alarm reads":
        w_1[layout.block(3).start + 1, layout.alarms[0].start] = 1.0
    elif part == "alarms only add":
        w_2[-1, 0] = -1.0
    elif part == "a cache reaches y and z alone":
        w_o[0, 0] = 1.0
    elif part == "a token adds its code to y":
        w_o[layout.block(3), layout.block(3)] *= 2
    head, first_w_o = last.heads[0], first.w_o.clone()
    if part == "uniform":
        head = replace(head, w_q=head.w_q + 1)
    elif part == "block 1 ignores":
        first_w_o[0, 0] = 1.0
    elif part == "block 1 gives codes":
        first = replace(first, feed_forward=replace(first.feed_forward, w_2=-first.feed_forward.w_2))
    changed = replace(last, heads=(head,), w_o=w_o, feed_forward=replace(ffn, w_1=w_1, w_2=w_2))
    return replace(network, blocks=(replace(first, w_o=first_w_o), changed))


@pytest.mark.parametrize(
    "part",
    [
        "no unit reads z",
        "detectors are pairs",
        "an alarm reads",
        "alarms only add",
        "a cache reaches y and z alone",
        "a token adds its code to y",
        "uniform",
        "block 1 ignores",
        "block 1 gives codes",
    ],
)
def test_the_bound_is_refused_for_weights_on_which_its_argument_does_not_hold(part: str) -> None:
    network = incompressible_network(parity(2, 3), constant=1.0)
    check_argument(network)
    with pytest.raises(ValueError, match=part):
        certified_bound(broken(network, part), 2, 1, 1)
