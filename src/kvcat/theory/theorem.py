"""The main theorem: for any function, one network that one slot serves and one that no policy serves.

Construction D makes both with explicit weights. They differ in 2N rows of one matrix, W_2 of the
last block: the compressible network (Lemma 1) holds zeros there; in the incompressible one (Lemma 2)
2N units raise an alarm when a coordinate of the average leaves the interval of whole sequences.

Notation: m symbols, sequences of 1 to N; phi(te(a, i)) is the one-hot e_(a,i) of R^(mN); the blocks
[w, x, y, z] of the residual stream have widths mN, N, mN, N. Before the last feed-forward map w is
the last token's phi, x = e_j its position, y the average of phi, z what a one-slot cache says of the
prefix's length.

References: KV-CAT, the main theorem and appendix "Compressible Transformers for General Functions".
"""

import math
from dataclasses import dataclass

import torch
from torch.nn.functional import one_hot, pad

from kvcat.errors import InputError
from kvcat.theory.definitions import (
    AttentionHead,
    Block,
    FeedForward,
    Policy,
    Transformer,
    averaging_block,
    one_slot_policy,
    sequences,
)
from kvcat.theory.functions import FunctionTable
from kvcat.types import Float, Int, Tensor

ALARM_SYMBOL = 0
"""t, the symbol whose coordinates of y the alarms watch; any would do."""


@dataclass(frozen=True)
class Layout:
    """Where Construction D keeps what: blocks of the residual stream and hidden units of the last map."""

    num_symbols: int
    num_positions: int

    @property
    def code_width(self) -> int:
        """Width mN of phi, of blocks 1 and 3."""
        return self.num_symbols * self.num_positions

    @property
    def width(self) -> int:
        """Width 2(m + 1)N of the residual stream behind block 1."""
        return 2 * (self.code_width + self.num_positions)

    @property
    def num_sequences(self) -> int:
        """Number of sequences of 1 to N symbols."""
        return sum(self.num_symbols**j for j in range(1, self.num_positions + 1))

    def block(self, number: int) -> slice:
        """Block 1 (w), 2 (x), 3 (y) or 4 (z) of the residual stream."""
        starts = [0, self.code_width, self.code_width + self.num_positions, self.width - self.num_positions, self.width]
        return slice(starts[number - 1], starts[number])

    def move(self, source: int, target: int) -> Float[Tensor, "width width"]:
        """E_ab: x E_ab holds block a of x at block b, and zeros elsewhere."""
        matrix = torch.zeros(self.width, self.width, dtype=torch.float64)
        size = self.block(source).stop - self.block(source).start
        matrix[self.block(source), self.block(target)] = torch.eye(size, dtype=torch.float64)
        return matrix

    def code(self, tokens: Int[Tensor, "*batch length"]) -> Float[Tensor, "*batch d_1"]:
        """1_a, the sum of phi(te(a_i, i)) over a sequence: ones at every (a_i, i), in the order (i - 1) m + a."""
        ones = one_hot(tokens, self.num_symbols).to(torch.float64).flatten(-2)
        return pad(ones, (0, self.code_width - ones.shape[-1]))

    @property
    def watched(self) -> Int[Tensor, " positions"]:
        """Coordinates (t, j) within block 3, for j = 1 to N."""
        return torch.arange(self.num_positions) * self.num_symbols + ALARM_SYMBOL

    @property
    def detectors(self) -> tuple[slice, slice]:
        """Units relu(h) and units relu(h - q), each in order of length, then lexicographic."""
        return slice(0, self.num_sequences), slice(self.num_sequences, 2 * self.num_sequences)

    @property
    def alarms(self) -> tuple[slice, slice]:
        """Units that watch y_(t,j) from above and from below, each for j = 1 to N."""
        start, N = 2 * self.num_sequences, self.num_positions
        return slice(start, start + N), slice(start + N, start + 2 * N)


def ramp_width(num_positions: int) -> float:
    """The width q = 2^-ceil(log2 4N) over which a detector rises from 0 to 1; dividing by a power of two is exact."""
    return 2.0 ** -math.ceil(math.log2(4 * num_positions))


