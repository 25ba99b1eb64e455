"""What the main theorem's lemmas lose as printed, as counter-examples that one can run.

``ambiguous_inputs``: the last map of the compressible network needs its condition on the positions. The lemma asks for
|p_i| = |p_j|, which suffices where it is not zero; the histogram's proposition, with the same map, does not ask.
``printed_incompressible``: the last map of the incompressible network sends almost every sequence to u_0, so the
network does not approximate f. ``obvious_repair_error``: f on every sequence's code and u_0 outside their hull does
not help, as a policy can turn a code into another one with the same last symbol. ``vacuous_budgets``: r(n) < n says
nothing at n = 1 without an empty cache.

References: KV-CAT, appendix "Compressible Transformers for General Functions", the two lemmas.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from kvcat.theory.compression import KeysValues, compressibility, keep_all
from kvcat.theory.definitions import sequences
from kvcat.theory.detectors import incompressible_network
from kvcat.theory.functions import FunctionTable
from kvcat.types import Float, Tensor

Split = tuple[tuple[int, ...], tuple[int, ...]]
"""A prefix (empty for a whole sequence) and a suffix."""

Code = Callable[[int, int], Sequence[int]]
"""phi(te(a, i)) of symbol a = 0 to m - 1 at position i = 1 to N, in whole numbers."""


@dataclass(frozen=True)
class Conflict:
    """Two splits that give the last map the same input and ask it for different outputs."""

    first: Split
    second: Split
    first_output: tuple[float, ...]
    second_output: tuple[float, ...]


@dataclass(frozen=True)
class AmbiguousInputs:
    """How many inputs the map has to answer, how many of them in two ways at once, and one of these."""

    num_inputs: int
    num_ambiguous: int
    example: Conflict | None


def binary_code(symbol: int, position: int) -> tuple[int]:
    """Phi = a 2^(i-1): the sum of a sequence is its number, so one coordinate suffices for two symbols."""
    return (symbol * 2 ** (position - 1),)


def ambiguous_inputs(table: FunctionTable, positions: Sequence[Sequence[int]], code: Code) -> AmbiguousInputs:
    """The inputs on which the compressible lemma's rho-tilde is asked for two values, by exhaustive exact search.

    rho-tilde(w, x, y, z) = rho(j y) if z = 0, and rho((j - i + 1) y) if z = p_i/(k + 1), where x = p_j: a whole
    sequence of j symbols asks with z = 0 and y = S/j, a split into n and k with z = p_n/(k + 1) and y = S/(k + 1),
    S the sum of phi. No input is ambiguous if p_i is not 0 and, for every j, p_i/(j - i + 1) are distinct in i.

    Args:
        table: f, which says what is wanted.
        positions: p_1 to p_N, whole numbers, of one width.
        code: phi, whole numbers, of one width.

    Raises:
        ValueError: not N positions.
    """
    if len(positions) != table.longest:
        raise ValueError(f"sequences of 1 to {table.longest} symbols need as many positions, got {len(positions)}")
    wanted: dict[tuple[tuple[Fraction, ...], ...], dict[tuple[float, ...], Split]] = {}
    for j in range(1, table.longest + 1):
        for tokens in itertools.product(range(table.num_symbols), repeat=j):
            codes = [code(symbol, i) for i, symbol in enumerate(tokens, 1)]
            total = [sum(column) for column in zip(*codes, strict=True)]
            output = tuple(table(torch.tensor(tokens)).tolist())
            for n in range(j):
                slots = j if n == 0 else j - n + 1
                length = (0,) * len(positions[0]) if n == 0 else positions[n - 1]
                rows = (
                    _fractions(codes[-1], 1),
                    _fractions(positions[j - 1], 1),
                    _fractions(total, slots),
                    _fractions(length, slots),
                )
                wanted.setdefault(rows, {}).setdefault(output, (tokens[:n], tokens[n:]))
    ambiguous = [asked for asked in wanted.values() if len(asked) > 1]
    example = None
    if ambiguous:
        (first_output, first), (second_output, second) = list(ambiguous[0].items())[:2]
        example = Conflict(first, second, first_output, second_output)
    return AmbiguousInputs(len(wanted), len(ambiguous), example)


def _fractions(numbers: Sequence[int], denominator: int) -> tuple[Fraction, ...]:
    return tuple(Fraction(number, denominator) for number in numbers)


@dataclass(frozen=True)
class PrintedIncompressible:
    """What the incompressible lemma's rho-bar makes of all sequences.

    Attributes:
        num_sequences: number of sequences of 1 to N symbols.
        num_wrong: those sent to u_0, whose error then exceeds C.
        num_open: those between H_(delta/2) and H_delta, for which the lemma says nothing.
        delta: the hull's margin.
        nearest: the least distance of a wrong sequence from the hull, at least delta.
        smallest_error: the least || u_0 - f(a) || of a wrong sequence a.
    """

    num_sequences: int
    num_wrong: int
    num_open: int
    delta: float
    nearest: float
    smallest_error: float


def printed_incompressible(
    table: FunctionTable, prefix: Sequence[int], suffix_len: int, *, constant: float = 1.0, shifted: bool = True
) -> PrintedIncompressible:
    """The incompressible lemma's network on every sequence, with phi the one-hot of (symbol, position).

    H = conv{sum_i phi(te(b_i, n + i)) : b in A^k} + sum_i phi(te(a_i, i)), delta = ((n + k)/(n - 1 + k) - 1) diam(H)/2;
    rho-bar is rho(j y) within delta/2 of H and u_0 = (max |f| + C + 1) e_1 beyond delta. Every sequence other than
    [a, b] lies beyond: a prefix other than a, or a length other than n + k.

    Args:
        table: f, on sequences of 1 to N symbols.
        prefix: the lemma's a, of n >= 1 symbols.
        suffix_len: k >= 1, n + k <= N.
        constant: C > 0.
        shifted: put the suffixes at positions n + 1 to n + k, as they run; False as printed, te(b_i, i).

    Raises:
        ValueError: a prefix or suffix of no symbols, or n + k > N.
    """
    n, k, m = len(prefix), suffix_len, table.num_symbols
    if n < 1 or k < 1 or n + k > table.longest:
        raise ValueError(f"the lemma needs n, k >= 1 and n + k <= N = {table.longest}, got n = {n}, k = {k}")
    corner = torch.nn.functional.one_hot(torch.tensor(list(prefix)), m).to(torch.float64)
    corner = torch.nn.functional.pad(corner, (0, 0, 0, table.longest - n))
    free = range(n, n + k) if shifted else range(k)
    delta = ((n + k) / (n - 1 + k) - 1) * math.sqrt(2 * k) / 2  # k simplices of one-hots have diameter sqrt(2 k)
    values = torch.cat(table.values)
    away = float(torch.linalg.vector_norm(values, dim=-1).max()) + constant + 1
    u_0 = away * torch.eye(table.d_out, dtype=torch.float64)[0]
    distances = torch.cat([_distances(table, corner, free, j) for j in range(1, table.longest + 1)])
    wrong = distances >= delta
    errors = torch.linalg.vector_norm(u_0 - values, dim=-1)
    return PrintedIncompressible(
        num_sequences=len(values),
        num_wrong=int(wrong.sum()),
        num_open=int(((distances >= delta / 2) & ~wrong).sum()),
        delta=delta,
        nearest=float(distances[wrong].min()),
        smallest_error=float(errors[wrong].min()),
    )


def _distances(
    table: FunctionTable, corner: Float[Tensor, "positions symbols"], free: range, length: int
) -> Float[Tensor, " all_sequences"]:
    """Distances of every sequence's sum of one-hots from H, a product of simplices at the free positions + corner."""
    tokens = sequences(table.num_symbols, length)
    sums = torch.nn.functional.one_hot(tokens, table.num_symbols).to(torch.float64)
    offsets = torch.nn.functional.pad(sums, (0, 0, 0, table.longest - length)) - corner
    free_rows = list(free)
    offsets[:, free_rows] = offsets[:, free_rows] - nearest_in_simplex(offsets[:, free_rows])
    return torch.linalg.vector_norm(offsets.flatten(1), dim=-1)


