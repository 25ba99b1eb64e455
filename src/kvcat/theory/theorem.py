"""For any function, one network whose prefix fits into one slot, and one that no policy can
compress.

Construction D makes both with explicit weights. They differ in 2N rows of one matrix, W_2 of the
last block: the compressible network (Lemma 1) holds zeros there; in the incompressible one (Lemma
2) 2N units raise an alarm when a coordinate of the average leaves the interval of whole sequences.

Notation: m symbols, sequences of 1 to N; phi(te(a, i)) is the one-hot e_(a,i) of R^(mN); the blocks
[w, x, y, z] of the residual stream have widths mN, N, mN, N. Before the last feed-forward map w is
the last token's phi, x = e_j its position, y the average of phi, z the prefix's length according to
a one-slot cache. Lemma 2 is certified for every policy at once. In the last block W_Q = 0, so a
cache of r slots acts through the sum of its values alone, and W_O lets it into y and z, of which
the last map reads y. Of two suffixes that differ in the last token, one raises an alarm, whatever
the sum is.

References: KV-CAT, the main theorem and appendix "Compressible Transformers for General Functions".
"""

import math

import pandas as pd
import torch
from torch.nn.functional import one_hot, pad

from kvcat.errors import InputError, check_in, whole
from kvcat.theory import definitions as d
from kvcat.theory.definitions import FeedForward, FunctionTable, Transformer, sequences
from kvcat.types import Float, Int, Tensor

ALARM_SYMBOL = 0  # t, the symbol whose coordinates of y the alarms watch; any symbol would work


