"""Two transformers for the histogram: no policy compresses one, and one slot is enough for the
other.

Both have the embedding te(a, i) = u_a + p_i in R^m with p_i = (i, 1, 0, ..., 0) and
u_a = (0, a, 0, ..., 0), the symbols a counted from 0. It is injective, p_i is never 0, and
p_i / (j - i + 1) = p_i' / (j - i' + 1) only for i = i'. A first block without attention (W_O = 0)
turns it into blocks of width m; a second one averages (W_Q = 0). ``num_symbols`` is m, ``longest``
N, both at least 2 (InputError).

References: KV-CAT, Propositions "hist_non_compressible" and "hist_compressible", appendix
"Motivating example".
"""

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Literal

import torch
from torch.nn.functional import one_hot, pad

from kvcat.errors import InputError, whole
from kvcat.theory import definitions as d
from kvcat.types import Float, Int, Tensor


def histogram(tokens: Int[Tensor, "*batch n"], num_symbols: int) -> Float[Tensor, "*batch m"]:
    """hist(a) = (n_1 / n, ..., n_m / n), n_i the number of symbols i in a."""
    return one_hot(tokens, num_symbols).double().mean(-2)


def multisets(num_symbols: int, length: int) -> Int[Tensor, "multisets length"]:
    """One sequence for every count vector of this sum: its symbols in ascending order."""
    return torch.tensor(list(itertools.combinations_with_replacement(range(num_symbols), length)))


def block_moves(num_blocks: int, width: int, *moves: tuple[int, int]) -> Float[Tensor, "d d"]:
    """The sum of E_ab over moves (a, b): x E_ab has block a of x (from 1) in block b."""
    grid = torch.zeros(num_blocks, num_blocks, dtype=torch.float64)
    for a, b in moves:
        grid[a - 1, b - 1] += 1
    return torch.kron(grid, torch.eye(width, dtype=torch.float64))


def incompressible_histogram(
    num_symbols: int, longest: int, *, num_blocks: Literal[2, 4] = 2
) -> d.Transformer:
    """Proposition 1: M(a) = hist(a), the plain average of one-hots, read off linearly.

    Two blocks: rho_1(u_a + p_i) = (e_a, 0), W_V = E_12, W_O = I, FFN(x, y) = relu(y) - relu(-y) = y
    for every real y, since policies are unbounded. Four blocks: the widths, rho_1 and W_V of
    ``compressible_histogram``, W_O = E_33 instead of E_33 + E_44, FFN = y with zero units added.
    """
    m = num_symbols
    embedding = _embedding(m, longest)
    if num_blocks == 2:
        w_v = block_moves(2, m, (1, 2))
        w_o = block_moves(2, m, (1, 1), (2, 2))
        at = 2
        padding = 0
    else:
        w_v = block_moves(4, m, (1, 1), (2, 2), (1, 3))
        w_o = block_moves(4, m, (3, 3))
        at = 3
        padding = max(0, m * len(_breakpoints(longest)[0]) - 2 * m)
    read = block_moves(num_blocks, m, (at, 1))[:, :m]
    one = torch.eye(m, dtype=torch.float64)
    zeros = torch.zeros(2 * m + padding, dtype=torch.float64)
    w_1 = pad(torch.cat([read, -read], 1), (0, padding))
    w_2 = pad(torch.cat([one, -one]), (0, 0, 0, padding))
    last = d.averaging_block(w_v, w_o, d.FeedForward(w_1, zeros, w_2, zeros[:m]))
    return d.Transformer(embedding, (_first_block(m, num_blocks), last))


def compressible_histogram(num_symbols: int, longest: int) -> d.Transformer:
    """Proposition 2: M(a) = hist(a), also with the one slot of ``histogram_policy``.

    Blocks (w, x, y, z): rho_1(u_a + p_i) = (e_a, p_i, 0, 0), W_V = E_11 + E_22 + E_13, W_O = E_33 +
    E_44. The last map is rho_2(w, x, y, z) = y for z = 0 and (k + 1) y / (n + k) for z = p_n / (k +
    1), coordinate by coordinate for every real y with 0 <= y_c <= (n + k) / (k + 1). With p_i = (i,
    1, 0, ...), (n + k) / (k + 1) = 1 + z_1 - z_2 in both cases, so rho_2 is piecewise linear in t =
    y_c + Lambda (z_1 - z_2): from 0 to 1 over each value that (n + k) / (k + 1) takes, and back to
    0 before the next. Lambda grows as N^2 and t as N^3, so float64 keeps about 1e-13 at N = 6,
    1e-11 at N = 20, 1e-9 at N = 60.
    """
    m = num_symbols
    embedding = _embedding(num_symbols, longest)
    breakpoints, slopes, scale = _breakpoints(longest)
    read = block_moves(4, m, (3, 1))[:, :m]  # y_c, and Lambda (z_1 - z_2) for every c
    read[3 * m] += scale
    read[3 * m + 1] -= scale
    one = torch.eye(m, dtype=torch.float64)
    zeros = torch.zeros(m, dtype=torch.float64)
    w_1 = read.repeat_interleave(len(breakpoints), 1)
    last = d.FeedForward(w_1, -breakpoints.repeat(m), torch.kron(one, slopes[:, None]), zeros)
    w_v = block_moves(4, m, (1, 1), (2, 2), (1, 3))
    w_o = block_moves(4, m, (3, 3), (4, 4))
    return d.Transformer(embedding, (_first_block(m, 4), d.averaging_block(w_v, w_o, last)))


