"""What of the paper's theory fails as printed, or holds and is loose, each shown by running it.

References: KV-CAT, appendix "Theory".
"""

import itertools
import math
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.nn.functional import one_hot, pad

from kvcat.theory import definitions as d
from kvcat.theory.histogram import block_moves, compressible_histogram, histogram, incompressible_histogram
from kvcat.theory.optimum import definition_optimum, hull_lemma_bound, optimal_error, paper_bound, sharp_constant
from kvcat.theory.theorem import incompressible_network
from kvcat.types import Float, Int, Tensor


class Erratum(NamedTuple):
    """One statement: its place, what is printed, what running it shows, what kvcat uses instead."""

    place: str
    printed: str
    shown: str
    instead: str


TEXT = """\
Theorem, item 2
no (N, C, r)-compressibility for any budget with r(n) < n for all n
with one slot at least, {below} of {budgets} budgets satisfy it at N = 4: a prefix of one token has none to lose, \
and kept whole its error is {kept:g}
r(n) < n for one n < N ({others} budgets), empty caches allowed
Note behind Proposition 1
with r(n) = n - 1 the bound becomes weaker as N grows, as N^-2
true of the constant ({last:.4f} at N = 12), which looks at n = N - 1; compressibility asks for every n, and there \
the optimum is {whole.error:.4f} for all N, at n = {whole.prefix_len}
the optimum over all n, which does not fall with N
Proposition 1, W_V = W_O
the network computes the histogram
input 1123: {nilpotent} (the matrix is nilpotent)
W_V = E_12, W_O = I
Proposition 1, the bound
k (n - r) / (2 (n + k)(r + k))
holds, but is loose: {bound:.4f} at m = 2, n = 3, k = r = 1, where the optimum is {optimum:.4f}
k (n - r) / ((n + k)(r + k)) sqrt(1 - 1/m) for r >= 1, the exact optimum at one k
Proposition 2, W_V and W_O = I
the third block holds the histogram
input 1123: {unmoved}; with W_V transposed block 1 holds {doubled}, the residual counting twice
W_V = E_11 + E_22 + E_13, W_O = E_33 + E_44
Proposition 2, the policy
the slot holds the counts in block 1
prefix 11, suffix 23: {misplaced} instead of {counts}
the counts in block 3, where the average is read
Lemma 2, rho-bar
the network approximates f
m = 2, N = 4, n = k = 2: {wrong.num_wrong} of {total} sequences are sent to u_0, {moved.num_wrong} with te(b_i, i) \
as printed
Construction D
Hull lemma
(alpha - 1) / 2 times the diameter
holds, but is loose: {hull:.4f} for e_1, e_2, e_3 and alpha = 1.25, where {sharp:.4f} is attained
(alpha - 1) times the circumradius, the best constant
"""  # place, printed, shown, instead


def errata() -> list[Erratum]:
    """Every statement that fails as printed or is loose, demonstrated."""
    tokens, corners = torch.tensor([0, 0, 1, 2]), torch.eye(3, dtype=torch.float64)
    budgets, below, kept = vacuous_budgets(d.parity(2, 4))
    wrong, moved = (printed_incompressible(2, 4, (0, 0), 2, shifted=shifted) for shifted in (True, False))
    lines = TEXT.format(
        budgets=budgets, below=below, kept=kept, others=budgets - 1,
        last=paper_bound(11, 1, 10), whole=definition_optimum(2, 12, lambda n: max(1, n - 1)),
        nilpotent=_row(nilpotent_output(tokens, 3)), unmoved=_row(unmoved_output(tokens, 3)),
        bound=paper_bound(3, 1, 1), optimum=optimal_error(2, 3, 1, 1), doubled=_row(doubled_blocks(tokens, 3)[:3]),
        misplaced=_row(misplaced_counts(tokens[:2], tokens[2:], 3)), counts=_row(histogram(tokens, 3)),
        wrong=wrong, moved=moved, total=len(wrong.distances),
        hull=hull_lemma_bound(corners, 1.25), sharp=sharp_constant(corners, 1.25),
    ).splitlines()  # fmt: skip
    return [Erratum(*lines[at : at + 4]) for at in range(0, len(lines), 4)]


def run_errata() -> None:
    """Demonstrate what fails as printed or is loose, and print what holds instead.

    Example: kvcat theory errata
    """
    for erratum in errata():
        print(erratum.place)
        for name, text in zip(("printed", "shown", "instead"), erratum[1:], strict=True):
            print(textwrap.fill(text, 100, initial_indent=f"  {name:8s} ", subsequent_indent=" " * 11))


def _row(values: Tensor) -> str:
    return "(" + ", ".join(f"{value:.4g}" for value in values.round(decimals=12).tolist()) + ")"


def nilpotent_output(tokens: Int[Tensor, " n"], num_symbols: int) -> Float[Tensor, " m"]:
    """Proposition 1 with W_V = W_O = ((0, 0), (I, 0)), whose square is 0: so is the output, not the histogram."""
    moved = block_moves(2, num_symbols, (2, 1))
    return _with_attention(incompressible_histogram(num_symbols, max(2, len(tokens))), moved, moved)(tokens)


def unmoved_output(tokens: Int[Tensor, " n"], num_symbols: int) -> Float[Tensor, " m"]:
    """Proposition 2 with the printed W_V, which moves nothing to y, and W_O = I: the output is 0."""
    return _printed_one_slot(tokens, block_moves(4, num_symbols, (1, 1), (2, 2), (3, 1)))(tokens)


