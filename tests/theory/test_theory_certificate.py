"""Lemma 2: what a cache can do, and the bound on the error of every policy."""

import itertools
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from kvcat.theory.definitions import (
    FUNCTIONS,
    Cache,
    Transformer,
    answer,
    compressibility,
    majority,
    parity,
    prefix_cache,
    random_function,
    sequences,
    suffix_error,
)
from kvcat.theory.theorem import (
    Layout,
    alarm_gain,
    certified_bound,
    certified_bounds,
    check_argument,
    compressible_network,
    incompressible_network,
    least_alarm,
    summary_policy,
)


def layout_of(network: Transformer) -> Layout:
    return Layout(network.num_symbols, network.num_positions)


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


def cache_of_sum(network: Transformer, total: Tensor, num_slots: int) -> Cache:
    """A cache of r slots whose values have this sum in block 3, all of it in the first slot."""
    whole = prefix_cache(network, torch.zeros(max(1, num_slots), dtype=torch.int64))
    empty = tuple(tuple((k[:num_slots] * 0, v[:num_slots] * 0) for k, v in heads) for heads in whole)
    if num_slots:
        empty[1][0][1][0, layout_of(network).block(3)] = total
    return empty


def outputs_behind_sum(network: Transformer, totals: Tensor, num_slots: int, n: int, suffixes: Tensor) -> Tensor:
    """M_{C,a}(b) behind slots whose values have the sums ``totals`` in block 3: (caches, suffixes, d_out)."""
    layout, (first, last) = layout_of(network), network.blocks
    ffn, num_averaged = last.feed_forward, num_slots + suffixes.shape[1]
    tokens = first.feed_forward(network.embed(suffixes, start=n))
    own = (tokens @ last.heads[0].w_v).sum(-2) / num_averaged @ last.w_o + tokens[:, -1]
    cached = totals / num_averaged @ (last.w_o[layout.block(3)] @ ffn.w_1)
    return torch.relu(cached[:, None] + own @ ffn.w_1 + ffn.b_1) @ ffn.w_2 + ffn.b_2


@pytest.mark.parametrize("num_slots", [0, 1, 2])
def test_a_cache_acts_through_its_sum_of_values_in_block_3_alone(num_slots: int) -> None:
    table = random_function(3, 4, d_out=2)
    suffixes = sequences(3, 2)
    for network in (compressible_network(table), incompressible_network(table, constant=1.0)):
        for seed in range(5):
            cache = random_cache(network, num_slots, 3.0, seed)
            total = cache[1][0][1].sum(0)[layout_of(network).block(3)][None]
            found = outputs_behind_sum(network, total, num_slots, 2, suffixes)[0]
            torch.testing.assert_close(found, answer(network, cache, 2, suffixes), rtol=1e-11, atol=1e-9)


def attack(network: Transformer, prefix: Tensor, k: int, r: int) -> float:
    """The least largest error that starts at the prefix's sum and scans of every coordinate find for one slot sum."""
    layout, suffixes = layout_of(network), sequences(network.num_symbols, k)
    n, N = len(prefix), network.num_positions
    wanted = network(torch.cat([prefix.expand(len(suffixes), -1), suffixes], 1))
    balance = -(n - r) / (2 * (n + k))  # here both suffixes' alarms of j = n + k are equal
    code = layout.code(prefix)
    starts = torch.stack([code * scale for scale in ((r + k) / (n + k), 1.0, 0.0)])
    starts[:, layout.watched[n + k - 1]] = balance
    grid = torch.cat([torch.linspace(-4 * N, 4 * N, 161), torch.linspace(2, 0, 41) * balance]).double()

    def errors(totals: Tensor) -> Tensor:
        outputs = outputs_behind_sum(network, totals, r, n, suffixes)
        return torch.linalg.vector_norm(outputs - wanted, dim=-1).amax(-1)

    best = torch.inf
    for start in starts if r else starts[-1:] * 0:
        total = start
        for at in range(layout.code_width if r else 0):
            tries = total.repeat(len(grid) + 1, 1)
            tries[:-1, at] = grid
            total = tries[int(errors(tries).argmin())]
        found = suffix_error(network, cache_of_sum(network, total, r), prefix, suffixes)
        assert float(found.max()) == pytest.approx(float(errors(total[None])[0]), rel=1e-9)
        best = min(best, float(found.max()))
    return best


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_policy_found_by_search_falls_below_the_certified_error(name: str) -> None:
    network = incompressible_network(FUNCTIONS[name](2, 3), constant=2.0)
    for n, k, r in [(1, 1, 0), (1, 2, 0), (2, 1, 0), (2, 1, 1)]:
        for prefix in sequences(2, n):
            assert attack(network, prefix, k, r) >= certified_bound(network, n, k, r) * (1 - 1e-9) >= 2.2