def histogram_policy(num_symbols: int) -> d.Policy:
    """Proposition 2's policy: key 0, value (sum_i v_i) E_33 + v_n E_24, counts in y, p_n in z."""
    return d.one_slot_policy(
        block_moves(4, num_symbols, (3, 3)), block_moves(4, num_symbols, (2, 4))
    )


def mass_ratios(longest: int) -> list[Fraction]:
    """The sums of y, ascending: 1, and (n + k) / (k + 1) after one slot, n + k <= N."""
    return sorted({Fraction(j, q) for j in range(2, longest + 1) for q in range(2, j + 1)})


def check_histogram(model: d.Transformer, policy: d.Policy) -> dict[str, Any]:
    """A histogram network verified: its widths, its task error, the worst error after one slot.

    Attention is uniform and the last map does not read the last token, so the order of the tokens
    of a prefix or a suffix does not matter: one sequence for every count vector is enough. The
    policy, for one slot, must not depend on it either.
    """
    m = model.num_symbols
    longest = model.num_positions
    rows = {n: multisets(m, n) for n in range(1, longest + 1)}
    task = max(
        float((model(tokens) - histogram(tokens, m)).norm(dim=-1).max()) for tokens in rows.values()
    )
    prefixes = (row for n in range(1, longest) for row in rows[n].tolist())
    suffixes: Callable[[int], Tensor] = rows.__getitem__
    worst = d.compressibility(model, policy, lambda _: 1, prefixes=prefixes, suffixes=suffixes)
    num_pairs = sum(
        len(rows[n]) * len(rows[k]) for n in range(1, longest) for k in range(1, longest - n + 1)
    )
    first, second = (block.feed_forward for block in model.blocks)
    widths = (*first.w_1.shape, *second.w_1.shape, second.w_2.shape[1])
    return {
        "widths": widths,
        "task_error": task,
        "worst_error": worst.error,
        "num_pairs": num_pairs,
    }


def _embedding(num_symbols: int, longest: int) -> Tensor:
    if whole("num_symbols", num_symbols) < 2:
        raise InputError(f"a histogram needs at least 2 symbols, got {num_symbols}")
    if whole("longest", longest) < 2:
        raise InputError(f"a prefix and a suffix need N >= 2, got {longest}")
    table = torch.zeros(num_symbols, longest, num_symbols, dtype=torch.float64)
    table[:, :, 0] = torch.arange(1, longest + 1)
    table[:, :, 1] = 1 + torch.arange(num_symbols)[:, None]
    return table


def _first_block(num_symbols: int, num_blocks: int) -> d.Block:
    """No attention; rho_1: e_a from relu(v - c), v = 1 + a of coordinate 2, i from 1."""
    m = num_symbols
    zero = torch.zeros(m, m, dtype=torch.float64)
    zeros = torch.zeros(num_blocks * m, dtype=torch.float64)
    w_1 = torch.zeros(m, m + 1, dtype=torch.float64)
    w_1[1, :m] = w_1[0, m] = 1.0
    b_1 = pad(-torch.arange(m, dtype=torch.float64), (0, 1))
    step = torch.eye(m, dtype=torch.float64) - torch.ones(m - 1, dtype=torch.float64).diag(-1)
    w_2 = pad(step @ step, (0, (num_blocks - 1) * m, 0, 1))  # a hat around v = a + 1: 1, -2, 1
    b_2 = zeros.clone()
    if num_blocks == 4:
        w_2[m, m] = b_2[m + 1] = 1.0
    return d.averaging_block(zero, zero, d.FeedForward(w_1, b_1, w_2, b_2))


def _breakpoints(longest: int) -> tuple[Tensor, Tensor, float]:
    """Breakpoints of rho_2 in t, the changes of slope there, and Lambda.

    For each mass ratio q, t runs over [Lambda (q - 1), Lambda (q - 1) + q]; Lambda leaves at least
    1 to the next.
    """
    ratios = mass_ratios(longest)
    scale = math.ceil(
        max([Fraction(1), *((q + 1) / (after - q) for q, after in itertools.pairwise(ratios))])
    )
    corners = []
    down = Fraction(0)
    for q, after in itertools.zip_longest(ratios, ratios[1:]):
        start = scale * (q - 1)  # t at y = 0
        # up with slope 1/q to 1 at start + q, then down to 0 where the next ratio starts
        before = down
        down = -1 / (scale * (after - 1) - start - q) if after else Fraction(0)
        corners += [(start, 1 / q - before), (start + q, down - 1 / q)]
    breakpoints, slopes = torch.tensor(
        [[float(v) for v in corner] for corner in corners], dtype=torch.float64
    ).T
    return breakpoints, slopes, float(scale)