class Layout:
    """The layout of Construction D, and its constants; N < 2 is an InputError.

    Blocks of the residual stream: widths mN of phi, 2(m + 1)N in all. Units of the last map: the
    detectors' relu(h), then relu(h - q), each by length, then lexicographically, then the alarms
    that watch y_(t,j) from above, then those from below, each for j = 1 to N. ``watched`` are the
    coordinates (t, j) within block 3.

    Over q = 2^-ceil(log2 4N) (``ramp``) a detector rises from 0 to 1; a division by it is exact.
    mu* = 1/(2N(N - 1)) (``least_excess``): some suffix puts y_(t,j) this far outside [0, 1/j]
    whatever r < n slots hold. Two suffixes that differ in the last token alone, t or not, put it at
    (v + 1)/(r + k) and v/(r + k), which are further apart than 1/j = 1/(n + k). Half of the
    difference, (n - r)/(2(r + k)(n + k)), is least at r = n - 1 and n + k = N.
    """

    def __init__(self, num_symbols: int, num_positions: int) -> None:
        m = whole("num_symbols", num_symbols)
        N = whole("num_positions", num_positions)
        if N < 2:
            raise InputError(f"a prefix and a suffix need N >= 2, the table has N = {N}")
        self.num_symbols = m
        self.num_positions = N
        self.code_width = m * N
        self.width = 2 * (m + 1) * N
        self.num_sequences = S = sum(m**j for j in range(1, N + 1))
        self.units = (
            slice(0, S),
            slice(S, 2 * S),
            slice(2 * S, 2 * S + N),
            slice(2 * S + N, 2 * S + 2 * N),
        )
        self.watched = torch.arange(N) * m + ALARM_SYMBOL
        self.ramp = 2.0 ** -math.ceil(math.log2(4 * N))
        self.least_excess = 1 / (2 * N * (N - 1))

    def block(self, number: int) -> slice:
        """Block 1 (w), 2 (x), 3 (y) or 4 (z) of the residual stream."""
        starts = [0, self.code_width, self.width // 2, self.width - self.num_positions, self.width]
        return slice(starts[number - 1], starts[number])

    def move(self, *moves: tuple[int, int]) -> Float[Tensor, "width width"]:
        """The sum of E_ab over moves (a, b): x E_ab has block a of x at block b, else zeros."""
        matrix = torch.zeros(self.width, self.width, dtype=torch.float64)
        for source, target in moves:
            matrix[self.block(source), self.block(target)].fill_diagonal_(1)
        return matrix

    def code(self, tokens: Int[Tensor, "*batch length"]) -> Float[Tensor, "*batch d_1"]:
        """1_a, the sum of phi(te(a_i, i)): ones at every (a_i, i), in the order (i - 1) m + a."""
        ones = one_hot(tokens, self.num_symbols).double().flatten(-2)
        return pad(ones, (0, self.code_width - ones.shape[-1]))


def alarm_gain(table: FunctionTable, constant: float) -> float:
    """U, the least power of two >= 9/8 (C + max f_1 + sum max(0, -f_1)) / (mu* - sl).

    f_1 is f's first coordinate and sl = mu*/4 the excess that raises no alarm yet. An alarm then
    outweighs C, the value wanted and all that detectors, each between 0 and f(a), can take from it.
    A power of two, so that the product is exact; the eighth leaves room for rounding.
    """
    check_in("(0, inf)", constant=constant)
    first = torch.cat(table.values)[:, 0]
    opposed = constant + float(first.max() - first.clamp(max=0).sum())
    return 2.0 ** math.ceil(
        math.log2(1.125 * opposed / (0.75 * Layout(table.num_symbols, table.longest).least_excess))
    )


def compressible_network(table: FunctionTable) -> Transformer:
    """The network of Lemma 1: it computes f, and so it does after ``summary_policy``.

    Its detectors fire for c * 1_a whatever the scale c >= 1/N, so it does not matter that a
    one-slot cache changes the average's denominator from n + k to 1 + k.
    """
    return _network(table, 0.0)


def incompressible_network(table: FunctionTable, *, constant: float) -> Transformer:
    """The network of Lemma 2: it computes f, but after any r(n) < n slots errs by more than C.

    For every prefix, finite cache and k some suffix has || M([a, b]) - M_{C,a}(b) || > C.

    ``table`` is f, any function on sequences of 1 to N >= 2 symbols; ``constant`` C > 0, in its
    unit.
    """
    return _network(table, alarm_gain(table, constant))


def summary_policy(num_symbols: int, num_positions: int) -> d.Policy:
    """Lemma 1's policy, r(n) = 1: key 0, value (sum_i v_i) E_33 + v_n E_24."""
    layout = Layout(num_symbols, num_positions)
    return d.one_slot_policy(layout.move((3, 3)), layout.move((2, 4)))


def matrices(network: Transformer) -> dict[str, Tensor]:
    """Every matrix of a network by name, the embedding with a row for each (symbol, position)."""
    by_name = {"te": network.embedding.flatten(0, 1)}
    for number, block in enumerate(network.blocks, 1):
        ffn = block.feed_forward
        named = {
            "W_O": block.w_o,
            "W_1": ffn.w_1,
            "b_1": ffn.b_1[:, None],
            "W_2": ffn.w_2,
            "b_2": ffn.b_2[:, None],
        }
        for index, head in enumerate(block.heads, 1):
            for name in ("W_Q", "W_K", "W_V"):
                named[f"head {index} {name}"] = getattr(head, name.lower())
        for name, matrix in named.items():
            by_name[f"block {number} {name}"] = matrix
    return by_name


def differing_rows(first: Transformer, second: Transformer) -> dict[str, tuple[int, ...]]:
    """The rows, from 0, in which two networks differ, by matrix; biases are columns."""
    pairs = zip(matrices(first).items(), matrices(second).values(), strict=True)
    differing: dict[str, tuple[int, ...]] = {}
    for (name, matrix), other in pairs:
        rows = (matrix != other).any(-1).nonzero().flatten().tolist()
        if rows:
            differing[name] = tuple(rows)
    return differing


def value_error(network: Transformer, table: FunctionTable) -> float:
    """The largest || M(a) - f(a) || over every sequence a of 1 to N symbols."""
    inputs = (sequences(table.num_symbols, length) for length in range(1, table.longest + 1))
    return max(float((network(rows) - table(rows)).norm(dim=-1).max()) for rows in inputs)


def _network(table: FunctionTable, gain: float) -> Transformer:
    layout = Layout(table.num_symbols, table.longest)
    m = layout.num_symbols
    N = layout.num_positions
    symbols = torch.eye(m, dtype=torch.float64)
    positions = torch.eye(N, dtype=torch.float64)
    embedding = torch.cat([symbols[:, None].expand(m, N, m), positions.expand(m, N, N)], -1)
    # te(a, i) = [e_a, e_i] -> [e_(a,i), e_i, 0, 0]: unit (a, i) is relu(te_a + te_(m+i) - 1)
    w_1 = torch.cat([symbols.repeat(1, N), positions.repeat_interleave(m, 1)])
    codes = torch.cat([torch.eye(m * N, dtype=torch.float64), positions.repeat_interleave(m, 0)], 1)
    w_2 = pad(codes, (0, layout.width // 2))
    b_2 = torch.zeros(layout.width, dtype=torch.float64)
    nothing = torch.zeros(m + N, m + N, dtype=torch.float64)
    first = d.averaging_block(
        nothing, nothing, FeedForward(w_1, -torch.ones_like(w_2[:, 0]), w_2, b_2)
    )
    last = _detector_map(layout, table, gain)
    # values are [w, x, w, 0], of which W_O adds blocks 3 and 4 to the stream: y becomes the average
    # of phi, and z stays 0 unless a cache puts values there
    second = d.averaging_block(
        layout.move((1, 1), (2, 2), (1, 3)), layout.move((3, 3), (4, 4)), last
    )
    return Transformer(embedding, (first, second))


def _detector_map(layout: Layout, table: FunctionTable, gain: float) -> FeedForward:
    """[w, x, y, z] -> sum_a f(a) [relu(h_a) - relu(h_a - q)] / q, and alarms in coordinate 1.

    Detector of a sequence a of length j: h_a = <1_a, y> - ((j - 1/2)/j) sum(y) + N (x_j - 1), which
    is c/2 at y = c 1_a, x = e_j and at most -c/2 at y = c 1_b for other sequences b of j symbols.
    Alarms of each j: relu(y_(t,j) - 1/j - sl + N (x_j - 1)) and relu(-y_(t,j) - sl), times U =
    gain.
    """
    N = layout.num_positions
    q = layout.ramp
    slack = layout.least_excess / 4
    rise, saturate, above, below = layout.units
    w_1 = torch.zeros(layout.width, below.stop, dtype=torch.float64)
    b_1 = torch.full((below.stop,), -float(N), dtype=torch.float64)
    w_2 = torch.zeros(below.stop, table.d_out, dtype=torch.float64)
    x = w_1[layout.block(2)]
    y = w_1[layout.block(3)]
    start = 0
    for j in range(1, N + 1):
        stop = start + layout.num_symbols**j
        y[:, start:stop] = layout.code(sequences(layout.num_symbols, j)).T - (j - 0.5) / j
        # with the bias -N this is N (x_j - 1): 0 at position j; elsewhere the detectors stay silent
        x[j - 1, start:stop] = N
        start = stop
    w_1[:, saturate] = w_1[:, rise]
    b_1[saturate] -= q
    # f(a) [relu(h) - relu(h - q)] / q: from 0 to f(a) as h rises by q, and no further
    w_2[rise] = torch.cat(table.values) / q
    w_2[saturate] = -w_2[rise]
    y[layout.watched, torch.arange(above.start, above.stop)] = 1.0
    y[layout.watched, torch.arange(below.start, below.stop)] = -1.0
    x[:, above] = N * torch.eye(N, dtype=torch.float64)
    b_1[above] -= 1 / torch.arange(1, N + 1, dtype=torch.float64) + slack
    b_1[below] = -slack
    w_2[above.start :, 0] = gain
    return FeedForward(w_1, b_1, w_2, torch.zeros(table.d_out, dtype=torch.float64))


def certified_bounds(network: Transformer, budget: d.Budget) -> pd.DataFrame:
    """The bound for every n with r(n) < n and every k >= 1, n + k <= N: columns n, k, r, bound.

    With bounds above C the network is not (N, C, r)-compressible.
    InputError for a budget r(n) equal to n everywhere; r(n) = 0 is allowed.
    """
    longest = network.num_positions
    cases = [
        (n, k, budget(n))
        for n in range(1, longest)
        if budget(n) < n
        for k in range(1, longest - n + 1)
    ]
    if not cases:
        raise InputError(
            f"the budget keeps all of every prefix of 1 to {longest - 1} tokens: "
            "nothing is compressed"
        )
    return pd.DataFrame(
        [(*case, certified_bound(network, *case)) for case in cases],
        columns=["n", "k", "r", "bound"],
    )


def certified_bound(
    network: Transformer, prefix_len: int, suffix_len: int, num_slots: int
) -> float:
    """The bound at one (n, k, r): after every finite cache some suffix errs by this or more.

    In exact arithmetic. With e_1 the alarms' direction, an error is at least its first coordinate,
        min over v of max over the two suffixes of U [alarms of j = n + k]
        + sum over a of min(0, f(a)_1) - max over sequences c of n + k symbols of M(c)_1.
    The other alarms are not negative, and each detector's answer lies in [0, 1].

    ValueError unless 0 <= r < n, k >= 1, n + k <= N and the weights are those of Construction D.
    """
    n = prefix_len
    k = suffix_len
    r = num_slots
    if not (0 <= r < n and k >= 1 and n + k <= network.num_positions):
        raise ValueError(
            f"the bound needs 0 <= r < n, k >= 1 and n + k <= N, got n = {n}, k = {k}, r = {r}"
        )
    check_argument(network)
    ffn = network.blocks[-1].feed_forward
    (rise, saturate, *_) = _layout(network).units
    # a pair relu(h) - relu(h - q) reaches at most q, which is the difference of its biases
    steps = ffn.w_2[rise, 0] * (ffn.b_1[rise] - ffn.b_1[saturate])
    largest = float(network(sequences(network.num_symbols, n + k))[:, 0].max())
    return (
        least_alarm(network, n + k, r + k) + float(ffn.b_2[0] + steps.clamp(max=0).sum()) - largest
    )


def least_alarm(network: Transformer, position: int, num_averaged: int) -> float:
    """The least larger alarm of two suffixes: x = e_j, y_(t,j) = (v + [b_k = t])/(r + k).

    Suffixes that end in t raise U (y - 1/j - sl) above, those that do not U (-y - sl) below. One
    line rises in v, the other falls; the largest of both is least where they cross. ``position`` is
    j = n + k, ``num_averaged`` r + k, the number of slots that attention averages.
    """
    layout = _layout(network)
    ffn = network.blocks[-1].feed_forward
    j = position - 1
    y = layout.block(3).start + int(layout.watched[j])
    x = layout.block(2).start + j
    lines = []
    for side, last_is_t in zip(layout.units[2:], (1, 0), strict=True):
        unit = side.start + j
        slope = float(ffn.w_1[y, unit]) / num_averaged
        gain = float(ffn.w_2[unit, 0])
        lines.append(
            (gain * slope, gain * (slope * last_is_t + float(ffn.b_1[unit] + ffn.w_1[x, unit])))
        )
    # the lines up v + above and down v + below are equal at v = (below - above) / (up - down)
    (up, above), (down, below) = lines
    return max(0.0, (up * below - down * above) / (up - down)) if down < 0 < up else 0.0


def check_argument(network: Transformer) -> None:
    """Raise ValueError, naming what does not hold, unless the bound's argument holds."""
    layout = _layout(network)
    (first, last) = network.blocks
    (head,) = last.heads
    ffn = last.feed_forward
    (rise, saturate, above, below) = layout.units
    if ffn.w_1.shape != (layout.width, below.stop):
        raise ValueError(
            f"not a network of Construction D: its last map has the shape {tuple(ffn.w_1.shape)}"
        )
    gains = ffn.w_2[above.start :]
    y = layout.block(3)
    z = layout.block(4)
    one = torch.eye(layout.num_positions, dtype=torch.float64)
    # all that alarms read; what they may read is taken out, so that nothing must be left
    read = ffn.w_1[:, above].bool() | ffn.w_1[:, below].bool()
    read[y.start + layout.watched, torch.arange(layout.num_positions)] = False
    read[layout.block(2)] &= ~one.bool()
    codes = (
        torch.eye(layout.code_width, dtype=torch.float64)
        .unflatten(0, (-1, network.num_symbols))
        .transpose(0, 1)
    )
    claimed = torch.cat([codes, one.expand(network.num_symbols, -1, -1)], -1)
    claims = {
        "block 1 ignores its heads": not first.w_o.any(),
        "block 1 gives codes and positions": torch.equal(
            first.feed_forward(network.embedding), pad(claimed, (0, layout.width // 2))
        ),
        "attention in block 2 is uniform": not head.w_q.any(),
        "a cache reaches y and z alone": not last.w_o[:, : y.start].any(),
        "a token adds its code to y": torch.equal(
            head.w_v @ last.w_o[:, y], layout.move((1, 3))[:, y]
        ),
        "no unit reads z": not ffn.w_1[z].any(),
        "detectors are pairs": torch.equal(ffn.w_1[:, rise], ffn.w_1[:, saturate])
        and torch.equal(ffn.w_2[rise], -ffn.w_2[saturate])
        and bool((ffn.b_1[rise] > ffn.b_1[saturate]).all()),
        "alarms only add to the first coordinate": bool((gains[:, 0] >= 0).all())
        and not gains[:, 1:].any(),
        "an alarm reads y_(t,j) and x_j alone": not read.any(),
    }
    failed = [claim for claim, holds in claims.items() if not holds]
    if failed:
        raise ValueError(
            f"not a network of Construction D: it does not hold that {', '.join(failed)}"
        )


def _layout(network: Transformer) -> Layout:
    return Layout(network.num_symbols, network.num_positions)