def doubled_blocks(tokens: Int[Tensor, " n"], num_symbols: int) -> Float[Tensor, " four_m"]:
    """Proposition 2 with W_V transposed and W_O = I: the last token's blocks before the last map.

    Claimed are (e_a, p_n, hist, 0). Blocks 1 and 2 come through W_V and W_O and, once more, through
    the residual: (e_a + hist, p_n + mean of the p_i, hist, 0).
    """
    model = _printed_one_slot(tokens, block_moves(4, num_symbols, (1, 1), (2, 2), (1, 3)))
    x, block = model.blocks[0].feed_forward(model.embed(tokens)), model.blocks[1]
    one, zeros = torch.eye(x.shape[1], dtype=torch.float64), torch.zeros(2 * x.shape[1], dtype=torch.float64)
    identity = d.FeedForward(torch.cat([one, -one], 1), zeros, torch.cat([one, -one]), zeros[: x.shape[1]])
    before = replace(block, feed_forward=identity)
    return d.run_block(before, x, [(x @ head.w_k, x @ head.w_v) for head in block.heads], causal=False)[-1]


def misplaced_counts(prefix: Int[Tensor, " n"], suffix: Int[Tensor, " k"], num_symbols: int) -> Float[Tensor, " m"]:
    """Proposition 2 in the corrected network behind the printed slot, with the counts in block 1.

    The average is read in block 3, so the prefix is missing: S_b / (n + k), not (S_a + S_b) / (n + k).
    """
    model = compressible_histogram(num_symbols, len(prefix) + len(suffix))
    policy = d.one_slot_policy(block_moves(4, num_symbols, (1, 1)), block_moves(4, num_symbols, (2, 4)))
    return d.answer(model, d.compress(policy, d.prefix_cache(model, prefix)), len(prefix), suffix)


def _printed_one_slot(tokens: Tensor, w_v: Tensor) -> d.Transformer:
    model = compressible_histogram(len(w_v) // 4, max(2, len(tokens)))
    return _with_attention(model, w_v, torch.eye(len(w_v), dtype=torch.float64))


def _with_attention(model: d.Transformer, w_v: Tensor, w_o: Tensor) -> d.Transformer:
    """The model with other W_V and W_O in its second block."""
    first, last = model.blocks
    return replace(model, blocks=(first, replace(last, heads=(replace(last.heads[0], w_v=w_v),), w_o=w_o)))


class PrintedIncompressible(NamedTuple):
    """Distances of every sequence's sum of phi from the hull H, and the margin delta."""

    distances: Float[Tensor, " all_sequences"]
    delta: float

    @property
    def num_wrong(self) -> int:
        """Number of sequences beyond delta, which are sent to u_0."""
        return int((self.distances >= self.delta).sum())


def printed_incompressible(
    num_symbols: int, longest: int, prefix: Sequence[int], suffix_len: int, *, shifted: bool = True
) -> PrintedIncompressible:
    """Lemma 2's printed network on every sequence, with phi the one-hot of (symbol, position).

    H = conv{sum_i phi(te(b_i, n + i)) : b in A^k} + sum_i phi(te(a_i, i)),
    delta = ((n + k)/(n - 1 + k) - 1) diam(H)/2; rho-bar is rho(j y) within delta/2 of H and
    u_0 = (max |f| + C + 1) e_1 beyond delta. Every sequence other than [a, b] lies beyond.

    ``longest`` is N, ``prefix`` the lemma's a, n + k <= N. ``shifted`` puts suffixes at positions
    n + 1 to n + k, as they run; False as printed, te(b_i, i).
    """
    n, k, m = len(prefix), suffix_len, num_symbols
    if n < 1 or k < 1 or n + k > longest:
        raise ValueError(f"the lemma needs n, k >= 1 and n + k <= N = {longest}, got n = {n}, k = {k}")
    corner = pad(one_hot(torch.tensor(list(prefix)), m).to(torch.float64), (0, 0, 0, longest - n))
    free = list(range(n, n + k) if shifted else range(k))
    distances: list[Tensor] = []
    for length in range(1, longest + 1):
        offsets = pad(one_hot(d.sequences(m, length), m).double(), (0, 0, 0, longest - length)) - corner
        ordered = offsets[:, free].sort(-1, descending=True).values
        # the nearest point of the simplex is relu(p - c), of sum 1
        c = (ordered.cumsum(-1) - 1) / torch.arange(1, m + 1)
        last = (ordered > c).sum(-1, keepdim=True) - 1
        offsets[:, free] = torch.minimum(offsets[:, free], c.gather(-1, last))
        distances.append(torch.linalg.vector_norm(offsets.flatten(1), dim=-1))
    delta = ((n + k) / (n - 1 + k) - 1) * math.sqrt(2 * k) / 2
    return PrintedIncompressible(torch.cat(distances), delta)


def vacuous_budgets(table: d.FunctionTable) -> tuple[int, int, float]:
    """Budgets with 1 <= r(n) <= n, those with r(n) < n (none), the error of one token kept whole."""
    budgets = list(itertools.product(*(range(1, n + 1) for n in range(1, table.longest))))
    below = [budget for budget in budgets if all(r < n for n, r in enumerate(budget, 1))]
    network, ones = incompressible_network(table, constant=1.0), [(symbol,) for symbol in range(table.num_symbols)]
    kept = d.compressibility(network, (d.keep_all, d.keep_all), lambda n: n, prefixes=ones)
    return len(budgets), len(below), kept.error