def least_excess(num_positions: int) -> float:
    """mu* = 1 / (2N(N - 1)): some suffix puts y_(t,j) this far outside [0, 1/j] whatever r < n slots hold.

    Two suffixes that differ in the last token alone, t or not, put y_(t,j) at (v + 1)/(r + k) and
    v/(r + k), which are further apart than 1/j = 1/(n + k). Half of the difference,
    (n - r)/(2(r + k)(n + k)), is least at r = n - 1 and n + k = N.
    """
    return 1 / (2 * num_positions * (num_positions - 1))


def alarm_gain(table: FunctionTable, constant: float) -> float:
    """U, the least power of two that is at least 9/8 of (C + max f_1 + sum max(0, -f_1)) / (mu* - sl).

    f_1 is f's first coordinate and sl = mu*/4 the excess that raises no alarm yet. An alarm then
    outweighs C, the value wanted and all that detectors, each between 0 and f(a), can take from it.
    A power of two, so that the product is exact; the eighth leaves room for rounding.

    Raises:
        InputError: N < 2, C not positive or not finite.
    """
    _check_longest(table)
    if not 0 < constant < math.inf:
        raise InputError(f"the constant C must be positive and finite, got {constant}")
    first = torch.cat(table.values)[:, 0]
    opposed = constant + float(first.max() - first.clamp(max=0).sum())
    return 2.0 ** math.ceil(math.log2(1.125 * opposed / (0.75 * least_excess(table.longest))))


def compressible_network(table: FunctionTable) -> Transformer:
    """The network of Lemma 1: it computes f, and so it does behind ``summary_policy``.

    Its detectors fire for c * 1_a whatever the scale c >= 1/N, so it does not matter that a one-slot
    cache changes the average's denominator from n + k to 1 + k.

    Args:
        table: f, on sequences of 1 to N >= 2 symbols.

    Raises:
        InputError: N < 2.
    """
    return _network(table, 0.0)


def incompressible_network(table: FunctionTable, *, constant: float) -> Transformer:
    """The network of Lemma 2: it computes f, and behind every cache of r(n) < n slots it errs by more than C.

    For every prefix of n tokens, every finite cache of r < n slots and every k there is a suffix of k
    tokens at which || M([a, b]) - M_{C,a}(b) || > C.

    Args:
        table: f, any function on sequences of 1 to N >= 2 symbols.
        constant: C > 0, in the unit of f.

    Raises:
        InputError: N < 2, C not positive or not finite.
    """
    return _network(table, alarm_gain(table, constant))


def summary_policy(num_symbols: int, num_positions: int) -> Policy:
    """Lemma 1's policy, r(n) = 1: key 0, value (sum_i v_i) E_33 + v_n E_24, the sum of phi and the length as e_n."""
    layout = Layout(num_symbols, num_positions)
    return one_slot_policy(layout.move(3, 3), layout.move(2, 4))


def differing_rows(first: Transformer, second: Transformer) -> dict[str, tuple[int, ...]]:
    """The rows, from 0, in which two networks of one architecture differ, by matrix; biases are columns.

    Raises:
        ValueError: the networks have different numbers or shapes of matrices.
    """
    mine, theirs = matrices(first), matrices(second)
    if {name: matrix.shape for name, matrix in mine.items()} != {name: m.shape for name, m in theirs.items()}:
        raise ValueError("the two networks have different architectures")
    rows = {name: (matrix != theirs[name]).any(-1).nonzero().flatten().tolist() for name, matrix in mine.items()}
    return {name: tuple(found) for name, found in rows.items() if found}


def matrices(network: Transformer) -> dict[str, Tensor]:
    """Every matrix of a network by name, the embedding with a row for each (symbol, position)."""
    found = {"te": network.embedding.flatten(0, 1)}
    for number, block in enumerate(network.blocks, 1):
        for index, head in enumerate(block.heads, 1):
            for name, matrix in (("W_Q", head.w_q), ("W_K", head.w_k), ("W_V", head.w_v)):
                found[f"block {number} head {index} {name}"] = matrix
        ffn = block.feed_forward
        named = {"W_O": block.w_o, "W_1": ffn.w_1, "b_1": ffn.b_1[:, None], "W_2": ffn.w_2, "b_2": ffn.b_2[:, None]}
        found |= {f"block {number} {name}": matrix for name, matrix in named.items()}
    return found


