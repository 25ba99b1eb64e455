"""The exact optimum over every policy for the incompressible histogram, beside the paper's lower bound.

Behind a cache of r slots whose values have the sum s, a suffix b of k symbols gives an error of

    || s - (r + k) / (n + k) S_a + (n - r) / (n + k) S_b || / (r + k),

S_a and S_b being the counts of prefix and suffix. It is convex in S_b, so suffixes of one symbol repeated are the
worst of their length, and the best s is the centre of an enclosing ball of m points for every k, with weight
1 / (r + k). It is convex in (s, S_a) together, so its minimum over s is convex in S_a: among prefixes of one length
those of one symbol repeated are the worst, and by symmetry all equally.

References: KV-CAT, Proposition "hist_non_compressible" and its proof in appendix "Motivating example".
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvcat.theory.compression import Budget, KeysValues, Policy
from kvcat.theory.enclosing import enclosing_ball
from kvcat.types import Float, Int, Tensor


def optimal_error(num_symbols: int, prefix_len: int, suffix_len: int, num_slots: int) -> float:
    """The least worst-case error at one suffix length, k (n - r) / ((n + k)(r + k)) sqrt(1 - 1/m), for every prefix.

    Args:
        num_symbols: m, at least 2.
        prefix_len: n, at least 1.
        suffix_len: k, at least 1.
        num_slots: r, 1 to n (an empty cache has no sum to choose: ``empty_cache_error``).

    Raises:
        ValueError: an argument outside its range.
    """
    _check(num_symbols, prefix_len, suffix_len, num_slots, least_slots=1)
    return 2 * paper_bound(prefix_len, suffix_len, num_slots) * (1 - 1 / num_symbols) ** 0.5


def optimal_sum(counts: Int[Tensor, " m"], suffix_len: int, num_slots: int) -> Float[Tensor, " m"]:
    """The sum of values that attains ``optimal_error``: (r + k) / (n + k) S_a - (n - r) k / ((n + k) m) 1."""
    n, m = int(counts.sum()), counts.shape[0]
    _check(m, n, suffix_len, num_slots, least_slots=1)
    return ((num_slots + suffix_len) * counts.double() - (n - num_slots) * suffix_len / m) / (n + suffix_len)


def empty_cache_error(counts: Int[Tensor, " m"], suffix_len: int) -> float:
    """The worst-case error without any slot: n / (n + k) max_i || e_i - S_a / n ||."""
    n, m = int(counts.sum()), counts.shape[0]
    _check(m, n, suffix_len, 0, least_slots=0)
    distances = (torch.eye(m, dtype=torch.float64) - counts.double() / n).norm(dim=1)
    return float(distances.max()) * n / (n + suffix_len)


def paper_bound(prefix_len: int, suffix_len: int, num_slots: int) -> float:
    """The paper's lower bound k (n - r) / (2 (n + k)(r + k)), for every number of symbols."""
    _check(2, prefix_len, suffix_len, num_slots, least_slots=0)
    n, k, r = prefix_len, suffix_len, num_slots
    return k * (n - r) / (2 * (n + k) * (r + k))


def worst_suffix_len(prefix_len: int, num_slots: int, longest_suffix: int) -> int:
    """The k <= K at which ``optimal_error`` and the paper's bound are largest, a neighbour of sqrt(n r) or K itself.

    Over real k the maximum of k (n - r) / ((n + k)(r + k)) is (sqrt n - sqrt r) / (sqrt n + sqrt r), at sqrt(n r).
    """
    _check(2, prefix_len, longest_suffix, num_slots, least_slots=0)
    near = int((prefix_len * num_slots) ** 0.5)
    candidates = {min(max(k, 1), longest_suffix) for k in (near, near + 1)}
    return max(sorted(candidates), key=lambda k: paper_bound(prefix_len, k, num_slots))


@dataclass(frozen=True, eq=False)
class JointOptimum:
    """The least worst-case error over suffixes of every length up to K, and what attains it.

    ``sum`` is s (zeros for an empty cache); ``suffix_lens`` the lengths at which no policy does better: those of the
    suffixes with a multiplier in the proof that ``error`` is least, which holds to ``gap`` relative to it.
    """

    error: float
    gap: float
    sum: Float[Tensor, " m"]
    suffix_lens: tuple[int, ...]


