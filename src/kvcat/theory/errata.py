"""What of the paper's theory fails as printed, or holds and is loose, each shown by running it.

References: KV-CAT, appendix "Theory".
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from torch.nn.functional import one_hot, pad

from kvcat.theory.definitions import (
    Block,
    CompressedModel,
    FeedForward,
    Transformer,
    compressibility,
    keep_all,
    one_slot_policy,
    run_block,
    sequences,
)
from kvcat.theory.functions import FunctionTable, parity
from kvcat.theory.histogram import block_moves, compressible_histogram, histogram, incompressible_histogram
from kvcat.theory.hull import hull_lemma_bound, sharp_constant
from kvcat.theory.optimum import definition_optimum, optimal_error, paper_bound
from kvcat.theory.theorem import incompressible_network
from kvcat.types import Float, Int, Tensor


@dataclass(frozen=True)
class Erratum:
    """One statement: its place, what is printed, what running it shows, and what kvcat uses instead."""

    place: str
    printed: str
    shown: str
    instead: str


def errata() -> Iterator[Erratum]:
    """Every statement that fails as printed or is loose, demonstrated one by one."""
    num_budgets, num_printed, kept_error = vacuous_budgets(parity(2, 4))
    yield Erratum(
        "Theorem, item 2",
        "no (N, C, r)-compressibility for any budget with r(n) < n for all n",
        f"with one slot at least, {num_printed} of {num_budgets} budgets satisfy it at N = 4: a prefix of one token "
        f"has none to lose, and kept whole its error is {kept_error:g}",
        f"r(n) < n for one n < N ({num_budgets - 1} budgets), empty caches allowed",
    )
    last, whole = paper_bound(11, 1, 10), definition_optimum(2, 12, lambda n: max(1, n - 1))
    yield Erratum(
        "Note behind Proposition 1",
        "with r(n) = n - 1 the bound becomes weaker as N grows, as N^-2",
        f"true of the constant ({last:.4f} at N = 12), which looks at n = N - 1; compressibility asks for every n, and "
        f"there the optimum is {whole.error:.4f} for all N, at n = {whole.prefix_len}",
        "the optimum over all n, which does not fall with N",
    )
    tokens = torch.tensor([0, 0, 1, 2])
    yield Erratum(
        "Proposition 1, W_V = W_O",
        "the network computes the histogram",
        f"input 1123: {_row(nilpotent_output(tokens, 3))} (the matrix is nilpotent)",
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
        f"input 1123: {_row(unmoved_output(tokens, 3))}; with W_V transposed block 1 holds "
        f"{_row(doubled_blocks(tokens, 3)[:3])}, the residual counting twice",
        "W_V = E_11 + E_22 + E_13, W_O = E_33 + E_44",
    )
    computed = misplaced_counts(torch.tensor([0, 0]), torch.tensor([1, 2]), 3)
    yield Erratum(
        "Proposition 2, the policy",
        "the slot holds the counts in block 1",
        f"prefix 11, suffix 23: {_row(computed)} instead of {_row(histogram(tokens, 3))}",
        "the counts in block 3, where the average is read",
    )
    wrong, moved = (printed_incompressible(parity(2, 4), (0, 0), 2, shifted=shifted) for shifted in (True, False))
    yield Erratum(
        "Lemma 2, rho-bar",
        "the network approximates f",
        f"m = 2, N = 4, n = k = 2: {wrong.num_wrong} of {len(wrong.distances)} sequences are sent to u_0, "
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


def nilpotent_output(tokens: Int[Tensor, " n"], num_symbols: int, *, transposed: bool = False) -> Float[Tensor, " m"]:
    """Proposition 1 with W_V = W_O = ((0, 0), (I, 0)): the output is 0, not the histogram.

    The square of that matrix is 0, whether it multiplies rows from the right or (``transposed``)
    columns from the left.
    """
    moved = block_moves(2, num_symbols, (1, 2) if transposed else (2, 1))
    return _with_attention(incompressible_histogram(num_symbols, max(2, len(tokens))), moved, moved)(tokens)


def unmoved_output(tokens: Int[Tensor, " n"], num_symbols: int) -> Float[Tensor, " m"]:
    """Proposition 2 with the printed W_V, whose third block column is 0, and W_O = I: the output is 0."""
    return _printed_one_slot(num_symbols, max(2, len(tokens)), transposed=False)(tokens)


def doubled_blocks(tokens: Int[Tensor, " n"], num_symbols: int) -> Float[Tensor, " four_m"]:
    """Proposition 2 with W_V transposed and W_O = I: the last token's blocks (w, x, y, z) before the last map.

    Claimed are (e_a, p_n, hist, 0). Blocks 1 and 2 come through W_V and W_O and, once more, through
    the residual: (e_a + hist, p_n + mean of the p_i, hist, 0).
    """
    model = _printed_one_slot(num_symbols, max(2, len(tokens)), transposed=True)
    x, block = model.blocks[0].feed_forward(model.embed(tokens)), model.blocks[1]
    one = torch.eye(x.shape[1], dtype=torch.float64)
    zeros = torch.zeros(2 * x.shape[1], dtype=torch.float64)
    identity = FeedForward(torch.cat([one, -one], 1), zeros, torch.cat([one, -one]), zeros[: x.shape[1]])
    before = Block(block.heads, block.w_o, identity)
    return run_block(before, x, [(x @ head.w_k, x @ head.w_v) for head in block.heads], causal=False)[-1]


def misplaced_counts(prefix: Int[Tensor, " n"], suffix: Int[Tensor, " k"], num_symbols: int) -> Float[Tensor, " m"]:
    """Proposition 2 in the corrected network behind the printed slot, which holds the counts in block 1.

    The average is read in block 3, so the prefix is missing: S_b / (n + k), not (S_a + S_b) / (n + k).
    """
    model = compressible_histogram(num_symbols, len(prefix) + len(suffix))
    policy = one_slot_policy(block_moves(4, num_symbols, (1, 1)), block_moves(4, num_symbols, (2, 4)))
    return CompressedModel(model, policy, prefix)(suffix)


def _printed_one_slot(num_symbols: int, longest: int, *, transposed: bool) -> Transformer:
    printed = block_moves(4, num_symbols, (1, 1), (2, 2), (3, 1))
    identity = torch.eye(4 * num_symbols, dtype=torch.float64)
    model = compressible_histogram(num_symbols, longest)
    return _with_attention(model, printed.T.contiguous() if transposed else printed, identity)


def _with_attention(model: Transformer, w_v: Tensor, w_o: Tensor) -> Transformer:
    """The model with other W_V and W_O in its second block."""
    block = model.blocks[1]
    return replace(model, blocks=(model.blocks[0], replace(block, heads=(replace(block.heads[0], w_v=w_v),), w_o=w_o)))


@dataclass(frozen=True, eq=False)
class PrintedIncompressible:
    """What the printed rho-bar makes of every sequence of 1 to N symbols.

    Attributes:
        distances: of the sequences' sums of phi from the hull H, by length, then lexicographic.
        delta: the hull's margin; sequences beyond it are sent to u_0.
        errors: || u_0 - f(a) || of every sequence.
    """

    distances: Float[Tensor, " all_sequences"]
    delta: float
    errors: Float[Tensor, " all_sequences"]

    @property
    def num_wrong(self) -> int:
        """Number of sequences sent to u_0."""
        return int((self.distances >= self.delta).sum())


def printed_incompressible(
    table: FunctionTable, prefix: Sequence[int], suffix_len: int, *, constant: float = 1.0, shifted: bool = True
) -> PrintedIncompressible:
    """Lemma 2's printed network on every sequence, with phi the one-hot of (symbol, position).

    H = conv{sum_i phi(te(b_i, n + i)) : b in A^k} + sum_i phi(te(a_i, i)),
    delta = ((n + k)/(n - 1 + k) - 1) diam(H)/2; rho-bar is rho(j y) within delta/2 of H and
    u_0 = (max |f| + C + 1) e_1 beyond delta. Every sequence other than [a, b] lies beyond.

    Args:
        table: f.
        prefix: the lemma's a, n >= 1 symbols; n + k <= N.
        suffix_len: k >= 1.
        constant: C > 0.
        shifted: suffixes at positions n + 1 to n + k, as they run; False as printed, te(b_i, i).
    """
    n, k, m, longest = len(prefix), suffix_len, table.num_symbols, table.longest
    if n < 1 or k < 1 or n + k > longest:
        raise ValueError(f"the lemma needs n, k >= 1 and n + k <= N = {longest}, got n = {n}, k = {k}")
    corner = pad(one_hot(torch.tensor(list(prefix)), m).to(torch.float64), (0, 0, 0, longest - n))
    free = list(range(n, n + k) if shifted else range(k))
    distances = []
    for length in range(1, longest + 1):
        sums = one_hot(sequences(m, length), m).to(torch.float64)
        offsets = pad(sums, (0, 0, 0, longest - length)) - corner
        offsets[:, free] = offsets[:, free] - nearest_in_simplex(offsets[:, free])
        distances.append(torch.linalg.vector_norm(offsets.flatten(1), dim=-1))
    delta = ((n + k) / (n - 1 + k) - 1) * math.sqrt(2 * k) / 2  # k simplices of one-hots have diameter sqrt(2 k)
    values = torch.cat(table.values)
    u_0 = torch.zeros(table.d_out, dtype=torch.float64)
    u_0[0] = float(torch.linalg.vector_norm(values, dim=-1).max()) + constant + 1
    return PrintedIncompressible(torch.cat(distances), delta, torch.linalg.vector_norm(u_0 - values, dim=-1))


def nearest_in_simplex(points: Float[Tensor, "*batch m"]) -> Float[Tensor, "*batch m"]:
    """The point of {x >= 0, sum x = 1} nearest to each: relu(p - c), c such that it sums to 1."""
    ordered = points.sort(-1, descending=True).values
    thresholds = (ordered.cumsum(-1) - 1) / torch.arange(1, points.shape[-1] + 1)
    last = (ordered > thresholds).sum(-1, keepdim=True) - 1
    return torch.relu(points - thresholds.gather(-1, last))


def obvious_repair_error(num_symbols: int, prefix_len: int, num_slots: int) -> Fraction:
    """The exact worst error behind r slots of value 0, all prefixes of n tokens, all suffixes of one token.

    The network codes a sequence as S = sum_i a_i m^(i-1), reads t = S of n + 1 tokens from the average,
    and is piecewise linear through f at t = 0, 1, ..., m^(n+1) - 1 and u_0 outside; f is the last
    symbol. Behind the slots the suffix b has t = (n + 1)/(r + 1) b m^n. For m = 2, n = 2, r = 1 that is
    0 or 6, whose last symbols are right.

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
        errors.append(abs((1 - part) * (below // m**n) + part * ((below + 1) // m**n) - b))
    return max(errors)


def vacuous_budgets(table: FunctionTable, *, constant: float = 1.0) -> tuple[int, int, float]:
    """Number of budgets with 1 <= r(n) <= n for n = 1 to N - 1, number of those with r(n) < n for all n (none).

    And the largest error of the incompressible network behind a prefix of one token kept in its slot.
    """
    budgets = list(itertools.product(*(range(1, n + 1) for n in range(1, table.longest))))
    below = [budget for budget in budgets if all(r < n for n, r in enumerate(budget, 1))]
    ones = [(symbol,) for symbol in range(table.num_symbols)]
    network = incompressible_network(table, constant=constant)
    kept = compressibility(network, (keep_all, keep_all), lambda n: n, prefixes=ones)
    return len(budgets), len(below), kept.error
