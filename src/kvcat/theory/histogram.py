"""Two transformers for the histogram with explicit weights: one no policy can compress, one that needs a single slot.

Both have the embedding te(a, i) = u_a + p_i in R^m with p_i = (i, 1, 0, ..., 0) and u_a = (0, a, 0, ..., 0), the
symbols a counted from 0. It is injective, p_i is never 0, and p_i / (j - i + 1) = p_i' / (j - i' + 1) only for i = i'.
A first block without attention (W_O = 0) turns it into blocks of width m; a second one averages (W_Q = 0).

References: KV-CAT, Propositions "hist_non_compressible" and "hist_compressible", appendix "Motivating example".
"""

import itertools
from fractions import Fraction

import torch

from kvcat.theory.compression import KeysValues, Policy
from kvcat.theory.definitions import AttentionHead, Block, FeedForward, Transformer
from kvcat.types import Float, Int, Tensor


def histogram(tokens: Int[Tensor, "*batch n"], num_symbols: int) -> Float[Tensor, "*batch m"]:
    """hist(a) = (n_1 / n, ..., n_m / n), n_i the number of symbols i in a."""
    return torch.nn.functional.one_hot(tokens, num_symbols).to(torch.float64).mean(-2)


def count_vectors(num_symbols: int, total: int) -> Int[Tensor, "vectors m"]:
    """Every (n_1, ..., n_m) of non-negative integers with the sum ``total``."""
    rows = []
    for bars in itertools.combinations(range(total + num_symbols - 1), num_symbols - 1):
        edges = (-1, *bars, total + num_symbols - 1)
        rows.append([right - left - 1 for left, right in itertools.pairwise(edges)])
    return torch.tensor(rows, dtype=torch.int64)


def block_moves(num_blocks: int, width: int, *moves: tuple[int, int]) -> Float[Tensor, "d d"]:
    """The matrix sum of E_ab, E_ab having I at block (a, b): x E_ab holds in block b what x holds in block a.

    Args:
        num_blocks: blocks of x.
        width: width of a block.
        moves: the pairs (a, b), counted from 1.
    """
    matrix = torch.zeros(num_blocks * width, num_blocks * width, dtype=torch.float64)
    for a, b in moves:
        matrix[(a - 1) * width : a * width, (b - 1) * width : b * width] += torch.eye(width, dtype=torch.float64)
    return matrix


def incompressible_histogram(num_symbols: int, longest: int, *, num_blocks: int = 2) -> Transformer:
    """Proposition 1: M(a) = hist(a), the plain average of one-hots, read off linearly.

    Two blocks: rho_1(u_a + p_i) = (e_a, 0), W_V = E_12, W_O = I, FFN(x, y) = relu(y) - relu(-y) = y for every real y,
    since policies are unbounded. (W_V = W_O as printed is nilpotent and yields 0.) Four blocks: rho_1, the
    widths and W_V of ``compressible_histogram``, W_O = E_33 instead of E_33 + E_44, FFN = y padded with zero units.

    Args:
        num_symbols: m, at least 2.
        longest: N, at least 2.
        num_blocks: 2, or 4 for the architecture of ``compressible_histogram``.

    Raises:
        ValueError: an argument outside its range.
    """
    embedding = _embedding(num_symbols, longest)
    m = num_symbols
    if num_blocks == 2:
        first, w_v, w_o, at, width = (
            _first_map(m, 2),
            block_moves(2, m, (1, 2)),
            block_moves(2, m, (1, 1), (2, 2)),
            2,
            0,
        )
    elif num_blocks == 4:
        first, w_v, w_o, at = _first_map(m, 4), _four_block_values(m), block_moves(4, m, (3, 3)), 3
        width = m * len(_breakpoints(longest)[0])
    else:
        raise ValueError(f"the construction has 2 or 4 blocks, not {num_blocks}")
    block_y = block_moves(num_blocks, m, (at, 1))[:, :m]
    return Transformer(embedding, (_pointwise(first), _averaging(w_v, w_o, _linear_map(block_y, width))))


