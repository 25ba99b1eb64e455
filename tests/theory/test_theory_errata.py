"""Every erratum shows a failure, and the report of both histogram networks holds what the exact optimum says."""

import pytest

from kvcat.theory import histogram_report as room
from kvcat.theory.errata import errata
from kvcat.theory.histogram_optimum import definition_optimum
from kvcat.theory.histogram_report import histogram_report


def test_each_erratum_shows_the_known_numbers():
    shown = {erratum.place: erratum.shown for erratum in errata()}
    assert len(shown) == 9
    numbers = {
        "Theorem, item 2": "0 of 6 budgets",
        "Note behind Proposition 1": "(0.0038 at N = 12), which looks at n = N - 1; compressibility asks for every n, "
        "and there the optimum is 0.1414 for all N, at n = 2",
        "Proposition 1, W_V = W_O": "(0, 0, 0)",
        "Proposition 1, the bound": "0.1250 at m = 2, n = 3, k = r = 1, where the optimum is 0.1768",
        "Proposition 2, W_V and W_O = I": "block 1 holds (0.5, 0.25, 1.25)",
        "Proposition 2, the policy": "(0, 0.25, 0.25) instead of (0.5, 0.25, 0.25)",
        "Lemma 2, rho-bar": "26 of 30 sequences are sent to u_0, 30 with te(b_i, i)",
        "Lemma 2, the obvious repair": "n = 2, k = 1, one slot of value 0: error 0",
        "Hull lemma": "0.1768 for e_1, e_2, e_3 and alpha = 1.25, where 0.2041 is attained",
    }
    for place, number in numbers.items():
        assert number in shown[place]


@pytest.mark.parametrize(("num_symbols", "longest"), [(2, 5), (3, 4)])
def test_the_report_s_errors_are_the_exact_optimum_and_rounding(num_symbols, longest):
    report = histogram_report(num_symbols, longest)
    optimum = definition_optimum(num_symbols, longest, lambda _: 1).error
    assert report.optimum == optimum
    assert report.incompressible.behind_policy.error == pytest.approx(optimum, abs=1e-12)
    assert optimum - 1e-12 <= report.found <= 1.01 * optimum
    assert report.compressible.behind_policy.error < 1e-12
    assert report.incompressible.widths == report.compressible.widths
    for check in (report.incompressible, report.compressible):
        assert max(check.task_error, check.map_error) < 1e-12
        assert check.exhaustive
        assert check.num_pairs == sum((j - 1) * num_symbols**j for j in range(2, longest + 1))


def test_where_there_are_too_many_pairs_a_sample_with_repeated_symbols_finds_the_worst(monkeypatch):
    monkeypatch.setattr(room, "EXHAUSTIVE", 4000)
    report = histogram_report(2, 11, seed=3)
    assert not report.incompressible.exhaustive
    assert report.incompressible.num_pairs == 4000
    assert report.incompressible.behind_policy.error == pytest.approx(report.optimum, abs=1e-12)
    assert report.compressible.behind_policy.error < 1e-11
