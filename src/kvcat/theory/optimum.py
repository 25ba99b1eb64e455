"""The exact optimum over every policy for the incompressible histogram, beside the paper's lower bound.

Behind r slots whose values have the sum s, a suffix b of k symbols gives an error of

    || s - (r + k) / (n + k) S_a + (n - r) / (n + k) S_b || / (r + k),

where S_a and S_b are the counts of prefix and suffix. It is convex in S_b, so suffixes of one
repeated symbol are the worst of their length, and the best s is the centre of an enclosing ball of
m points for every k, with weight 1 / (r + k). It is convex in (s, S_a) together, so its minimum
over s is convex in S_a: prefixes of one repeated symbol are the worst of their length.

Arguments throughout: ``num_symbols`` m >= 2, ``longest`` N >= 2, ``prefix_len`` n >= 1,
``suffix_len`` k >= 1, ``num_slots`` r and ``budget`` r(n), 0 to n. Others raise ValueError.

References: KV-CAT, Proposition "hist_non_compressible", its proof in appendix "Motivating example".
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import torch

from kvcat.theory.definitions import Budget, KeysValues, Policy
from kvcat.theory.hull import enclosing_ball
from kvcat.types import Float, Int, Tensor


def paper_bound(prefix_len: int, suffix_len: int, num_slots: int) -> float:
    """The paper's lower bound k (n - r) / (2 (n + k)(r + k)), for every number of symbols."""
    n, k, r = prefix_len, suffix_len, num_slots
    if n < 1 or k < 1:
        raise ValueError(f"prefix and suffix need at least one symbol, got lengths {n} and {k}")
    if not 0 <= r <= n:
        raise ValueError(f"the number of slots must lie in 0 to {n}, got {r}")
    return k * (n - r) / (2 * (n + k) * (r + k))


def optimal_error(num_symbols: int, prefix_len: int, suffix_len: int, num_slots: int) -> float:
    """The least worst-case error at one suffix length, the same for every prefix of n symbols.

    k (n - r) / ((n + k)(r + k)) sqrt(1 - 1/m), r >= 1 (for r = 0 there is no sum to choose).
    """
    if num_symbols < 2 or num_slots < 1:
        raise ValueError(f"the optimum needs 2 symbols and 1 slot at least, got {num_symbols} and {num_slots}")
    return 2 * paper_bound(prefix_len, suffix_len, num_slots) * (1 - 1 / num_symbols) ** 0.5


@dataclass(frozen=True, eq=False)
class JointOptimum:
    """The least worst-case error for prefixes of n symbols over suffixes of 1 to K symbols.

    ``gap`` is by how much ``error`` may exceed the true optimum; ``sum`` is the s that attains it,
    zero for an empty cache.
    """

    prefix_len: int
    error: float
    gap: float
    sum: Float[Tensor, " m"]


def joint_optimum(counts: Int[Tensor, " m"], longest_suffix: int, num_slots: int) -> JointOptimum:
    """The optimum of the definition for one prefix: one cache, every suffix of 1 to K symbols.

    Args:
        counts: S_a, the counts of the prefix.
        longest_suffix: K, at least 1; N - n in the definition.
        num_slots: r, 0 to n.
    """
    n, m = int(counts.sum()), counts.shape[0]
    if m < 2:
        raise ValueError(f"a histogram needs at least 2 symbols, got {m}")
    paper_bound(n, longest_suffix, num_slots)  # checks its arguments
    if num_slots == 0:  # n / (n + k) max_i || e_i - S_a / n ||, largest at k = 1
        distances = (torch.eye(m, dtype=torch.float64) - counts.double() / n).norm(dim=1)
        return JointOptimum(n, float(distances.max()) * n / (n + 1), 0.0, torch.zeros(m, dtype=torch.float64))
    k = torch.arange(1, longest_suffix + 1, dtype=torch.float64)[:, None, None]
    repeated = k * torch.eye(m, dtype=torch.float64)
    points = ((num_slots + k) * counts.double() - (n - num_slots) * repeated) / (n + k)
    weights = (1 / (num_slots + k)).expand(-1, m, 1)
    ball = enclosing_ball(points.reshape(-1, m), weights.reshape(-1))
    return JointOptimum(n, ball.radius, ball.radius - ball.lower_bound, ball.center)


def definition_optimum(num_symbols: int, longest: int, budget: Budget) -> JointOptimum:
    """The least epsilon for which any policy of this budget shows (N, epsilon, r)-compressibility.

    The largest ``joint_optimum`` over n = 1, ..., N - 1 at prefixes of one repeated symbol.
    """
    if longest < 2:
        raise ValueError(f"a prefix and a suffix need N >= 2, got {longest}")
    counts = {n: torch.tensor([n] + [0] * (num_symbols - 1)) for n in range(1, longest)}
    found = (joint_optimum(row, longest - n, budget(n)) for n, row in counts.items())
    return max(found, key=lambda one: one.error)


def optimal_policy(num_symbols: int, longest: int, budget: Budget) -> Policy:
    """The policy that attains ``joint_optimum``: s in one slot, r(n) - 1 slots of value 0, keys 0.

    (One slot with value s would not do: all r slots count in the softmax. Any split of s does.)
    """
    m = num_symbols

    def nothing(keys: Tensor, values: Tensor) -> KeysValues:
        num_slots = budget(keys.shape[0])
        return 0 * keys[:num_slots], 0 * values[:num_slots]

    def best_sum(keys: Tensor, values: Tensor) -> KeysValues:
        keys, slots = nothing(keys, values)
        first = values.shape[1] // m // 2 * m  # y is the second of two blocks, the third of four
        counts = values[:, first : first + m].sum(0).round().to(torch.int64)
        if slots.shape[0]:
            slots[0, first : first + m] = joint_optimum(counts, longest - len(values), slots.shape[0]).sum
        return keys, slots

    return nothing, best_sum


def budget_curve(num_symbols: int, longest: int) -> pd.DataFrame:
    """Optimum and bound for r = 1, ..., N - 1 slots, r(n) = min(r, n).

    ``optimum`` is the definition's, over suffixes of all lengths; ``paper_bound`` the paper's at the
    n and k where it is largest; ``single_length`` the exact optimum at these n and k.
    """
    rows = []
    for r in range(1, longest):
        best = definition_optimum(num_symbols, longest, lambda n, r=r: min(n, r))
        pairs = [(n, k) for n in range(1, longest) for k in range(1, longest - n + 1)]
        n, k = max(pairs, key=lambda pair: paper_bound(*pair, min(r, pair[0])))
        single = optimal_error(num_symbols, n, k, min(r, n))
        rows.append((r, best.error, single, paper_bound(n, k, min(r, n)), best.prefix_len, n, k))
    names = "num_slots optimum single_length paper_bound optimum_prefix_len bound_prefix_len bound_suffix_len"
    return pd.DataFrame(rows, columns=names.split())


def scaling_curve(num_symbols: int, lengths: Sequence[int], budget: Budget) -> pd.DataFrame:
    """Optimum and bound against N, ``last`` at the paper's choice n = N - 1, k = 1."""
    rows = []
    for longest in lengths:
        best, n = definition_optimum(num_symbols, longest, budget), longest - 1
        last = optimal_error(num_symbols, n, 1, budget(n)), paper_bound(n, 1, budget(n))
        rows.append((longest, best.error, best.prefix_len, *last))
    names = "longest definition_optimum definition_prefix_len last_optimum last_bound"
    return pd.DataFrame(rows, columns=names.split())