def value_error(network: Transformer, table: FunctionTable) -> float:
    """The largest || M(a) - f(a) || over every sequence a of 1 to N symbols."""
    inputs = (sequences(table.num_symbols, length) for length in range(1, table.longest + 1))
    return max(float(torch.linalg.vector_norm(network(some) - table(some), dim=-1).max()) for some in inputs)


def _check_longest(table: FunctionTable) -> None:
    if table.longest < 2:
        raise InputError(f"a prefix and a suffix need N >= 2, the table has N = {table.longest}")


def _network(table: FunctionTable, gain: float) -> Transformer:
    _check_longest(table)
    layout = Layout(table.num_symbols, table.longest)
    m, N = layout.num_symbols, layout.num_positions
    symbols = torch.eye(m, dtype=torch.float64)[:, None].expand(m, N, m)
    positions = torch.eye(N, dtype=torch.float64).expand(m, N, N)
    nothing = torch.zeros(m + N, m + N, dtype=torch.float64)
    first = Block((AttentionHead(nothing, nothing, nothing),), nothing, _code_map(layout))
    w_v = layout.move(1, 1) + layout.move(2, 2) + layout.move(1, 3)
    second = averaging_block(w_v, layout.move(3, 3) + layout.move(4, 4), _detector_map(layout, table, gain))
    return Transformer(torch.cat([symbols, positions], -1), (first, second))


def _code_map(layout: Layout) -> FeedForward:
    """te(a, i) = [e_a, e_i] -> [e_(a,i), e_i, 0, 0]: unit (a, i) is relu(te_a + te_(m+i) - 1)."""
    m, N = layout.num_symbols, layout.num_positions
    one, ones = torch.eye(m * N, dtype=torch.float64), torch.eye(N, dtype=torch.float64)
    w_1 = torch.cat([torch.eye(m, dtype=torch.float64).repeat(1, N), ones.repeat_interleave(m, 1)])
    w_2 = pad(torch.cat([one, ones.repeat_interleave(m, 0)], 1), (0, layout.width - (m + 1) * N))
    return FeedForward(w_1, -one.sum(0), w_2, torch.zeros(layout.width, dtype=torch.float64))


def _detector_map(layout: Layout, table: FunctionTable, gain: float) -> FeedForward:
    """[w, x, y, z] -> sum_a f(a) [relu(h_a) - relu(h_a - q)] / q, and the alarms in the first coordinate.

    Detector of a sequence a of length j: h_a = <1_a, y> - ((j - 1/2)/j) sum(y) + N (x_j - 1), which
    is c/2 at y = c 1_a, x = e_j and at most -c/2 at y = c 1_b for other sequences b of j symbols.
    Alarms of each j: relu(y_(t,j) - 1/j - sl + N (x_j - 1)) and relu(-y_(t,j) - sl), times U = gain.
    """
    N, q, slack = layout.num_positions, ramp_width(layout.num_positions), least_excess(layout.num_positions) / 4
    (rise, saturate), (above, below) = layout.detectors, layout.alarms
    w_1 = torch.zeros(layout.width, below.stop, dtype=torch.float64)
    b_1 = torch.full((below.stop,), -float(N), dtype=torch.float64)
    w_2 = torch.zeros(below.stop, table.d_out, dtype=torch.float64)
    x, y = w_1[layout.block(2)], w_1[layout.block(3)]
    start = 0
    for j in range(1, N + 1):
        some = slice(start, start + layout.num_symbols**j)
        y[:, some] = layout.code(sequences(layout.num_symbols, j)).T - (j - 0.5) / j
        x[j - 1, some] = N
        start = some.stop
    w_1[:, saturate] = w_1[:, rise]
    b_1[saturate] -= q
    w_2[rise] = torch.cat(table.values) / q
    w_2[saturate] = -w_2[rise]
    y[layout.watched, torch.arange(above.start, above.stop)] = 1.0
    y[layout.watched, torch.arange(below.start, below.stop)] = -1.0
    x[:, above] = N * torch.eye(N, dtype=torch.float64)
    b_1[above] -= 1 / torch.arange(1, N + 1, dtype=torch.float64) + slack
    b_1[below] = -slack
    w_2[above, 0] = w_2[below, 0] = gain
    return FeedForward(w_1, b_1, w_2, torch.zeros(table.d_out, dtype=torch.float64))
