"""Lemma 2 certified: a lower bound, for every policy at once, on the error of the incompressible network.

In the last block W_Q = 0, so a cache of r slots acts through the sum of its values alone, and W_O
lets it into y and z, of which the last map reads y. Take two suffixes of k tokens that differ in the
last one, t or not: y_(t,n+k) is (v + 1)/(r + k) and v/(r + k) with one v, whatever the cache. The
larger of their two alarms is least where they are equal, which is exact; what detectors and other
alarms can take from it is read from the weights.

References: KV-CAT, appendix "Compressible Transformers for General Functions", the lemma of
non-compressibility.
"""

import pandas as pd
import torch

from kvcat.errors import InputError
from kvcat.theory.definitions import Budget, Transformer, sequences
from kvcat.theory.theorem import Layout


def certified_bounds(network: Transformer, budget: Budget) -> pd.DataFrame:
    """The bound for every n with r(n) < n and every k >= 1, n + k <= N: columns n, k, r, bound.

    For every prefix of n tokens, every finite cache of r(n) slots and each k there is a suffix at
    which the error is at least the bound, in exact arithmetic. (In float64 slots of 1e15 and more
    lose the digits that the units read.) With bounds above C the network is not
    (N, C, r)-compressible.

    Args:
        network: the network of Lemma 2.
        budget: r(n), 0 <= r(n) <= n; an empty cache is a policy too.

    Raises:
        InputError: a budget outside 0 to n, or with r(n) = n at every n.
    """
    longest = network.num_positions
    for n in range(1, longest):
        if not 0 <= budget(n) <= n:
            raise InputError(f"a prefix of {n} tokens can have 0 to {n} slots, the budget says {budget(n)}")
    pairs = [(n, k) for n in range(1, longest) if budget(n) < n for k in range(1, longest - n + 1)]
    if not pairs:
        raise InputError(f"the budget keeps all of every prefix of 1 to {longest - 1} tokens: nothing is compressed")
    return pd.DataFrame(
        [{"n": n, "k": k, "r": budget(n), "bound": certified_bound(network, n, k, budget(n))} for n, k in pairs]
    )


def certified_bound(network: Transformer, prefix_len: int, suffix_len: int, num_slots: int) -> float:
    """The bound at one (n, k, r): max over suffixes of || M([a, b]) - M_{C,a}(b) || is at least this, for every C, a.

    With e_1 the alarms' direction, an error is at least its first coordinate,
        min over v of max over the two suffixes of U [alarms of j = n + k]
        + sum over a of min(0, f(a)_1) - max over sequences c of n + k symbols of M(c)_1.
    The other alarms are not negative, and each detector's answer lies in [0, 1].

    Raises:
        ValueError: r not in 0 to n - 1, k < 1 or n + k > N; or the weights are not those of
            Construction D, so that the argument does not hold.
    """
    n, k, r = prefix_len, suffix_len, num_slots
    if not (0 <= r < n and k >= 1 and n + k <= network.num_positions):
        raise ValueError(f"the bound needs 0 <= r < n, k >= 1 and n + k <= N, got n = {n}, k = {k}, r = {r}")
    check_argument(network)
    layout, ffn = Layout(network.num_symbols, network.num_positions), network.blocks[-1].feed_forward
    rise, saturate = layout.detectors
    steps = ffn.w_2[rise, 0] * (ffn.b_1[rise] - ffn.b_1[saturate])
    largest = float(network(sequences(network.num_symbols, n + k))[:, 0].max())
    return least_alarm(network, n + k, r + k) + float(ffn.b_2[0] + steps.clamp(max=0).sum()) - largest


def least_alarm(network: Transformer, position: int, num_averaged: int) -> float:
    """The least larger alarm of the two suffixes: x = e_j, y_(t,j) = (v + [b_k = t])/(r + k), v real.

    Suffixes that end in t raise U (y - 1/j - sl) above, those that do not U (-y - sl) below. One line
    rises in v, the other falls; the largest of both is least where they cross.

    Args:
        network: a network of Construction D.
        position: j = n + k.
        num_averaged: r + k, the number of slots that attention averages.
    """
    layout, ffn = Layout(network.num_symbols, network.num_positions), network.blocks[-1].feed_forward
    y, x = layout.block(3).start + int(layout.watched[position - 1]), layout.block(2).start + position - 1
    slopes, heights = [], []
    for side, last_is_t in zip(layout.alarms, (1, 0), strict=True):
        unit = side.start + position - 1
        slope, gain = float(ffn.w_1[y, unit]) / num_averaged, float(ffn.w_2[unit, 0])
        slopes.append(gain * slope)
        heights.append(gain * (slope * last_is_t + float(ffn.b_1[unit] + ffn.w_1[x, unit])))
    if not slopes[1] < 0 < slopes[0]:
        return 0.0
    return max(0.0, (slopes[0] * heights[1] - slopes[1] * heights[0]) / (slopes[0] - slopes[1]))


def check_argument(network: Transformer) -> None:
    """Check that the weights are such that the argument of the bound holds.

    Raises:
        ValueError: naming what does not hold.
    """
    layout, (first, last) = Layout(network.num_symbols, network.num_positions), network.blocks
    (head,), ffn, (above, below) = last.heads, last.feed_forward, layout.alarms
    if ffn.w_1.shape != (layout.width, below.stop):
        raise ValueError(f"not a network of Construction D: its last map has the shape {tuple(ffn.w_1.shape)}")
    rise, saturate = layout.detectors
    gains, y, z = ffn.w_2[above.start :], layout.block(3), layout.block(4)
    read = (ffn.w_1[:, above].bool() | ffn.w_1[:, below].bool()).clone()
    read[y.start + layout.watched, torch.arange(layout.num_positions)] = False
    read[layout.block(2)] &= ~torch.eye(layout.num_positions, dtype=torch.bool)
    positions = torch.eye(layout.num_positions, dtype=torch.float64).expand(network.num_symbols, -1, -1)
    codes = torch.eye(layout.code_width, dtype=torch.float64).unflatten(0, (-1, network.num_symbols)).transpose(0, 1)
    claimed = torch.cat([codes, positions, torch.zeros_like(codes), torch.zeros_like(positions)], -1)
    claims = {
        "block 1 ignores its heads": not first.w_o.any(),
        "block 1 gives codes and positions": torch.equal(first.feed_forward(network.embedding), claimed),
        "attention in block 2 is uniform": not head.w_q.any(),
        "a cache reaches y and z alone": not last.w_o[:, : y.start].any(),
        "a token adds its code to y": torch.equal(head.w_v @ last.w_o[:, y], layout.move(1, 3)[:, y]),
        "no unit reads z": not ffn.w_1[z].any(),
        "detectors are pairs": torch.equal(ffn.w_1[:, rise], ffn.w_1[:, saturate])
        and torch.equal(ffn.w_2[rise], -ffn.w_2[saturate])
        and bool((ffn.b_1[rise] > ffn.b_1[saturate]).all()),
        "alarms only add to the first coordinate": bool((gains[:, 0] >= 0).all()) and not gains[:, 1:].any(),
        "an alarm reads y_(t,j) and x_j alone": not read.any(),
    }
    failed = [claim for claim, holds in claims.items() if not holds]
    if failed:
        raise ValueError(f"not a network of Construction D: it does not hold that {', '.join(failed)}")
