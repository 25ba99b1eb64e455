"""Construction H: what its network computes, on every sequence and on real numbers, and why no policy compresses it."""

from collections.abc import Callable
from fractions import Fraction

import pytest
import torch

from kvcat.theory.compression import answer, compress, compressibility, prefix_cache, suffix_error
from kvcat.theory.definitions import sequences
from kvcat.theory.functions import FUNCTIONS, FunctionTable, last_symbol, mean, parity, random_function, tabulate
from kvcat.theory.hull import hull_lemma_bound, sharp_constant
from kvcat.theory.scalar_code import (
    ScalarCode,
    base_weights,
    incompressible_scalar_network,
    scalar_code,
    span_certificate,
    spanning_weights,
)
from kvcat.theory.scalar_report import (
    approximation_error,
    base_code_network,
    optimal_policy,
    scalar_policy,
    scalar_report,
)


def last_number(num_symbols: int, longest: int) -> FunctionTable:
    return tabulate(lambda rows: rows[:, -1], num_symbols, longest)


def test_the_weights_are_the_recursion_written_out() -> None:
    assert spanning_weights(2, 5) == (1, 2, 2 * 4, 3 * 12, 4 * 48)
    assert spanning_weights(4, 3) == (1, 3 * 2, 3 * 8)
    assert base_weights(3, 4) == (1, 3, 9, 27)


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
@pytest.mark.parametrize(("num_symbols", "longest", "known"), [(2, 6, 1e-10), (3, 5, 1e-10), (4, 4, 1e-11)])
def test_the_network_is_f_on_every_sequence_within_its_rounding(
    name: str, num_symbols: int, longest: int, known: float
) -> None:
    code = scalar_code(FUNCTIONS[name](num_symbols, longest), 2.0)
    error = approximation_error(code.network(), code.table)
    assert error < code.rounding()
    assert error < known


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FUNCTIONS))
@pytest.mark.parametrize(("num_symbols", "longest", "known"), [(4, 6, 5e-9), (2, 10, 2e-6)])
def test_the_network_is_f_on_every_long_sequence_within_its_rounding(
    name: str, num_symbols: int, longest: int, known: float
) -> None:
    code = scalar_code(FUNCTIONS[name](num_symbols, longest), 2.0)
    error = approximation_error(code.network(), code.table)
    assert error < min(code.rounding(), known)


@pytest.mark.parametrize("code_of", [scalar_code, lambda f, c: ScalarCode(f, base_weights(3, 4), c, isolated=True)])
def test_the_first_block_gives_weighted_symbols_and_positions(code_of: Callable[..., ScalarCode]) -> None:
    code = code_of(random_function(3, 4), 1.0)
    model = code.network()
    rows = model.blocks[0].feed_forward(model.embedding)
    for a in range(3):
        for i in range(4):
            wanted = torch.zeros(10, dtype=torch.float64)
            wanted[0], wanted[1 + i] = code.weights[i] * a, 1
            assert torch.equal(rows[a, i], wanted)


@pytest.mark.parametrize("d_out", [1, 2])
@pytest.mark.parametrize("isolated", [False, True])
def test_the_last_feed_forward_map_is_the_piecewise_linear_map_at_every_real_number(d_out: int, isolated: bool) -> None:
    table = random_function(2, 5, d_out=d_out, seed=3)
    code = ScalarCode(table, spanning_weights(2, 5), 1.0, isolated)
    model, draw = code.network(), torch.Generator().manual_seed(0)
    for j in range(1, 6):
        top = code.largest(j) / j
        y = torch.rand(200, generator=draw, dtype=torch.float64) * 3 * top - top
        rows = torch.zeros(200, 12, dtype=torch.float64)
        rows[:, j], rows[:, 6] = 1, y
        rows[:, 0], rows[:, 7:] = 5.0, -3.0  # blocks that the map does not read
        found, wanted = model.blocks[1].feed_forward(rows), code.evaluate(j, y)
        assert float((found - wanted).norm(dim=-1).max()) < code.rounding(2 * top)
        outside = (y < -0.4 / j) | (y > top + 0.4 / j)
        assert outside.any()
        torch.testing.assert_close(wanted[outside], code.far.expand(int(outside.sum()), -1), rtol=0, atol=0)