def compressible_histogram(num_symbols: int, longest: int) -> Transformer:
    """Proposition 2: M(a) = hist(a), and ``histogram_policy`` compresses every prefix to one slot without error.

    Blocks (w, x, y, z): rho_1(u_a + p_i) = (e_a, p_i, 0, 0), W_V = E_11 + E_22 + E_13, W_O = E_33 + E_44. The last map
    is rho_2(w, x, y, z) = y for z = 0 and (k + 1) y / (n + k) for z = p_n / (k + 1), coordinate by coordinate for
    every real y with 0 <= y_c <= (n + k) / (k + 1). With p_i = (i, 1, 0, ...), (n + k) / (k + 1) = 1 + z_1 - z_2 in
    both cases, so rho_2 is piecewise linear in t = y_c + Lambda (z_1 - z_2): from 0 to 1 over each value that
    (n + k) / (k + 1) takes, and back to 0 before the next: two hidden units for each value and coordinate. Lambda
    grows as N^2 and t as N^3, so float64 keeps about 1e-13 at N = 6, 1e-11 at N = 20, 1e-9 at N = 60.

    Args:
        num_symbols: m, at least 2.
        longest: N, at least 2.

    Raises:
        ValueError: an argument outside its range.
    """
    m = num_symbols
    embedding = _embedding(m, longest)
    breakpoints, slopes, scale = _breakpoints(longest)
    count = len(breakpoints)
    w_1 = torch.zeros(4 * m, m, count, dtype=torch.float64)
    w_2 = torch.zeros(m, count, m, dtype=torch.float64)
    for c in range(m):
        w_1[2 * m + c, c] = 1.0
        w_1[3 * m, c] += scale
        w_1[3 * m + 1, c] -= scale
        w_2[c, :, c] = slopes
    last = FeedForward(w_1.flatten(1), -breakpoints.repeat(m), w_2.flatten(0, 1), torch.zeros(m, dtype=torch.float64))
    w_o = block_moves(4, m, (3, 3), (4, 4))
    return Transformer(embedding, (_pointwise(_first_map(m, 4)), _averaging(_four_block_values(m), w_o, last)))


def histogram_policy(num_symbols: int) -> Policy:
    """The policy of Proposition 2: one slot with key 0 and value (sum_i v_i) E_33 + v_n E_24.

    The slot holds the counts of the prefix where the average is read and p_n, hence the prefix's length, behind them.
    """
    counts, length = block_moves(4, num_symbols, (3, 3)), block_moves(4, num_symbols, (2, 4))

    def nothing(keys: Tensor, values: Tensor) -> KeysValues:
        return torch.zeros_like(keys[:1]), torch.zeros_like(values[:1])

    def summary(keys: Tensor, values: Tensor) -> KeysValues:
        return torch.zeros_like(keys[:1]), (values.sum(0) @ counts + values[-1] @ length)[None]

    return nothing, summary


def mass_ratios(longest: int) -> list[Fraction]:
    """Every value of (n + k) / (k + 1) for n >= 1, k >= 1, n + k <= N, ascending; the first is 1.

    It is the sum of y behind ``histogram_policy``'s slot, n tokens counted as one, and 1 without compression.
    """
    return sorted({Fraction(j, q) for j in range(2, longest + 1) for q in range(2, j + 1)})


def _embedding(num_symbols: int, longest: int) -> Tensor:
    if num_symbols < 2:
        raise ValueError(f"a histogram needs at least 2 symbols, got {num_symbols}")
    if longest < 2:
        raise ValueError(f"a prefix and a suffix need N >= 2, got {longest}")
    table = torch.zeros(num_symbols, longest, num_symbols, dtype=torch.float64)
    table[:, :, 0] = torch.arange(1, longest + 1)
    table[:, :, 1] = 1 + torch.arange(num_symbols)[:, None]
    return table