def joint_optimum(counts: Int[Tensor, " m"], longest_suffix: int, num_slots: int) -> JointOptimum:
    """The optimum of the definition for one prefix: one cache, every suffix of 1 to K symbols.

    Args:
        counts: S_a, the counts of the prefix.
        longest_suffix: K, at least 1; N - n in the definition.
        num_slots: r, 0 to n.

    Raises:
        ValueError: an argument outside its range.
    """
    n, m = int(counts.sum()), counts.shape[0]
    _check(m, n, longest_suffix, num_slots, least_slots=0)
    if num_slots == 0:
        errors = [empty_cache_error(counts, k) for k in range(1, longest_suffix + 1)]
        worst = max(range(longest_suffix), key=lambda at: errors[at])
        return JointOptimum(errors[worst], 0.0, torch.zeros(m, dtype=torch.float64), (worst + 1,))
    k = torch.arange(1, longest_suffix + 1, dtype=torch.float64)[:, None, None]
    repeated = k * torch.eye(m, dtype=torch.float64)
    points = ((num_slots + k) * counts.double() - (n - num_slots) * repeated) / (n + k)
    weights = (1 / (num_slots + k)).expand(-1, m, 1)
    ball = enclosing_ball(points.reshape(-1, m), weights.reshape(-1))
    touched = ball.multipliers.reshape(longest_suffix, m).sum(1).nonzero().flatten() + 1
    return JointOptimum(ball.radius, ball.gap, ball.center, tuple(touched.tolist()))


@dataclass(frozen=True)
class DefinitionOptimum:
    """The least epsilon (errors <= epsilon) for a budget over all prefixes and suffixes, and the worst prefix length.

    ``suffix_lens`` are the lengths at which no policy does better there.
    """

    error: float
    prefix_len: int
    suffix_lens: tuple[int, ...]


def definition_optimum(num_symbols: int, longest: int, budget: Budget) -> DefinitionOptimum:
    """The least epsilon for which any policy of this budget shows (N, epsilon, r)-compressibility.

    The largest ``joint_optimum`` over n = 1, ..., N - 1 at prefixes of one symbol repeated, the worst of their length.

    Args:
        num_symbols: m, at least 2.
        longest: N, at least 2.
        budget: r(n), 0 <= r(n) <= n.

    Raises:
        ValueError: an argument outside its range.
    """
    if longest < 2:
        raise ValueError(f"a prefix and a suffix need N >= 2, got {longest}")
    found: list[DefinitionOptimum] = []
    for n in range(1, longest):
        best = joint_optimum(repeated_symbol(num_symbols, n), longest - n, budget(n))
        found.append(DefinitionOptimum(best.error, n, best.suffix_lens))
    return max(found, key=lambda one: one.error)


def repeated_symbol(num_symbols: int, prefix_len: int) -> Int[Tensor, " m"]:
    """The counts n e_1 of a prefix of one symbol repeated."""
    counts = torch.zeros(num_symbols, dtype=torch.int64)
    counts[0] = prefix_len
    return counts


def optimal_policy(num_symbols: int, longest: int, budget: Budget) -> Policy:
    """The policy that attains ``joint_optimum`` at every prefix: s in one slot, r(n) - 1 slots of value 0, keys 0.

    (A cache of one entry with value s would not do: the slots count in the softmax. Any split of s among them does.)

    Args:
        num_symbols: m, at least 2.
        longest: N; the suffixes behind a prefix of n symbols have 1 to N - n.
        budget: r(n), 0 <= r(n) <= n.
    """
    m = num_symbols

    def nothing(keys: Tensor, values: Tensor) -> KeysValues:
        num_slots = budget(keys.shape[0])
        return torch.zeros_like(keys[:num_slots]), torch.zeros_like(values[:num_slots])

    def best_sum(keys: Tensor, values: Tensor) -> KeysValues:
        keys, slots = nothing(keys, values)
        first = values.shape[1] // m // 2 * m  # y is the second of two blocks, the third of four
        counts = values[:, first : first + m].sum(0).round().to(torch.int64)
        if slots.shape[0]:
            slots[0, first : first + m] = joint_optimum(counts, longest - len(values), slots.shape[0]).sum
        return keys, slots

    return nothing, best_sum


def fitted_exponent(lengths: Sequence[int], errors: Sequence[float]) -> float:
    """The exponent p of errors ~ lengths^p: least squares through the logarithms.

    Raises:
        ValueError: fewer than two lengths, or a value that has no logarithm.
    """
    if len(lengths) < 2 or len(lengths) != len(errors) or min(errors) <= 0 or min(lengths) <= 0:
        raise ValueError(f"an exponent needs positive values at 2 lengths at least, got {list(errors)}")
    x, y = (torch.tensor(values, dtype=torch.float64).log() for values in (lengths, errors))
    x = x - x.mean()
    return float((x * y).sum() / (x * x).sum())


def _check(num_symbols: int, prefix_len: int, suffix_len: int, num_slots: int, *, least_slots: int) -> None:
    if num_symbols < 2:
        raise ValueError(f"a histogram needs at least 2 symbols, got {num_symbols}")
    if prefix_len < 1 or suffix_len < 1:
        raise ValueError(f"prefix and suffix need at least one symbol, got lengths {prefix_len} and {suffix_len}")
    if not least_slots <= num_slots <= prefix_len:
        raise ValueError(f"the slots must number {least_slots} to {prefix_len}, got {num_slots}")