def test_the_piecewise_linear_map_joins_f_at_neighbouring_codes_and_ends_at_the_far_value() -> None:
    table = mean(2, 3)
    code = scalar_code(table, 2.0)  # weights 1, 2, 8
    assert code.far.tolist() == [4.0]
    at = torch.tensor([0, 1, 2, 3, 8, 11, 5.5, 11.4, -0.4, 11.2, 50.0, -50.0], dtype=torch.float64) / 3
    third = 1 / 3
    wanted = [0, third, third, 2 * third, third, 1, third * 1.5, 4, 4, 2.5, 4, 4]
    torch.testing.assert_close(code.evaluate(3, at)[:, 0], torch.tensor(wanted, dtype=torch.float64))


def test_isolated_codes_have_the_far_value_between_them() -> None:
    code = ScalarCode(last_number(2, 3), base_weights(2, 3), 1.0, isolated=True)
    at = torch.tensor([4.0, 4.4, 4.5, 4.6, 5.0, 4.2], dtype=torch.float64) / 3
    torch.testing.assert_close(code.evaluate(3, at)[:, 0].tolist(), [1.0, 3.0, 3.0, 3.0, 1.0, 2.0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("d_out", [1, 3])
def test_the_far_value_is_further_than_c_from_every_mean_of_values_of_f(d_out: int) -> None:
    table, draw = random_function(2, 4, d_out=d_out, seed=8), torch.Generator().manual_seed(1)
    code, values = scalar_code(table, 2.5), torch.cat(table.values)
    weights = torch.rand(200, len(values), generator=draw, dtype=torch.float64)
    means = weights / weights.sum(1, keepdim=True) @ values
    assert float((torch.cat([values, means]) - code.far).norm(dim=-1).min()) >= 2.5 + 1


@pytest.mark.parametrize(("num_symbols", "longest"), [(2, 12), (3, 8), (4, 6), (7, 4)])
def test_the_suffixes_span_more_than_the_hull_of_all_codes_for_every_n_k_and_r(num_symbols: int, longest: int) -> None:
    m, weights = num_symbols, spanning_weights(num_symbols, longest)
    tightest = []
    for n in range(1, longest):
        for k in range(1, longest - n + 1):
            for r in range(n):
                j, all_codes = n + k, (m - 1) * sum(weights[: n + k])
                span = Fraction(all_codes - (m - 1) * sum(weights[:n]), r + k)
                margin = span - (all_codes + Fraction(4, 5)) / j
                assert margin >= (m - 1 - Fraction(4, 5)) / j > 0
                tightest.append((margin - (m - 1 - Fraction(4, 5)) / j, n, k, r))
    if m == 2:  # w_j = (j - 1)(W_{j-1} + 1): the margin is attained at k = 1, r = n - 1
        assert min(tightest)[0] == 0
        assert all(slack == 0 for slack, n, k, r in tightest if k == 1 and r == n - 1)


def test_the_certificate_states_that_argument_in_figures() -> None:
    code = scalar_code(parity(2, 4), 1.0)  # weights 1, 2, 8, 36
    found = span_certificate(code, 2, 1, 1)
    assert found.alpha == pytest.approx(3 / 2)
    assert found.delta == pytest.approx(1 / 4 * 8)
    assert found.span == pytest.approx(8 / 2)
    assert found.hull == pytest.approx(11.8 / 3)
    assert found.margin == pytest.approx(4 - 11.8 / 3)
    assert found.margin == pytest.approx(found.least_margin)
    codes = code.encode(torch.cat([torch.tensor([1, 0]).expand(2, -1), sequences(2, 1)], 1)).to(torch.float64)[:, None]
    assert found.delta == pytest.approx(hull_lemma_bound(codes, found.alpha))
    assert found.delta == pytest.approx(sharp_constant(codes, found.alpha))
    assert span_certificate(ScalarCode(parity(2, 4), base_weights(2, 4), 1.0), 2, 1, 1).margin < 0
    with pytest.raises(ValueError, match="a cache of 2 slots does not compress 2 tokens"):
        span_certificate(code, 2, 1, 2)


def test_masked_and_plain_attention_give_the_same_outputs() -> None:
    code = scalar_code(random_function(3, 3, seed=5), 1.0)
    plain, causal = code.network(), code.network().with_causal_mask()
    for j in range(1, 4):
        difference = plain(sequences(3, j)) - causal(sequences(3, j))
        assert float(difference.abs().max()) < code.rounding()
    policy = optimal_policy(code, lambda n: n - 1)
    worst = [compressibility(model, policy, lambda n: n - 1).error for model in (plain, causal)]
    assert worst[0] == pytest.approx(worst[1], abs=code.rounding(2.0 * code.largest(3)))


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
@pytest.mark.parametrize(("num_symbols", "longest"), [(2, 5), (3, 4)])
@pytest.mark.parametrize("constant", [0.0, 2.0])
def test_every_policy_errs_by_more_than_c_for_every_prefix(
    name: str, num_symbols: int, longest: int, constant: float
) -> None:
    table = FUNCTIONS[name](num_symbols, longest)
    report = scalar_report(table, constant, lambda n: n - 1)
    assert report.margin >= 1 - 1e-12
    assert report.approximation_error < report.rounding < 1e-8
    assert [row.prefix_len for row in report.rows] == list(range(1, longest))
    for row in report.rows:
        assert row.num_slots == row.prefix_len - 1
        assert row.hardest.error >= row.easiest.error == pytest.approx(constant + row.margin)
        assert all(span.margin > 0 for span in row.spans)


@pytest.mark.parametrize("budget", [lambda n: 0, lambda n: min(n, 1), lambda n: n - 1])
def test_even_a_function_that_never_changes_can_be_computed_incompressibly(budget: Callable[[int], int]) -> None:
    table = tabulate(lambda rows: torch.zeros(len(rows)), 2, 5)
    report = scalar_report(table, 2.0, budget)
    assert report.approximation_error < report.rounding
    for row in report.rows:
        assert row.easiest.error == row.hardest.error == pytest.approx(3.0)


def test_the_report_names_the_prefixes_that_an_exhaustive_look_finds() -> None:
    table = mean(2, 4)
    report = scalar_report(table, 2.0, lambda n: min(n, 1))
    two = next(row for row in report.rows if row.prefix_len == 2)
    assert [row.prefix_len for row in report.rows] == [2, 3]  # one slot does not compress one token
    assert (two.easiest.prefix, two.easiest.error) == ((1, 1), pytest.approx(3.25))
    assert (two.hardest.prefix, two.hardest.error) == ((0, 0), pytest.approx(3.75))
    assert [row.margin for row in report.rows] == pytest.approx([1.25, 1.0])
    assert report.margin == pytest.approx(1.0)
    assert report.weights == (1, 2, 8, 36)


@pytest.mark.parametrize("causal", [False, True])
def test_the_optimal_policy_run_through_the_network_errs_as_the_report_says(causal: bool) -> None:
    table = random_function(2, 5, d_out=2, seed=4)
    model = incompressible_scalar_network(table, constant=1.0).with_causal_mask(causal)
    report = scalar_report(table, 1.0, lambda n: n // 2)
    worst = compressibility(model, optimal_policy(scalar_code(table, 1.0), lambda n: n // 2), lambda n: n // 2)
    hardest = max((row.hardest for row in report.rows), key=lambda optimum: optimum.error)
    assert worst.error == pytest.approx(hardest.error, abs=1e-8)


def test_no_gradient_search_over_whole_caches_beats_the_optimum() -> None:
    code = scalar_code(mean(2, 4), 2.0)
    model, prefix = code.network(), torch.tensor([1, 1])
    suffixes = [sequences(2, k) for k in (1, 2)]
    whole = prefix_cache(model, prefix)
    found = []
    for seed in range(1, 4):
        draw = torch.Generator().manual_seed(seed)
        tensors = [
            (10.0**seed * 1e-2 * torch.randn(1, part.shape[1], generator=draw, dtype=torch.float64)).requires_grad_()
            for heads in whole
            for pair in heads
            for part in pair
        ]
        optimiser = torch.optim.Adam(tensors, lr=0.3)
        for _ in range(25):
            cache = tuple(((tensors[2 * i], tensors[2 * i + 1]),) for i in range(2))
            worst = torch.cat([suffix_error(model, cache, prefix, rows) for rows in suffixes]).max()
            found.append(float(worst.detach()))
            optimiser.zero_grad()
            worst.backward()
            optimiser.step()
    assert min(found) >= 3.25 - 1e-9
    assert min(found) < 4


def test_the_scalar_may_be_split_over_slots_and_everything_else_of_a_cache_is_ignored() -> None:
    code = scalar_code(random_function(2, 4, seed=2), 1.0)
    model, prefix = code.network(), torch.tensor([1, 0, 1])
    one = compress(scalar_policy(lambda _: 7.5, lambda _: 2), prefix_cache(model, prefix))
    draw = torch.Generator().manual_seed(0)

    def noise(part: torch.Tensor) -> torch.Tensor:
        return torch.randn(part.shape, generator=draw, dtype=torch.float64)

    other = [[[noise(keys), noise(values)] for keys, values in heads] for heads in one]
    other[1][0][1][:, 5] = torch.tensor([100.0, -92.5])
    split = tuple(tuple((keys, values) for keys, values in heads) for heads in other)
    torch.testing.assert_close(
        answer(model, one, 3, sequences(2, 1)), answer(model, split, 3, sequences(2, 1)), rtol=0, atol=1e-9
    )


@pytest.mark.parametrize("setting", [(2, 2, 1), (2, 3, 2), (3, 3, 2)])
def test_base_codes_with_f_at_every_reachable_sum_have_a_policy_that_never_errs(setting: tuple[int, int, int]) -> None:
    found = base_code_network(*setting, constant=2.0)
    assert approximation_error(found.network, found.code.table) < 1e-11
    assert found.optimum < 1e-13
    assert found.worst.error < 1e-11
    spanning = scalar_report(found.code.table, 2.0, lambda n: min(n, setting[2]))
    assert spanning.rows[-1].prefix_len == setting[1]
    assert spanning.rows[-1].easiest.error == pytest.approx(3.0)
    assert spanning.rows[-1].hardest.error == pytest.approx(3.0)


@pytest.mark.parametrize(("setting", "optimum"), [((2, 2, 1), 0.0), ((3, 3, 2), 0.0), ((2, 3, 2), 10 / 7)])
def test_with_the_far_value_between_codes_too_a_policy_must_land_on_codes(
    setting: tuple[int, int, int], optimum: float
) -> None:
    found = base_code_network(*setting, constant=2.0, isolated=True)
    assert found.optimum == pytest.approx(optimum, abs=1e-12)
    assert found.worst.error == pytest.approx(optimum, abs=1e-11)


def test_the_base_code_with_too_few_tokens_is_not_fooled() -> None:
    assert base_code_network(3, 2, 1, constant=2.0).optimum > 1


def test_mistakes_are_refused_with_the_offending_value() -> None:
    table = last_symbol(2, 3)
    with pytest.raises(ValueError, match=r"not negative, got -1\.0"):
        scalar_code(table, -1.0)
    with pytest.raises(ValueError, match="needs 3 positive weights"):
        ScalarCode(table, (1, 2), 1.0)
    with pytest.raises(ValueError, match="weight 3 of position 3 makes codes coincide"):
        ScalarCode(table, (1, 2, 3), 1.0)
    with pytest.raises(ValueError, match="for 2 tokens must lie in 0 to 2, got 3"):
        scalar_report(table, 1.0, lambda n: 3 if n == 2 else 0)
    with pytest.raises(ValueError, match="compresses no prefix of 1 to 2 tokens"):
        scalar_report(table, 1.0, lambda n: n)
    with pytest.raises(ValueError, match="too large for float64"):
        ScalarCode(table, (1, 2, 2**52), 1.0)
