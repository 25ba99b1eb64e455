"""Every erratum shows a failure, counted against an independent recomputation."""

import itertools

import pytest

from kvcat.theory import errata as e


def test_each_erratum_shows_the_known_numbers():
    shown = {erratum.place: erratum.shown for erratum in e.find_errata()}
    assert len(shown) == 8
    numbers = {
        "Theorem, item 2": "0 of 6 budgets",
        "Note after Proposition 1": (
            "(0.0038 at N = 12), which looks at n = N - 1; compressibility asks for every n, "
            "and there the optimum is 0.1414 for all N, at n = 2"
        ),
        "Proposition 1, W_V = W_O": "(0, 0, 0)",
        "Proposition 1, the bound": (
            "0.1250 at m = 2, n = 3, k = r = 1, where the optimum is 0.1768"
        ),
        "Proposition 2, W_V and W_O = I": "block 1 holds (0.5, 0.25, 1.25)",
        "Proposition 2, the policy": "(0, 0.25, 0.25) instead of (0.5, 0.25, 0.25)",
        "Lemma 2, rho-bar": "26 of 30 sequences are sent to u_0, 30 with te(b_i, i)",
        "Hull lemma": "0.1768 for e_1, e_2, e_3 and alpha = 1.25, where 0.2041 is attained",
    }
    for place, number in numbers.items():
        assert number in shown[place]


@pytest.mark.parametrize(
    ("m", "N", "n", "k", "wrong", "total"), [(2, 5, 3, 2, 58, 62), (3, 4, 2, 2, 111, 120)]
)
def test_the_printed_rho_bar_is_wrong_on_almost_every_sequence_for_every_prefix(
    m, N, n, k, wrong, total
):
    for prefix in itertools.product(range(m), repeat=n):
        shifted = e.printed_incompressible(m, N, prefix, k)
        assert (shifted.num_wrong, len(shifted.distances)) == (wrong, total)
        beyond = shifted.distances >= shifted.delta
        assert float(shifted.distances[~beyond].max()) < shifted.delta / 2
        printed = e.printed_incompressible(m, N, prefix, k, shifted=False)
        assert printed.num_wrong == total
