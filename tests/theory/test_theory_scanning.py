"""The exact min-max over scalars: against rational arithmetic, bounded minimisation, grids and the network itself."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import fminbound
from torch import Tensor

from kvcat.theory import scanning
from kvcat.theory.compression import answer, compress, prefix_cache, suffix_error
from kvcat.theory.definitions import sequences
from kvcat.theory.functions import FUNCTIONS, FunctionTable, mean, random_function, tabulate
from kvcat.theory.scalar_code import ScalarCode, base_weights, scalar_code
from kvcat.theory.scalar_report import scalar_policy
from kvcat.theory.scanning import ScalarOptimum, minimise_maximum, optimal_scalar, suffix_errors


def last_number(num_symbols: int, longest: int) -> FunctionTable:
    return tabulate(lambda rows: rows[:, -1], num_symbols, longest)


def eighths(num_symbols: int, longest: int, seed: int) -> FunctionTable:
    """Values k / 8, which float64 and rational arithmetic share."""
    draw = torch.Generator().manual_seed(seed)
    return tabulate(lambda rows: torch.randint(-8, 9, (len(rows),), generator=draw) / 8, num_symbols, longest)


def rational_optimum(code: ScalarCode, prefix: Tensor, num_slots: int, suffix_lens: tuple[int, ...]) -> Fraction:
    """min_t max_b in rational arithmetic, for f of width 1: every bend, and every crossing of two lines between."""
    curves = []
    for k in suffix_lens:
        j = len(prefix) + k
        at, values = code.knots(j)
        knots = [(Fraction(int(x), 5 * j), Fraction(float(v))) for x, v in zip(at, values[:, 0], strict=True)]
        for suffix in sequences(code.table.num_symbols, k):
            offset = int(sum(code.weights[len(prefix) + i] * int(b) for i, b in enumerate(suffix)))
            wanted = Fraction(float(code.table(torch.cat([prefix, suffix]))))
            curves.append([((num_slots + k) * y - offset, v - wanted) for y, v in knots])

    def value(curve: list[tuple[Fraction, Fraction]], t: Fraction) -> Fraction:
        if t <= curve[0][0]:
            return curve[0][1]
        for (t_0, v_0), (t_1, v_1) in itertools.pairwise(curve):
            if t <= t_1:
                return v_0 + (v_1 - v_0) * (t - t_0) / (t_1 - t_0)
        return curve[-1][1]

    bends = sorted({t for curve in curves for t, _ in curve})
    best = min(max(abs(value(curve, t)) for curve in curves) for t in bends)
    for low, high in itertools.pairwise(bends):
        lines = {(sign * value(c, low), sign * value(c, high)) for c in curves for sign in (1, -1)}
        for (p_0, p_1), (q_0, q_1) in itertools.combinations(lines, 2):
            slope = (p_1 - p_0) - (q_1 - q_0)
            part = (q_0 - p_0) / slope if slope else Fraction(-1)
            if 0 < part < 1 and p_0 + part * (p_1 - p_0) < best:
                best = min(best, max(abs(value(curve, low + part * (high - low))) for curve in curves))
    return best


CODES = {
    "spanning": lambda f: scalar_code(f, 1.0),
    "base": lambda f: ScalarCode(f, base_weights(f.num_symbols, f.longest), 1.0),
    "isolated": lambda f: ScalarCode(f, base_weights(f.num_symbols, f.longest), 1.0, isolated=True),
}


@pytest.mark.parametrize("kind", sorted(CODES))
@pytest.mark.parametrize(("n", "r", "lens"), [(2, 1, (1, 2)), (2, 1, (2,)), (3, 2, (1,)), (3, 1, (1,))])
def test_the_optimum_is_that_of_rational_arithmetic(kind: str, n: int, r: int, lens: tuple[int, ...]) -> None:
    for seed in range(2):
        code = CODES[kind](eighths(2, 4, seed))
        prefix = sequences(2, n)[seed]
        found = optimal_scalar(code, prefix, r, lens)
        assert found.error == pytest.approx(float(rational_optimum(code, prefix, r, lens)), abs=1e-13)
        assert found.error > 0.03
        assert found.lower_bound == pytest.approx(found.error, abs=1e-13)


def test_the_repair_with_isolated_codes_has_the_optimum_of_rational_arithmetic() -> None:
    code = ScalarCode(last_number(2, 4), base_weights(2, 4), 2.0, isolated=True)
    assert rational_optimum(code, torch.tensor([0, 0, 0]), 2, (1,)) == Fraction(10, 7)


def test_the_optimum_need_not_lie_at_a_bend() -> None:
    found = []
    for seed in range(12):
        code = CODES["base"](random_function(2, 4, d_out=2, seed=seed))
        best = optimal_scalar(code, torch.tensor([0, 1]), 1, [1])
        assert best.lower_bound == pytest.approx(best.error, rel=1e-12)
        place = (best.scalar + code.encode(sequences(2, 1), start=2)) / 2 * 3 * 5  # fifths of a code
        found.append(float((place - place.round()).abs().min()))
    assert max(found) > 1e-3


@pytest.mark.parametrize("d_out", [1, 2])
@pytest.mark.parametrize("kind", ["base", "isolated"])
def test_no_bounded_minimisation_between_bends_does_better(d_out: int, kind: str) -> None:
    code = CODES[kind](random_function(2, 4, d_out=d_out, seed=7))
    prefix = torch.tensor([1, 0])
    curves = []
    for k in (1, 2):
        at, values = (part.numpy() for part in code.knots(2 + k))
        for suffix in sequences(2, k):
            offset = float(code.encode(suffix, start=2))
            wanted = code.table(torch.cat([prefix, suffix])).numpy()
            curves.append(((1 + k) * at / (5 * (2 + k)) - offset, values - wanted))

    def worst(t: float) -> float:
        return max(float(np.linalg.norm([np.interp(t, at, v) for v in values.T])) for at, values in curves)

    best = optimal_scalar(code, prefix, 1)
    bends = np.unique(np.concatenate([at for at, _ in curves]))
    values = [worst(t) for t in bends]
    least = min(values)
    for (low, at_low), (high, at_high) in itertools.pairwise(zip(bends, values, strict=True)):
        if high - low > 1e-9 and min(at_low, at_high) < best.error + 1:
            least = min(least, worst(float(np.asarray(fminbound(worst, low, high)))))
    assert best.error > 0.1
    assert least == pytest.approx(best.error, abs=1e-4)
    assert least >= best.error - 1e-12
    assert worst(best.scalar) == pytest.approx(best.error, abs=1e-12)
    assert float(suffix_errors(code, prefix, sequences(2, 2), best.scalar, 1).max()) <= best.error + 1e-12


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 7),
    width=st.integers(1, 3),
    kind=st.sampled_from(["free", "whole", "close"]),
)
def test_the_least_maximum_of_affine_norms_is_that_of_every_pair(seed: int, count: int, width: int, kind: str) -> None:
    draw = np.random.default_rng(seed)
    start, step = draw.normal(size=(2, count, width)) * 3
    if kind == "whole":
        start, step = start.round(), step.round()  # ties, parallel functions, zero steps
    if kind == "close":
        start, step = start[:1] + start * 1e-3, step[:1] + step * 1e-3
    place, value, bound = minimise_maximum(start, step)

    def worst(u: float) -> float:
        return float(np.linalg.norm(start + u * step, axis=1).max())

    candidates = [0.0, 1.0]
    for p, q in itertools.combinations_with_replacement(range(count), 2):
        square_p, square_q = (
            np.array([step[i] @ step[i], 2 * start[i] @ step[i], start[i] @ start[i]]) for i in (p, q)
        )
        polynomial = np.polyder(square_p) if p == q else square_p - square_q
        candidates += [float(u.real) for u in np.roots(polynomial) if abs(u.imag) < 1e-6 and 0 <= u.real <= 1]
    least = min(worst(u) for u in candidates)
    assert value == pytest.approx(worst(place), abs=1e-12)
    assert value == pytest.approx(least, abs=1e-9)
    assert bound == pytest.approx(value, abs=1e-10)
    assert 0 <= place <= 1
    assert min(worst(u) for u in np.linspace(0, 1, 101)) >= value - 1e-12


def network_error(code: ScalarCode, optimum: ScalarOptimum, suffix_lens: tuple[int, ...], scalar: float) -> float:
    prefix = torch.tensor(optimum.prefix)
    model = code.network()
    policy = scalar_policy(lambda _: scalar, lambda _: optimum.num_slots)
    cache = compress(policy, prefix_cache(model, prefix))
    return max(
        float(suffix_error(model, cache, prefix, sequences(code.table.num_symbols, k)).max()) for k in suffix_lens
    )


@pytest.mark.parametrize(("m", "longest", "n", "r"), [(2, 3, 2, 1), (2, 4, 3, 2), (3, 4, 3, 2)])
def test_for_the_last_token_base_codes_can_be_compressed_and_spanning_ones_cannot(
    m: int, longest: int, n: int, r: int
) -> None:
    table = last_number(m, longest)
    for prefix in sequences(m, n)[:: m + 1]:
        for code, error in [(ScalarCode(table, base_weights(m, longest), 2.0), 0.0), (scalar_code(table, 2.0), 3.0)]:
            best = optimal_scalar(code, prefix, r, [1])
            assert best.error == pytest.approx(error, abs=1e-12)
            assert network_error(code, best, (1,), best.scalar) == pytest.approx(error, abs=1e-10)


def test_for_the_mean_and_all_suffixes_at_once_the_least_optimum_is_three_and_a_quarter() -> None:
    code = scalar_code(mean(2, 4), 2.0)
    found = {best.prefix: best.error for best in (optimal_scalar(code, prefix, 1) for prefix in sequences(2, 2))}
    assert found == pytest.approx({(0, 0): 3.75, (0, 1): 3.5, (1, 0): 3.5, (1, 1): 3.25})


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
@pytest.mark.parametrize("kind", ["spanning", "base"])
def test_behind_the_scalar_found_the_network_errs_as_the_scan_says(name: str, kind: str) -> None:
    code = CODES[kind](FUNCTIONS[name](2, 5))
    rounding = code.rounding(3.0 * code.largest(5))
    for prefix, r in [(torch.tensor([0, 1, 1]), 2), (torch.tensor([1, 1]), 1), (torch.tensor([1, 0]), 0)]:
        for lens in [(2,), tuple(range(1, 6 - len(prefix)))]:
            best = optimal_scalar(code, prefix, r, lens)
            assert network_error(code, best, lens, best.scalar) == pytest.approx(best.error, abs=rounding)


def test_the_worst_suffixes_are_those_that_err_most_at_the_scalar_found() -> None:
    code = scalar_code(random_function(3, 4, seed=6), 1.0)
    prefix = torch.tensor([2, 1])
    best = optimal_scalar(code, prefix, 1)
    model = code.network()
    cache = compress(scalar_policy(lambda _: best.scalar, lambda _: 1), prefix_cache(model, prefix))
    errors = {}
    for k in (1, 2):
        rows = sequences(3, k)
        for row, error in zip(rows.tolist(), suffix_error(model, cache, prefix, rows).tolist(), strict=True):
            errors[tuple(row)] = error
    assert set(best.worst_suffixes) == {row for row, error in errors.items() if error > best.error - 1e-7}
    assert 0 < len(best.worst_suffixes) < len(errors)


@pytest.mark.parametrize("kind", ["spanning", "base"])
def test_no_grid_and_no_random_scalar_does_better_through_the_network(kind: str) -> None:
    code = CODES[kind](random_function(2, 4, seed=11))
    prefix, model = torch.tensor([0, 1]), code.network()
    best = optimal_scalar(code, prefix, 1)
    draw = torch.Generator().manual_seed(0)
    span = 3.0 * code.largest(4)
    near = best.scalar + torch.randn(1000, generator=draw, dtype=torch.float64)
    scalars = torch.cat([torch.linspace(-span, span, 3001, dtype=torch.float64), near])
    worst = torch.zeros(len(scalars), dtype=torch.float64)
    for k in (1, 2):
        for suffix in sequences(2, k):
            rows = torch.zeros(len(scalars), 10, dtype=torch.float64)
            rows[:, 2 + k] = 1
            rows[:, 5] = (scalars + code.encode(suffix, start=2)) / (1 + k)
            error = model.blocks[1].feed_forward(rows) - code.table(torch.cat([prefix, suffix]))
            worst = worst.maximum(error.norm(dim=-1))
    cache = compress(scalar_policy(lambda _: float(scalars[7]), lambda _: 1), prefix_cache(model, prefix))
    through_attention = max(float(suffix_error(model, cache, prefix, sequences(2, k)).max()) for k in (1, 2))
    assert float(worst[7]) == pytest.approx(through_attention, abs=1e-8)
    assert float(worst.min()) >= best.error - code.rounding(2 * span)


def test_a_cache_as_long_as_the_prefix_errs_nowhere_and_fewer_slots_never_help() -> None:
    code = scalar_code(random_function(2, 5, seed=1), 1.0)
    prefix = torch.tensor([1, 0, 1])
    whole = optimal_scalar(code, prefix, 3)
    assert whole.error < 1e-12
    assert whole.scalar == pytest.approx(float(code.encode(prefix)), abs=1e-9)
    joint, single = optimal_scalar(code, prefix, 2), [optimal_scalar(code, prefix, 2, [k]) for k in (1, 2)]
    assert joint.error >= max(best.error for best in single)


def test_without_slots_there_is_no_scalar_to_choose() -> None:
    code = scalar_code(random_function(2, 4, seed=2), 1.0)
    prefix, model = torch.tensor([1, 1]), code.network()
    found = optimal_scalar(code, prefix, 0)
    empty = tuple(tuple((keys[:0], values[:0]) for keys, values in heads) for heads in prefix_cache(model, prefix))
    errors = []
    for k in (1, 2):
        rows = sequences(2, k)
        whole = torch.cat([prefix.expand(len(rows), -1), rows], 1)
        errors.append(float((answer(model, empty, 2, rows) - code.table(whole)).norm(dim=-1).max()))
    assert found.scalar == 0
    assert found.error == pytest.approx(max(errors), abs=1e-9)


def test_a_scan_in_small_portions_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    code = CODES["base"](eighths(2, 4, 0))
    prefix = torch.tensor([0, 0, 0])
    at_once = optimal_scalar(code, prefix, 2)
    assert at_once.scalar not in code.knots(4)[0] * 3 / 20
    for portion in (1, 4, 10):
        monkeypatch.setattr(scanning, "PORTION", portion)
        assert optimal_scalar(code, prefix, 2) == at_once


def test_mistakes_are_refused_with_the_offending_value(monkeypatch: pytest.MonkeyPatch) -> None:
    code = scalar_code(mean(2, 4), 1.0)
    with pytest.raises(ValueError, match="has 0 to 2 slots, got 3"):
        optimal_scalar(code, torch.tensor([0, 1]), 3)
    with pytest.raises(ValueError, match="prefix of 2 and suffixes of \\(3,\\) tokens, together at most 4"):
        optimal_scalar(code, torch.tensor([0, 1]), 1, [3])
    with pytest.raises(ValueError, match="prefix of 4"):
        optimal_scalar(code, torch.tensor([0, 1, 1, 0]), 1)
    monkeypatch.setattr(scanning, "MAX_EVALUATIONS", 100)
    with pytest.raises(ValueError, match="more than 100 errors"):
        optimal_scalar(code, torch.tensor([0, 1]), 1)