def _first_map(num_symbols: int, num_blocks: int) -> FeedForward:
    """rho_1: with v = 1 + a the second coordinate, e_a from relu(v - c), c = 0..m-1; i from relu of the first."""
    m = num_symbols
    w_1 = torch.zeros(m, m + 1, dtype=torch.float64)
    w_1[1, :m] = 1.0
    w_1[0, m] = 1.0
    b_1 = torch.zeros(m + 1, dtype=torch.float64)
    b_1[:m] = -torch.arange(m)
    w_2 = torch.zeros(m + 1, num_blocks * m, dtype=torch.float64)
    b_2 = torch.zeros(num_blocks * m, dtype=torch.float64)
    for a in range(m):
        for c, weight in ((a, 1.0), (a + 1, -2.0), (a + 2, 1.0)):  # a hat around v = a + 1
            if c < m:
                w_2[c, a] = weight
    if num_blocks == 4:
        w_2[m, m] = 1.0
        b_2[m + 1] = 1.0
    return FeedForward(w_1, b_1, w_2, b_2)


def _four_block_values(num_symbols: int) -> Tensor:
    return block_moves(4, num_symbols, (1, 1), (2, 2), (1, 3))


def _linear_map(matrix: Tensor, width: int) -> FeedForward:
    """The map x -> x matrix for every real x, as relu(y) - relu(-y), padded with zero units to at least this width."""
    d_out = matrix.shape[1]
    padding = max(0, width - 2 * d_out)
    pad = torch.nn.functional.pad
    w_2 = torch.cat([torch.eye(d_out, dtype=torch.float64), -torch.eye(d_out, dtype=torch.float64)])
    zeros = torch.zeros(2 * d_out + padding, dtype=torch.float64)
    w_1 = pad(torch.cat([matrix, -matrix], 1), (0, padding))
    return FeedForward(w_1, zeros, pad(w_2, (0, 0, 0, padding)), zeros[:d_out])


def _pointwise(feed_forward: FeedForward) -> Block:
    """A block whose attention projections are zero, so that no row sees another."""
    zero = torch.zeros(feed_forward.w_1.shape[0], feed_forward.w_1.shape[0], dtype=torch.float64)
    return Block((AttentionHead(zero, zero, zero),), zero, feed_forward)


def _averaging(w_v: Tensor, w_o: Tensor, feed_forward: FeedForward) -> Block:
    """A block of one head with W_Q = W_K = 0: uniform attention."""
    zero = torch.zeros_like(w_v)
    return Block((AttentionHead(zero, zero, w_v),), w_o, feed_forward)


def _breakpoints(longest: int) -> tuple[Tensor, Tensor, float]:
    """Breakpoints of rho_2 in t, the changes of slope there, and Lambda.

    For each mass ratio q, t runs over [Lambda (q - 1), Lambda (q - 1) + q]; Lambda leaves at least 1 to the next.
    """
    ratios = mass_ratios(longest)
    scale = max([Fraction(1), *((q + 1) / (after - q) for q, after in itertools.pairwise(ratios))])
    scale = Fraction(-(-scale.numerator // scale.denominator))
    corners: list[tuple[Fraction, Fraction]] = []
    slope = Fraction(0)
    for number, q in enumerate(ratios):
        start = scale * (q - 1)
        corners.append((start, 1 / q - slope))
        last = number + 1 == len(ratios)
        slope = Fraction(0) if last else -1 / (scale * (ratios[number + 1] - 1) - start - q)
        corners.append((start + q, slope - 1 / q))
    breakpoints, slopes = zip(*((float(at), float(change)) for at, change in corners), strict=True)
    return torch.tensor(breakpoints, dtype=torch.float64), torch.tensor(slopes, dtype=torch.float64), float(scale)
