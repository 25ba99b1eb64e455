"""Curves of the incompressible histogram's optimum: against the budget, and against N.

References: KV-CAT, appendix "Motivating example", the bound of Proposition 1 and the note behind its proof.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvcat.theory.compression import Budget
from kvcat.theory.histogram_optimum import (
    definition_optimum,
    joint_optimum,
    optimal_error,
    paper_bound,
    repeated_symbol,
    worst_suffix_len,
)


@dataclass(frozen=True)
class BudgetRow:
    """Optimum and bound at one number of slots, for prefixes of one length or (``prefix_len`` None asked) of all.

    ``optimum``: the definition's, over suffixes of all lengths; ``single_length``: the largest optimum at one suffix
    length, ``paper_bound`` its lower bound in the paper; the lengths are those the optimum and the bound are found at.
    ``optimum - paper_bound`` is the gap; it has two causes, the root that the bound replaces by 1/2 (up to
    ``single_length``) and the bound's looking at suffixes of one length alone.
    """

    num_symbols: int
    longest: int
    num_slots: int
    optimum: float
    single_length: float
    paper_bound: float
    optimum_prefix_len: int
    bound_prefix_len: int
    bound_suffix_len: int


def budget_curve(num_symbols: int, longest: int, *, prefix_len: int | None = None) -> list[BudgetRow]:
    """Optimum and bound for r = 1, ..., N - 1 slots, r(n) = min(r, n), or r = 1, ..., n at one prefix length.

    Args:
        num_symbols: m, at least 2.
        longest: N, at least 2.
        prefix_len: n, 1 to N - 1; None for all.

    Raises:
        ValueError: an argument outside its range.
    """
    if longest < 2:
        raise ValueError(f"a prefix and a suffix need N >= 2, got {longest}")
    if prefix_len is not None and not 1 <= prefix_len < longest:
        raise ValueError(f"the prefix must have 1 to {longest - 1} symbols, got {prefix_len}")
    lengths = range(1, longest) if prefix_len is None else (prefix_len,)
    return [_budget_row(num_symbols, longest, r, lengths) for r in range(1, max(lengths) + 1)]


def _budget_row(num_symbols: int, longest: int, num_slots: int, lengths: Sequence[int]) -> BudgetRow:
    best: dict[int, float] = {}
    bounds: dict[tuple[int, int], float] = {}
    for n in lengths:
        r = min(num_slots, n)
        best[n] = joint_optimum(repeated_symbol(num_symbols, n), longest - n, r).error
        k = worst_suffix_len(n, r, longest - n)
        bounds[n, k] = paper_bound(n, k, r)
    at = max(best, key=lambda n: best[n])
    n, k = max(bounds, key=lambda pair: bounds[pair])
    single = optimal_error(num_symbols, n, k, min(num_slots, n))
    return BudgetRow(num_symbols, longest, num_slots, best[at], single, bounds[n, k], at, n, k)


@dataclass(frozen=True)
class ScalingRow:
    """One N: the definition's optimum, and optimum and bound where the paper takes them, at n = N - 1, k = 1."""

    num_symbols: int
    longest: int
    definition_optimum: float
    definition_prefix_len: int
    last_optimum: float
    last_bound: float


def scaling_curve(num_symbols: int, lengths: Sequence[int], budget: Budget) -> list[ScalingRow]:
    """Optimum and bound against N.

    With r(n) = n - 1 the paper's choice n = N - 1, k = 1 gives 1 / (2 N (N - 1)), but the definition asks for every n:
    its optimum does not fall with N at all, short prefixes being the worst. A prefix of one symbol has no slot then.

    Args:
        num_symbols: m, at least 2.
        lengths: the values of N, each at least 2.
        budget: r(n), 0 <= r(n) <= n; at least 1 at n = N - 1.

    Raises:
        ValueError: an argument outside its range.
    """
    rows: list[ScalingRow] = []
    for longest in lengths:
        best, n = definition_optimum(num_symbols, longest, budget), longest - 1
        last = optimal_error(num_symbols, n, 1, budget(n))
        rows.append(ScalingRow(num_symbols, longest, best.error, best.prefix_len, last, paper_bound(n, 1, budget(n))))
    return rows
