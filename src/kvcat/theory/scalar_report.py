"""Construction H, measured: policies that act through a scalar, the best of them, and the repair that does not hold.

References: KV-CAT, appendix "Compressible Transformers for General Functions", Lemma 2 and its proof.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvcat.errors import InputError
from kvcat.theory.compression import Budget, Policy, WorstCase, compressibility
from kvcat.theory.definitions import Transformer, sequences
from kvcat.theory.functions import FunctionTable, tabulate
from kvcat.theory.scalar_code import ScalarCode, SpanCertificate, base_weights, scalar_code, span_certificate
from kvcat.theory.scanning import ScalarOptimum, optimal_scalar
from kvcat.types import Float, Tensor


def scalar_policy(choose: Callable[[Tensor], float], budget: Budget) -> Policy:
    """The policy that leaves r(n) slots, t in block 3 of the first of them and zeros elsewhere.

    Every policy acts on a :class:`ScalarCode`'s network as one of these: attention is uniform and W_O keeps block 3
    alone, so a cache acts through the sum of its slots' third blocks.

    Args:
        choose: t, from the codes w_i a_i of a prefix's tokens (block 1 of their values). Not asked when r(n) = 0.
        budget: r(n).
    """

    def first(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        num_slots = budget(keys.shape[0])
        return keys.new_zeros(num_slots, keys.shape[1]), values.new_zeros(num_slots, values.shape[1])

    def second(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        kept_keys, kept = first(keys, values)
        if len(kept):
            kept[0, values.shape[1] // 2] = choose(values[:, 0])
        return kept_keys, kept

    return first, second


def optimal_policy(code: ScalarCode, budget: Budget) -> Policy:
    """For every prefix the scalar of :func:`optimal_scalar`, over suffixes of all lengths: no policy does better.

    It reads the prefix off its values, as a policy must: the i-th holds w_i a_i.
    """

    def choose(codes: Float[Tensor, " n"]) -> float:
        prefix = (codes / torch.tensor(code.weights[: len(codes)])).round().to(torch.int64)
        return optimal_scalar(code, prefix, budget(len(codes))).scalar

    return scalar_policy(choose, budget)


@dataclass(frozen=True)
class PrefixLengthRow:
    """The exact optima over all policies and suffixes of every length, for prefixes of n tokens.

    ``easiest`` and ``hardest`` are the prefixes with the least and the largest optimum; ``margin`` is the least
    optimum less C: Lemma 2 says that it is positive for *every* prefix, and construction H that it is at least 1.
    ``spans`` explains it, for suffixes of 1, 2, ... tokens.
    """

    prefix_len: int
    num_slots: int
    easiest: ScalarOptimum
    hardest: ScalarOptimum
    margin: float
    spans: tuple[SpanCertificate, ...]


@dataclass(frozen=True)
class ScalarReport:
    """What construction H does for one f and C: how well it computes f, and how badly every policy does.

    ``approximation_error`` is the largest || M(a) - f(a) || over all sequences, ``rounding`` its bound;
    ``margin`` the least of the rows'.
    """

    weights: tuple[int, ...]
    constant: float
    approximation_error: float
    rounding: float
    rows: tuple[PrefixLengthRow, ...]
    margin: float


def approximation_error(model: Transformer, table: FunctionTable) -> float:
    """The largest || M(a) - f(a) || over every sequence a of 1 to N symbols."""
    return max(
        float(torch.linalg.vector_norm(model(sequences(table.num_symbols, j)) - rows, dim=-1).max())
        for j, rows in enumerate(table.values, 1)
    )


def scalar_report(table: FunctionTable, constant: float, budget: Budget) -> ScalarReport:
    """Construction H for f and C, with the exact optimum of every prefix of each length n that r(n) < n compresses.

    Args:
        table: f.
        constant: C >= 0.
        budget: r(n), 0 <= r(n) <= n, below n for one n of 1 to N - 1 at least.

    Raises:
        InputError: a budget outside that range, C negative, codes or scans too large for an exact answer.
    """
    code = scalar_code(table, constant)
    budgets = {n: budget(n) for n in range(1, table.longest)}
    for n, num_slots in budgets.items():
        if not 0 <= num_slots <= n:
            raise InputError(f"the budget for {n} tokens must lie in 0 to {n}, got {num_slots}")
    if all(num_slots == n for n, num_slots in budgets.items()):
        raise InputError(f"the budget compresses no prefix of 1 to {table.longest - 1} tokens")
    rows: list[PrefixLengthRow] = []
    for n, num_slots in budgets.items():
        if num_slots == n:
            continue
        optima = [optimal_scalar(code, prefix, num_slots) for prefix in sequences(table.num_symbols, n)]
        easiest, hardest = (choose(optima, key=lambda optimum: optimum.error) for choose in (min, max))
        spans = tuple(span_certificate(code, n, k, num_slots) for k in range(1, table.longest - n + 1))
        rows.append(PrefixLengthRow(n, num_slots, easiest, hardest, easiest.error - constant, spans))
    return ScalarReport(
        weights=code.weights,
        constant=constant,
        approximation_error=approximation_error(code.network(), table),
        rounding=code.rounding(),
        rows=tuple(rows),
        margin=min(row.margin for row in rows),
    )


@dataclass(frozen=True, eq=False)
class BaseCodeCounterexample:
    """A network that computes f with its u_0 in place, and a policy behind which it is still right.

    ``worst`` is the policy's largest error over all prefixes of n tokens and suffixes of one, through the network;
    ``optimum`` the exact one, over all policies.
    """

    code: ScalarCode
    network: Transformer
    policy: Policy
    prefix_len: int
    num_slots: int
    worst: WorstCase
    optimum: float


def base_code_network(
    num_symbols: int, prefix_len: int, num_slots: int, *, constant: float = 1.0, isolated: bool = False
) -> BaseCodeCounterexample:
    """The obvious repair of the printed Lemma 2, and that it fails: f at every code of every prefix, u_0 outside.

    Codes are numbers in base m, f is the last symbol as a number, N = n + 1. What a policy leaves out of the average
    stretches the code by (n + 1) / (r + 1), and where the hull of *all* codes is wide enough the stretched code is
    another sequence's with the same last symbol: the error is 0. For m = 2, n = 2, r = 1 a zero slot turns codes
    0 and 4 out of 8 into 0 and 6.

    Args:
        num_symbols: m >= 2.
        prefix_len: n >= 1.
        num_slots: r, 0 <= r <= n.
        constant: C, which sets u_0.
        isolated: u_0 also between any two codes; the policy must then land on a code.

    Raises:
        ValueError: m, n, r or C out of range.
    """
    table = tabulate(lambda rows: rows[:, -1], num_symbols, prefix_len + 1)
    code = ScalarCode(table, base_weights(num_symbols, prefix_len + 1), constant, isolated)
    prefixes = sequences(num_symbols, prefix_len)
    optima = [optimal_scalar(code, prefix, num_slots) for prefix in prefixes]
    network, policy = code.network(), optimal_policy(code, lambda _: num_slots)
    worst = compressibility(network, policy, lambda _: num_slots, prefixes=prefixes.tolist())
    return BaseCodeCounterexample(
        code, network, policy, prefix_len, num_slots, worst, max(optimum.error for optimum in optima)
    )