def nearest_in_simplex(points: Float[Tensor, "*batch m"]) -> Float[Tensor, "*batch m"]:
    """The point of {x >= 0, sum x = 1} nearest to each: relu(p - c), c such that it sums to 1."""
    ordered = points.sort(-1, descending=True).values
    thresholds = (ordered.cumsum(-1) - 1) / torch.arange(1, points.shape[-1] + 1)
    last = (ordered > thresholds).sum(-1, keepdim=True) - 1
    return torch.relu(points - thresholds.gather(-1, last))


def obvious_repair_error(num_symbols: int, prefix_len: int, num_slots: int) -> Fraction:
    """The exact worst error behind r slots of value 0, all prefixes of n tokens, all suffixes of one token.

    The network codes a sequence as S = sum_i a_i m^(i-1), reads t = S of n + 1 tokens from the average, and is
    piecewise linear through f at t = 0, 1, ..., m^(n+1) - 1 and u_0 outside; f is the last symbol. Behind the slots
    the suffix b has t = (n + 1)/(r + 1) b m^n. For m = 2, n = 2, r = 1 that is 0 or 6, whose last symbols are right.

    Args:
        num_symbols: m >= 2.
        prefix_len: n >= 1.
        num_slots: r, 0 to n.

    Raises:
        ValueError: the slots turn a suffix into a code outside the hull, where this policy does err.
    """
    m, n, r = num_symbols, prefix_len, num_slots
    errors = []
    for b in range(m):
        t = Fraction(n + 1, r + 1) * b * m**n
        if t > m ** (n + 1) - 1:
            raise ValueError(f"{r} slots for {n} tokens take suffix {b} to {t}, outside the hull of {m}^{n + 1} codes")
        below, part = t // 1, t % 1
        read = (1 - part) * (below // m**n) + part * ((below + 1) // m**n)
        errors.append(abs(read - b))
    return max(errors)


@dataclass(frozen=True)
class VacuousBudgets:
    """What r(n) < n for all n asks of budgets, and what it comes to at n = 1.

    Attributes:
        num_budgets: number of functions r with 1 <= r(n) <= n at n = 1 to N - 1.
        num_printed: those with r(n) < n for all n: none, as r(1) < 1 leaves no slot.
        num_somewhere: those with r(n) < n at one n at least, which is what the theorem needs.
        num_with_empty: number of r with 0 <= r(n) < n for all n, if a cache may be empty.
        kept_error: the largest error of the incompressible network behind a prefix of one token kept in its one slot.
        empty_error: the least, over prefixes of one token, of the largest error behind the empty cache.
    """

    num_budgets: int
    num_printed: int
    num_somewhere: int
    num_with_empty: int
    kept_error: float
    empty_error: float


def vacuous_budgets(table: FunctionTable, *, constant: float = 1.0) -> VacuousBudgets:
    """The budgets counted one by one for prefixes of 1 to N - 1 tokens, and the network's errors at n = 1.

    Args:
        table: f, on sequences of 1 to N >= 2 symbols.
        constant: C > 0, which the error behind an empty cache exceeds.

    Raises:
        ValueError: N < 2, C not positive or not finite.
    """
    network = incompressible_network(table, constant=constant)
    lengths = range(1, table.longest)
    budgets = list(itertools.product(*(range(n + 1) for n in lengths)))
    with_a_slot = [slots for slots in budgets if min(slots) >= 1]
    ones = [(symbol,) for symbol in range(table.num_symbols)]

    def empty(keys: Tensor, values: Tensor) -> KeysValues:
        return keys[:0], values[:0]

    return VacuousBudgets(
        num_budgets=len(with_a_slot),
        num_printed=sum(_all_below(slots) for slots in with_a_slot),
        num_somewhere=sum(any(r < n for n, r in enumerate(slots, 1)) for slots in with_a_slot),
        num_with_empty=sum(_all_below(slots) for slots in budgets),
        kept_error=compressibility(network, (keep_all, keep_all), lambda n: n, prefixes=ones).error,
        empty_error=min(compressibility(network, (empty, empty), lambda _: 0, prefixes=[one]).error for one in ones),
    )


def _all_below(slots: Sequence[int]) -> bool:
    return all(r < n for n, r in enumerate(slots, 1))
