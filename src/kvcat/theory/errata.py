"""What of the paper's theory fails as printed, or holds and is loose, each shown by running it.

References: KV-CAT, appendix "Theory".
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvcat.theory.functions import parity
from kvcat.theory.histogram_optimum import definition_optimum, optimal_error, paper_bound
from kvcat.theory.hull import hull_lemma_bound, sharp_constant
from kvcat.theory.printed_histogram import doubled_blocks, misplaced_counts, nilpotent_output, unmoved_output
from kvcat.theory.printed_lemmas import obvious_repair_error, printed_incompressible, vacuous_budgets
from kvcat.types import Tensor


@dataclass(frozen=True)
class Erratum:
    """One statement: its place, what is printed, what running it shows, and what stands in its place here."""

    place: str
    printed: str
    shown: str
    instead: str


def errata() -> Iterator[Erratum]:
    """Every statement that fails as printed or is loose, demonstrated one by one."""
    yield from _definitions()
    yield from _histogram()
    yield from _lemmas()


def _definitions() -> Iterator[Erratum]:
    budgets = vacuous_budgets(parity(2, 4))
    yield Erratum(
        "Theorem, item 2",
        "no (N, C, r)-compressibility for any budget with r(n) < n for all n",
        f"with one slot at least, {budgets.num_printed} of {budgets.num_budgets} budgets satisfy it at N = 4: a prefix "
        f"of one token has none to lose, and kept whole its error is {budgets.kept_error:g}",
        f"r(n) < n for one n < N ({budgets.num_somewhere} budgets), empty caches allowed",
    )
    last, whole = paper_bound(11, 1, 10), definition_optimum(2, 12, lambda n: max(1, n - 1))
    yield Erratum(
        "Note behind Proposition 1",
        "with r(n) = n - 1 the bound becomes weaker as N grows, as N^-2",
        f"true of the constant ({last:.4f} at N = 12), which looks at n = N - 1; compressibility asks for every n, and "
        f"there the optimum is {whole.error:.4f} for all N, at n = {whole.prefix_len}",
        "the optimum over all n, which does not fall with N",
    )


def _histogram() -> Iterator[Erratum]:
    tokens = torch.tensor([0, 0, 1, 2])
    yield Erratum(
        "Proposition 1, W_V = W_O",
        "the network computes the histogram",
        f"input 1123: {_row(nilpotent_output(tokens, 3).computed)} (the matrix is nilpotent)",
        "W_V = E_12, W_O = I",
    )
    yield Erratum(
        "Proposition 1, the bound",
        "k (n - r) / (2 (n + k)(r + k))",
        f"holds, but is loose: {paper_bound(3, 1, 1):.4f} at m = 2, n = 3, k = r = 1, where the optimum is "
        f"{optimal_error(2, 3, 1, 1):.4f}",
        "k (n - r) / ((n + k)(r + k)) sqrt(1 - 1/m) for r >= 1, the exact optimum at one k",
    )
    yield Erratum(
        "Proposition 2, W_V and W_O = I",
        "the third block holds the histogram",
        f"input 1123: {_row(unmoved_output(tokens, 3).computed)}; with W_V transposed block 1 holds "
        f"{_row(doubled_blocks(tokens, 3).computed[:3])}, the residual counting twice",
        "W_V = E_11 + E_22 + E_13, W_O = E_33 + E_44",
    )
    slot = misplaced_counts(torch.tensor([0, 0]), torch.tensor([1, 2]), 3)
    yield Erratum(
        "Proposition 2, the policy",
        "the slot holds the counts in block 1",
        f"prefix 11, suffix 23: {_row(slot.computed)} instead of {_row(slot.claimed)}",
        "the counts in block 3, where the average is read",
    )


def _lemmas() -> Iterator[Erratum]:
    wrong = printed_incompressible(parity(2, 4), (0, 0), 2)
    moved = printed_incompressible(parity(2, 4), (0, 0), 2, shifted=False)
    yield Erratum(
        "Lemma 2, rho-bar",
        "the network approximates f",
        f"m = 2, N = 4, n = k = 2: {wrong.num_wrong} of {wrong.num_sequences} sequences are sent to u_0, "
        f"{moved.num_wrong} with te(b_i, i) as printed",
        "Construction D",
    )
    yield Erratum(
        "Lemma 2, the obvious repair",
        "f at every code that a sequence has, u_0 outside",
        f"base-2 codes, f = last, n = 2, k = 1, one slot of value 0: error {obvious_repair_error(2, 2, 1)}",
        "Construction D",
    )
    corners = torch.eye(3, dtype=torch.float64)
    yield Erratum(
        "Hull lemma",
        "(alpha - 1) / 2 times the diameter",
        f"holds, but is loose: {hull_lemma_bound(corners, 1.25):.4f} for e_1, e_2, e_3 and alpha = 1.25, where "
        f"{sharp_constant(corners, 1.25):.4f} is attained",
        "(alpha - 1) times the circumradius, the best constant",
    )


def _row(values: Tensor) -> str:
    return "(" + ", ".join(f"{value:.4g}" for value in values.round(decimals=12).tolist()) + ")"
