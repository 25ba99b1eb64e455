"""Lemma 2 through one scalar (construction H): a transformer for any f that no policy can compress.

A sequence a of length j has the code S(a) = sum_i w_i a_i, an integer; uniform attention hands the last feed-forward
map y = S / j and the length j, and a piecewise linear map of y returns f at every code and a far value u_0 outside
their hull. The code plays phi of the paper's Lemma 2, the piecewise linear map rho-bar. A policy acts through the sum t
of the scalars that it leaves, and nothing else: behind r slots the map reads (t + S(b)) / (r + k).

The paper's rho-bar must return f(a) for every prefix and length, so its u_0 can begin only outside the hull of the
codes of *all* sequences of length j, [0, (m - 1) W_j / j] in y with W_j = w_1 + ... + w_j. The suffixes of one prefix
span (m - 1) (W_j - W_n) / (r + k). With w_1 = 1 and w_j = max(j - 1, m - 1) (W_{j-1} + 1) that is always more: for
n < j, W_j >= W_{j-1} + (j - 1) (W_{j-1} + 1) = j W_{j-1} + j - 1 >= j W_n + j - 1, hence with r + k <= j - 1

    (m - 1) (W_j - W_n) / (r + k) - ((m - 1) W_j + 4/5) / j >= (m - 9/5) / j > 0,

4/5 being the room for the two ends of the map. So one of the two suffixes of equal symbols lands at u_0, whatever t.

References: KV-CAT, appendix "Compressible Transformers for General Functions", Lemma 2 and its proof.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from kvcat.errors import InputError
from kvcat.theory.definitions import AttentionHead, Block, FeedForward, Transformer
from kvcat.theory.functions import FunctionTable
from kvcat.types import Float, Int, Tensor

KNOTS_PER_CODE = 5
"""Knots are counted in fifths of a code, so that they, too, are integers."""

_END = 2  # fifths of a code between the outermost codes and u_0: less than half, as the span inequality needs
_EXACT = 2**53  # integers up to here are float64 numbers


def spanning_weights(num_symbols: int, longest: int) -> tuple[int, ...]:
    """Construction H's weights: w_1 = 1, w_j = max(j - 1, m - 1) (W_{j-1} + 1).

    Codes of one length are distinct, since w_j > (m - 1) W_{j-1}, and the suffixes of every prefix span more than
    the hull of all codes (see the module).
    """
    weights = [1]
    for j in range(2, longest + 1):
        weights.append(max(j - 1, num_symbols - 1) * (sum(weights) + 1))
    return tuple(weights)


def base_weights(num_symbols: int, longest: int) -> tuple[int, ...]:
    """w_i = m^(i-1), numbers in base m: distinct codes with no gaps, whose suffixes need not span the hull."""
    return tuple(num_symbols**i for i in range(longest))


@dataclass(frozen=True, eq=False)
class ScalarCode:
    """The code S, the piecewise linear map rho-bar that reads it, and the far value u_0 = (max ||f|| + C + 1) e_1.

    ``isolated`` puts u_0 not only outside the hull of the codes but between any two of them as well.
    """

    table: FunctionTable
    weights: tuple[int, ...]
    constant: float
    isolated: bool = False

    def __post_init__(self) -> None:
        if len(self.weights) != self.table.longest or min(self.weights) < 1:
            raise ValueError(f"the code needs {self.table.longest} positive weights, got {self.weights}")
        if not (math.isfinite(self.constant) and self.constant >= 0):
            raise InputError(f"the constant C must be finite and not negative, got {self.constant}")
        if KNOTS_PER_CODE * self.largest(self.table.longest) + _END >= _EXACT:
            raise InputError(f"codes up to {self.largest(self.table.longest)} are too large for float64")
        for j, weight in enumerate(self.weights[1:], 2):
            if weight <= self.largest(j - 1):
                raise ValueError(f"weight {weight} of position {j} makes codes coincide, {self.largest(j - 1)} is used")

    @property
    def far(self) -> Float[Tensor, " d_out"]:
        """u_0, further than C from every value of f and from every mean of such values."""
        peak = max(float(torch.linalg.vector_norm(rows, dim=-1).max()) for rows in self.table.values)
        u_0 = torch.zeros(self.table.d_out, dtype=torch.float64)
        u_0[0] = peak + self.constant + 1
        return u_0

    def largest(self, length: int) -> int:
        """(m - 1) W_j, the largest code of a sequence of this length; the smallest is 0."""
        return (self.table.num_symbols - 1) * sum(self.weights[:length])

    def encode(self, tokens: Int[Tensor, "*batch n"], start: int = 0) -> Int[Tensor, "*batch"]:
        """S = sum_i w_{start + i} a_i, for tokens behind ``start`` others."""
        weights = torch.tensor(self.weights[start : start + tokens.shape[-1]])
        return (tokens * weights).sum(-1)

    def knots(self, length: int) -> tuple[Int[Tensor, " knots"], Float[Tensor, "knots d_out"]]:
        """Where the piecewise linear map bends for sequences of this length, in fifths of a code, and its values there.

        Increasing; the map is u_0 below the first and above the last.
        """
        return self._knots[length - 1]

    @cached_property
    def _knots(self) -> tuple[tuple[Tensor, Tensor], ...]:
        return tuple(self._knots_of(length) for length in range(1, self.table.longest + 1))

    def _knots_of(self, length: int) -> tuple[Tensor, Tensor]:
        codes = torch.zeros(1, dtype=torch.int64)
        for weight in self.weights[:length]:  # lexicographic, as the table's rows
            codes = (codes[:, None] + weight * torch.arange(self.table.num_symbols)).flatten()
        order = codes.argsort()
        at, values = KNOTS_PER_CODE * codes[order], self.table.values[length - 1][order]
        if self.isolated:
            far = self.far.expand_as(values)
            at = torch.stack([at - _END, at, at + _END], 1).flatten()
            return at, torch.stack([far, values, far], 1).flatten(0, 1)
        far = self.far[None]
        return torch.cat([at[:1] - _END, at, at[-1:] + _END]), torch.cat([far, values, far])

    def evaluate(self, length: int, y: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch d_out"]:
        """rho-bar(y) for sequences of this length, by interpolation: what the feed-forward map is to compute."""
        at, values = self.knots(length)
        columns = [
            np.interp(y.numpy() * length, at.numpy() / KNOTS_PER_CODE, column.numpy()) for column in values.unbind(1)
        ]
        return torch.stack([torch.as_tensor(column) for column in columns], -1)

    @cached_property
    def feed_forward(self) -> FeedForward:
        """rho-bar as two layers on (w, x, y, z) = (1, N, 1, N): u_0 + sum_j sum_p c_jp relu(y - t_jp x_j).

        x is the one-hot of the length j; t_jp are the knots, c_jp the changes of slope there. For every j the c_jp
        sum to zero, since the map is constant at both ends: the units of other lengths, where x_j = 0, add
        relu(y) sum_p c_jp = 0, and no gate is needed.
        """
        n_max = self.table.longest
        knots, bends, lengths = [], [], []
        for j in range(1, n_max + 1):
            at, values = self.knots(j)
            slopes = values.diff(dim=0) * (KNOTS_PER_CODE * j) / at.diff()[:, None]
            level = torch.zeros(1, self.table.d_out, dtype=torch.float64)
            bends.append(torch.cat([level, slopes, level]).diff(dim=0))
            knots.append(at.to(torch.float64) / (KNOTS_PER_CODE * j))
            lengths.append(torch.full_like(at, j))
        thresholds, position = torch.cat(knots), torch.cat(lengths)
        w_1 = torch.zeros(2 * (1 + n_max), len(thresholds), dtype=torch.float64)
        w_1[position, torch.arange(len(thresholds))] = -thresholds
        w_1[1 + n_max] = 1
        return FeedForward(w_1, torch.zeros(len(thresholds), dtype=torch.float64), torch.cat(bends), self.far)

    def network(self) -> Transformer:
        """The transformer: te(a, i) = [e_a, e_i], blocks of widths (1, N, 1, N) behind the first feed-forward map.

        Block 1 mixes nothing (W_O = 0); FFN_1 has a unit relu(te_a + te_{m+i} - 1) for each symbol and position and
        returns [w_i a, e_i, 0, 0]. Block 2 attends uniformly (W_Q = W_K = 0), W_V = E_11 + E_22 + E_13 and W_O = E_33:
        the paper's matrices, W_V for rows that multiply from the left.
        """
        m, n_max = self.table.num_symbols, self.table.longest
        width, y = 2 * (1 + n_max), 1 + n_max

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64)

        embedding = zeros(m, n_max, m + n_max)
        symbol, place = torch.arange(m)[:, None], torch.arange(n_max)
        embedding[symbol, place, symbol] = 1
        embedding[symbol, place, m + place] = 1
        pairs = embedding.flatten(0, 1)
        code = zeros(m, n_max, width)
        code[:, :, 0] = symbol * torch.tensor(self.weights)
        code[symbol, place, 1 + place] = 1
        ffn_1 = FeedForward(pairs.T.contiguous(), -torch.ones(m * n_max).double(), code.flatten(0, 1), zeros(width))
        w_v, w_o = zeros(width, width), zeros(width, width)
        w_v[:y, :y] = torch.eye(y)
        w_v[0, y] = 1
        w_o[y, y] = 1
        idle = AttentionHead(zeros(m + n_max, 1), zeros(m + n_max, 1), zeros(m + n_max, m + n_max))
        uniform = AttentionHead(zeros(width, 1), zeros(width, 1), w_v)
        return Transformer(
            embedding,
            (Block((idle,), zeros(m + n_max, m + n_max), ffn_1), Block((uniform,), w_o, self.feed_forward)),
        )

    def rounding(self, largest_y: float = 1.0) -> float:
        """How far float64's rounding can take M from rho-bar where |y| <= largest_y (at least the hull's end).

        u sqrt(units) max|y| sum_jp ||c_jp||, u = 2^-53: the units' largest terms, which cancel down to values of f,
        with the square root for roundings that do not conspire. It grows as range over gap of the codes.
        """
        bends = torch.linalg.vector_norm(self.feed_forward.w_2, dim=-1)
        reach = max(largest_y, *(self.largest(j) / j for j in range(1, self.table.longest + 1)))
        return 2.0**-53 * len(bends) ** 0.5 * reach * float(bends.sum())


def scalar_code(table: FunctionTable, constant: float) -> ScalarCode:
    """Construction H's code for f and C: the weights of :func:`spanning_weights`, u_0 outside the hull of the codes.

    Args:
        table: f, of any width.
        constant: C >= 0, what every policy's error is to exceed.

    Raises:
        ValueError: C negative or not finite, codes beyond the integers that float64 holds.
    """
    return ScalarCode(table, spanning_weights(table.num_symbols, table.longest), constant)


def incompressible_scalar_network(table: FunctionTable, *, constant: float) -> Transformer:
    """A transformer equal to f whose error behind every policy with r(n) < n exceeds C, for every prefix and k >= 1.

    |M - f| is rounding (:meth:`ScalarCode.rounding`), and the worst suffix's error at least C + 1: see
    :func:`scalar_code` for the arguments and the module for the proof.
    """
    return scalar_code(table, constant).network()


@dataclass(frozen=True)
class SpanCertificate:
    """Why no scalar keeps every suffix off u_0, in units of codes per token (of y).

    ``span`` is the width of what the suffixes of one prefix add to y, ``hull`` that of all codes of length n + k with
    the map's ends; ``margin`` = span - hull, positive for construction H, with (m - 9/5) / (n + k) as its least value
    by proof, ``least_margin``.
    ``alpha`` = (n + k) / (r + k) and ``delta`` = (alpha - 1) D / 2 are the hull lemma's, D the diameter of the prefix's
    own hull in codes: some suffix lands that far from the codes of this prefix. The codes of other prefixes lie there,
    so that delta alone does not suffice where margin <= 0.
    """

    alpha: float
    delta: float
    span: float
    hull: float
    margin: float
    least_margin: float


def span_certificate(code: ScalarCode, prefix_len: int, suffix_len: int, num_slots: int) -> SpanCertificate:
    """The figures of Lemma 2's argument for prefixes of n tokens, suffixes of k and r slots.

    Args:
        code: the scalar code.
        prefix_len: n >= 1.
        suffix_len: k >= 1, n + k <= N.
        num_slots: r, 0 <= r < n.

    Raises:
        ValueError: n, k or r outside their ranges.
    """
    n, k, r = prefix_len, suffix_len, num_slots
    check_lengths(code, n, (k,), r)
    if r == n:
        raise ValueError(f"a cache of {r} slots does not compress {n} tokens")
    j = n + k
    diameter = code.largest(j) - code.largest(n)
    span = diameter / (r + k)
    hull = (code.largest(j) + 2 * _END / KNOTS_PER_CODE) / j
    alpha = j / (r + k)
    least = (code.table.num_symbols - 1 - 2 * _END / KNOTS_PER_CODE) / j
    return SpanCertificate(alpha, (alpha - 1) / 2 * diameter, span, hull, span - hull, least)


def check_lengths(code: ScalarCode, prefix_len: int, suffix_lens: tuple[int, ...], num_slots: int) -> None:
    """Raise ValueError unless n >= 1, 0 <= r <= n, and n + k <= N for one k >= 1 or several."""
    longest = code.table.longest
    if not suffix_lens or min(suffix_lens) < 1 or prefix_len < 1 or prefix_len + max(suffix_lens) > longest:
        raise ValueError(f"prefix of {prefix_len} and suffixes of {suffix_lens} tokens, together at most {longest}")
    if not 0 <= num_slots <= prefix_len:
        raise ValueError(f"a cache of {prefix_len} tokens has 0 to {prefix_len} slots, got {num_slots}")
