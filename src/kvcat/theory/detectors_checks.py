"""Construction D checked on every input it can meet: its values, its one slot, and each unit of its maps.

References: KV-CAT, appendix "Compressible Transformers for General Functions".
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from kvcat.theory.compression import CompressedModel, WorstCase, compressibility
from kvcat.theory.definitions import FeedForward, Transformer, sequences
from kvcat.theory.detectors import Layout, layout_of, one_slot_policy
from kvcat.theory.functions import FunctionTable
from kvcat.types import Float, Tensor


def verify_values(network: Transformer, table: FunctionTable) -> float:
    """The largest || M(a) - f(a) || over every sequence a of 1 to N symbols.

    Raises:
        ValueError: the network and the table differ in alphabet or N.
    """
    if (network.num_symbols, network.num_positions) != (table.num_symbols, table.longest):
        raise ValueError(
            f"the network has {network.num_symbols} symbols and {network.num_positions} positions, "
            f"the table {table.num_symbols} and {table.longest}"
        )
    inputs = (sequences(table.num_symbols, length) for length in range(1, table.longest + 1))
    return max(float(torch.linalg.vector_norm(network(some) - table(some), dim=-1).max()) for some in inputs)


def verify_compressible(network: Transformer) -> WorstCase:
    """The largest || M([a, b]) - M_{C,a}(b) || behind ``one_slot_policy``, over every split of every sequence."""
    return compressibility(network, one_slot_policy(network.num_symbols, network.num_positions), lambda _: 1)


def num_splits(num_symbols: int, longest: int) -> int:
    """Number of pairs of a prefix and a suffix, of a symbol each at least and of N together at most."""
    return sum((length - 1) * num_symbols**length for length in range(2, longest + 1))


@dataclass(frozen=True)
class Widths:
    """Sizes of Construction D, in closed form.

    With d_0 = m + N, d = 2(m + 1)N, S = sum_(j<=N) m^j: the embedding's width d_0, the first map's hidden width mN,
    the residual stream's d behind it, the second map's hidden width 2S + 2N, and the number of all entries,
    m N d_0 + (4 d_0^2 + mN (d_0 + 1 + d) + d) + (4 d^2 + (2S + 2N)(d + 1 + d_out) + d_out).
    """

    embedding: int
    first_hidden: int
    residual: int
    second_hidden: int
    num_parameters: int


def widths(num_symbols: int, longest: int, d_out: int) -> Widths:
    """The sizes of both networks for functions on sequences of 1 to N of m symbols."""
    layout = Layout(num_symbols, longest)
    d_0, d, codes, units = num_symbols + longest, layout.width, layout.code_width, layout.num_units
    first = 4 * d_0**2 + codes * (d_0 + 1 + d) + d
    second = 4 * d**2 + units * (d + 1 + d_out) + d_out
    return Widths(d_0, codes, d, units, codes * d_0 + first + second)


@dataclass(frozen=True)
class Units:
    """What the hidden units of the last map say: detectors scaled to [0, 1], alarms as they are (before U)."""

    detectors: Float[Tensor, "*batch sequences"]
    alarms: Float[Tensor, "*batch two_N"]


def units(network: Transformer, hidden: Float[Tensor, "*batch width"]) -> Units:
    """The units' answers to rows [w, x, y, z]: [relu(h_a) - relu(h_a - q)] / q by sequence, then the 2N alarms.

    For every real row a detector's answer lies in [0, 1] and an alarm's is not negative (in exact arithmetic: rows of
    1e15 and more lose the digits they read).
    """
    layout, ffn = layout_of(network), network.blocks[-1].feed_forward
    rise, saturate = layout.detectors
    active = torch.relu(hidden @ ffn.w_1 + ffn.b_1)
    ramp = ffn.b_1[rise] - ffn.b_1[saturate]
    return Units((active[..., rise] - active[..., saturate]) / ramp, active[..., layout.alarms[0].start :])


def exposed(network: Transformer) -> Transformer:
    """The network with the identity, relu(x) - relu(-x), for its last map: it returns the rows that map would read."""
    last = network.blocks[-1]
    one = torch.eye(last.w_o.shape[1], dtype=torch.float64)
    identity = FeedForward(torch.cat([one, -one], 1), 0 * one.repeat(1, 2)[0], torch.cat([one, -one]), 0 * one[0])
    return replace(network, blocks=(*network.blocks[:-1], replace(last, feed_forward=identity)))


def rows_of_splits(network: Transformer) -> Iterator[tuple[int, int, Tensor]]:
    """Every row that the last map reads behind one slot: (length, index of the sequence of that length, row)."""
    bare, policy = exposed(network), one_slot_policy(network.num_symbols, network.num_positions)
    m = network.num_symbols
    for n in range(1, network.num_positions):
        for number, prefix in enumerate(sequences(m, n)):
            behind = CompressedModel(bare, policy, prefix)
            for k in range(1, network.num_positions - n + 1):
                rows = behind(sequences(m, k))
                yield from ((n + k, number * m**k + index, row) for index, row in enumerate(rows))


@dataclass(frozen=True)
class UnitErrors:
    """Largest deviations of the feed-forward maps from what they claim, over every input the network can meet.

    Attributes:
        codes: the first map from [e_(a,i), e_i, 0, 0], over every (a, i).
        whole: a detector from 1 at its own sequence and 0 at every other, over whole sequences.
        one_slot: the same behind one slot, over every split.
        alarm: the largest alarm on a whole sequence (none should sound).
        num_inputs: number of rows of the last map looked at.
    """

    codes: float
    whole: float
    one_slot: float
    alarm: float
    num_inputs: int


def verify_units(network: Transformer) -> UnitErrors:
    """Every unit of both feed-forward maps on every whole sequence and every split behind ``one_slot_policy``."""
    layout = layout_of(network)
    m, N = layout.num_symbols, layout.num_positions
    wanted = torch.eye(layout.num_sequences, dtype=torch.float64)
    bare = exposed(network)
    rows = torch.cat([bare(sequences(m, length)) for length in range(1, N + 1)])
    said = units(network, rows)
    starts = [sum(m**shorter for shorter in range(1, length)) for length in range(N + 1)]
    found = [(starts[length] + index, row) for length, index, row in rows_of_splits(network)]
    behind = units(network, torch.stack([row for _, row in found])).detectors
    targets = wanted[torch.tensor([index for index, _ in found])]
    return UnitErrors(
        codes=code_error(network),
        whole=float((said.detectors - wanted).abs().max()),
        one_slot=float((behind - targets).abs().max()),
        alarm=float(said.alarms.max()),
        num_inputs=rows.shape[0] + behind.shape[0],
    )


def code_error(network: Transformer) -> float:
    """The first map's largest deviation from te(a, i) -> [e_(a,i), e_i, 0, 0], over every (a, i)."""
    layout = layout_of(network)
    m, N = layout.num_symbols, layout.num_positions
    outputs = network.blocks[0].feed_forward(network.embedding)
    worst = 0.0
    for a in range(m):
        for i in range(1, N + 1):
            claimed = torch.zeros(layout.width, dtype=torch.float64)
            claimed[(i - 1) * m + a] = 1.0
            claimed[layout.code_width + i - 1] = 1.0
            worst = max(worst, float((outputs[a, i - 1] - claimed).abs().max()))
    return worst