def test_a_searched_policy_attains_the_certified_error_for_majority_and_comes_close_for_parity() -> None:
    network = incompressible_network(majority(2, 3), constant=2.0)
    assert min(attack(network, prefix, 1, 1) for prefix in sequences(2, 2)) == pytest.approx(
        certified_bound(network, 2, 1, 1), rel=1e-9
    )
    network = incompressible_network(parity(2, 4), constant=2.0)
    found = min(attack(network, prefix, 1, 2) for prefix in sequences(2, 3))
    assert found <= certified_bound(network, 3, 1, 2) + 1.0


def test_the_attack_finds_the_sum_that_serves_the_compressible_network() -> None:
    network = compressible_network(random_function(2, 4))
    assert attack(network, torch.tensor([0, 1]), 2, 1) <= 1e-12


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
    totals = torch.tensor([[float(v) for v in total]], dtype=torch.float64)
    found = outputs_behind_sum(network, totals, 1, 2, sequences(2, 1))[0, :, 0]
    for row, b in zip(found.tolist(), (0, 1), strict=True):
        assert row == pytest.approx(float(exact_output(network, total, 1, [b])), rel=1e-12)


def test_two_tokens_suffice_with_an_empty_cache() -> None:
    network = incompressible_network(parity(2, 2), constant=1.0)
    assert certified_bounds(network, lambda n: 0).bound.min() > 1.0
    with pytest.raises(ValueError, match="keeps all of every prefix of 1 to 1 tokens"):
        certified_bounds(network, lambda n: 1)


def test_budgets_and_lengths_that_make_no_sense_are_refused() -> None:
    network = incompressible_network(parity(2, 3), constant=1.0)
    with pytest.raises(ValueError, match="2 tokens can have 0 to 2 slots, the budget says 3"):
        certified_bounds(network, lambda n: 1 if n == 1 else 3)
    with pytest.raises(ValueError, match="got n = 2, k = 1, r = 2"):
        certified_bound(network, 2, 1, 2)


@pytest.mark.parametrize(("m", "N"), [(2, 4), (3, 4)])
def test_the_least_alarm_is_the_gain_times_half_the_gap_of_the_intervals_less_the_slack(m: int, N: int) -> None:
    network, gain = incompressible_network(parity(m, N), constant=1.0), alarm_gain(parity(m, N), 1.0)
    for n, r, k in [(2, 1, 1), (2, 1, 2), (3, 1, 1), (3, 2, 1)]:
        closed = gain * ((n - r) / (2 * (r + k) * (n + k)) - layout_of(network).least_excess / 4)
        assert least_alarm(network, n + k, r + k) == pytest.approx(closed, rel=1e-12)


@pytest.mark.parametrize("constant", [0.1, 100.0])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_certified_error_exceeds_the_constant_for_every_budget(name: str, constant: float) -> None:
    network = incompressible_network(FUNCTIONS[name](2, 4), constant=constant)
    for n in range(1, 4):
        for r, k in itertools.product(range(n), range(1, 4 - n + 1)):
            assert certified_bound(network, n, k, r) >= 1.1 * constant
    bounds = certified_bounds(network, lambda n: n - 1)
    assert bounds[["n", "k", "r"]].to_numpy().tolist() == [[n, k, n - 1] for n in range(1, 4) for k in range(1, 5 - n)]
    assert bounds.bound.min() >= 1.1 * constant


def test_the_summary_policy_fails_on_the_incompressible_network_and_the_bound_is_void_on_the_other() -> None:
    hard = incompressible_network(parity(2, 4), constant=1.0)
    for prefix in sequences(2, 2):
        assert compressibility(hard, summary_policy(2, 4), lambda _: 1, prefixes=[prefix.tolist()]).error > 1.0
    assert certified_bound(compressible_network(parity(2, 4)), 2, 1, 1) <= 0.0


@pytest.mark.parametrize(
    ("part", "block", "matrix", "row", "column"),
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
def test_the_bound_is_refused_for_weights_on_which_its_argument_does_not_hold(
    part: str, block: int, matrix: str, row: int, column: int
) -> None:
    network = incompressible_network(parity(2, 3), constant=1.0)
    check_argument(network)
    changed = network.blocks[block]
    owner = {"w_o": changed, "w_q": changed.heads[0]}.get(matrix, changed.feed_forward)
    getattr(owner, matrix)[row, column] -= 1e4
    with pytest.raises(ValueError, match=part):
        certified_bound(network, 2, 1, 1)
