"""Lemma 2 certified: a lower bound, for every policy at once, on the error of the incompressible network.

In the last block W_Q = 0, so a cache of r slots acts through the sum of its values alone, and W_O lets it into y and z,
of which the last map reads y. Take two suffixes of k tokens that differ in the last one, t or not: y_(t,n+k) is
(v + 1)/(r + k) and v/(r + k) with one v, whatever the cache. The least alarm that the louder of the two raises is the
minimum over v of a maximum of affine functions, which is exact; what detectors and other alarms can take from it is
read from the weights.

References: KV-CAT, appendix "Compressible Transformers for General Functions", the lemma of non-compressibility.
"""

from dataclasses import dataclass

import torch

from kvcat.errors import InputError
from kvcat.theory.compression import Budget
from kvcat.theory.definitions import Transformer, sequences
from kvcat.theory.detectors import ALARM_SYMBOL, Layout, layout_of
from kvcat.theory.detectors_checks import code_error
from kvcat.types import Float, Tensor


@dataclass(frozen=True)
class Certificate:
    """Every policy's error at these lengths, at some suffix of each prefix, is at least ``bound``.

    Attributes:
        bound: the lower bound, in the unit of f; it excludes the constant C if it is above it.
        constant: C.
        prefix_len: n, where the bound is least.
        suffix_len: k there.
        num_slots: r(n) there.
        num_lengths: number of pairs (n, k) with r(n) < n that it covers.
    """

    bound: float
    constant: float
    prefix_len: int
    suffix_len: int
    num_slots: int
    num_lengths: int

    @property
    def margin(self) -> float:
        """Bound - C."""
        return self.bound - self.constant


def verify_incompressible(network: Transformer, constant: float, budget: Budget) -> Certificate:
    """The least certified error over every n with r(n) < n and every k >= 1, n + k <= N.

    It holds for every prefix and every finite cache of r(n) slots, in exact arithmetic: for each k there is a suffix at
    which the error is at least the bound. (Run in float64, sums beyond about 1e15 lose the digits that detectors and
    alarms read, and such a cache can pass.) The network is not (N, C, r)-compressible if the margin is not negative.

    Args:
        network: the network of Lemma 2.
        constant: C, in the unit of f.
        budget: r(n), 0 <= r(n) <= n; an empty cache is a policy too.

    Raises:
        ValueError: a budget outside 0 to n, or with r(n) = n at every n (nothing is compressed then).
    """
    lengths = compressed_lengths(network.num_positions, budget)
    bounds = {(n, k, r): certified_bound(network, n, k, r) for n, k, r in lengths}
    n, k, r = min(bounds, key=lambda at: bounds[at])
    return Certificate(bounds[n, k, r], constant, n, k, r, len(bounds))


def compressed_lengths(longest: int, budget: Budget) -> list[tuple[int, int, int]]:
    """Every (n, k, r(n)) with r(n) < n, k >= 1, n + k <= N.

    Raises:
        InputError: a budget outside 0 to n, or with r(n) = n at every n.
    """
    slots = {n: budget(n) for n in range(1, longest)}
    for n, r in slots.items():
        if not 0 <= r <= n:
            raise InputError(f"a prefix of {n} tokens can have 0 to {n} slots, the budget says {r}")
    found = [(n, k, r) for n, r in slots.items() if r < n for k in range(1, longest - n + 1)]
    if not found:
        raise InputError(f"the budget keeps all of every prefix of 1 to {longest - 1} tokens: nothing is compressed")
    return found


def certified_bound(network: Transformer, prefix_len: int, suffix_len: int, num_slots: int) -> float:
    """The bound at one (n, k, r): max over suffixes of || M([a, b]) - M_{C,a}(b) || is at least this, for every C, a.

    With e_1 the alarms' direction, an error is at least its first coordinate,
        min over v of max over the two suffixes of U [alarms of j = n + k]
        + sum over a of min(0, f(a)_1) - max over sequences c of n + k symbols of M(c)_1.
    The other alarms are not negative, and each detector's answer lies in [0, 1].

    Raises:
        ValueError: r not in 0 to n - 1, k < 1 or n + k > N; or the weights are not those of Construction D, so that
            the argument does not hold.
    """
    n, k, r = prefix_len, suffix_len, num_slots
    if not (0 <= r < n and k >= 1 and n + k <= network.num_positions):
        raise ValueError(f"the bound needs 0 <= r < n, k >= 1 and n + k <= N, got n = {n}, k = {k}, r = {r}")
    layout, ffn = layout_of(network), network.blocks[-1].feed_forward
    check_argument(network)
    rise, saturate = layout.detectors
    steps = ffn.w_2[rise, 0] * (ffn.b_1[rise] - ffn.b_1[saturate])
    largest = float(network(sequences(network.num_symbols, n + k))[:, 0].max())
    return least_alarm(network, n + k, r + k) + float(ffn.b_2[0] + steps.clamp(max=0).sum()) - largest


def least_alarm(network: Transformer, position: int, num_averaged: int) -> float:
    """The least alarm that the louder of the two suffixes raises: x = e_j, y_(t,j) = (v + [b_k = t])/(r + k), v real.

    Args:
        network: a network of Construction D.
        position: j = n + k.
        num_averaged: r + k, the number of slots that attention averages.
    """
    layout, ffn = layout_of(network), network.blocks[-1].feed_forward
    watched = layout.block(3).start + _watched(layout)[position - 1]
    slopes, offsets = [0.0], [0.0]  # an alarm is relu of a line; at most one of a position's two sounds
    for last_is_t in (0, 1):
        for side in layout.alarms:
            unit = side.start + position - 1
            weight, gain = float(ffn.w_1[watched, unit]) / num_averaged, float(ffn.w_2[unit, 0])
            at_x = float(ffn.b_1[unit] + ffn.w_1[layout.block(2).start + position - 1, unit])
            slopes.append(gain * weight)
            offsets.append(gain * (weight * last_is_t + at_x))
    return least_maximum(torch.tensor(slopes, dtype=torch.float64), torch.tensor(offsets, dtype=torch.float64))


def least_maximum(slopes: Float[Tensor, " lines"], offsets: Float[Tensor, " lines"]) -> float:
    """The minimum over v of max_i (slopes_i v + offsets_i).

    It is the highest of the flat lines and of the crossings of a falling line with a rising one.

    Raises:
        ValueError: the maximum has no minimum (no flat line, and all lines rise or all fall).
    """
    flat, up, down = slopes == 0, slopes > 0, slopes < 0
    rising, falling = slopes[up][:, None], slopes[down]
    crossings = (rising * offsets[down] - falling * offsets[up][:, None]) / (rising - falling)
    heights = torch.cat([offsets[flat], crossings.flatten()])
    if not heights.numel():
        raise ValueError("a maximum of lines that all rise, or all fall, has no minimum")
    return float(heights.max())


def check_argument(network: Transformer) -> None:
    """That the weights are such that the bound's argument holds.

    Raises:
        ValueError: naming what does not hold.
    """
    layout, (first, last) = layout_of(network), network.blocks
    (head,), ffn = last.heads, last.feed_forward
    rise, saturate = layout.detectors
    above, below = (ffn.w_1[:, side] for side in layout.alarms)
    gains = ffn.w_2[layout.alarms[0].start :]
    y, z = layout.block(3), layout.block(4)
    watched = torch.zeros(layout.width, layout.num_positions, dtype=torch.bool)
    watched[y.start + _watched(layout), torch.arange(layout.num_positions)] = True
    watched[layout.block(2)] = torch.eye(layout.num_positions, dtype=torch.bool)
    own = head.w_v @ last.w_o[:, y]
    claims = {
        "block 1 ignores its heads": not first.w_o.any(),
        "block 1 gives codes and positions": code_error(network) == 0,
        "attention in block 2 is uniform": not head.w_q.any(),
        "a cache reaches y and z alone": not last.w_o[:, : y.start].any(),
        "a token adds its code to y": torch.equal(own, layout.move(1, 3)[:, y]),
        "no unit reads z": not ffn.w_1[z].any(),
        "detectors are pairs": torch.equal(ffn.w_1[:, rise], ffn.w_1[:, saturate])
        and torch.equal(ffn.w_2[rise], -ffn.w_2[saturate])
        and bool((ffn.b_1[rise] > ffn.b_1[saturate]).all()),
        "alarms only add to the first coordinate": bool((gains[:, 0] >= 0).all()) and not gains[:, 1:].any(),
        "an alarm reads y_(t,j) and x_j alone": not ((above.bool() | below.bool()) & ~watched).any(),
    }
    failed = [claim for claim, holds in claims.items() if not holds]
    if failed:
        raise ValueError(f"not a network of Construction D: it does not hold that {', '.join(failed)}")


def _watched(layout: Layout) -> Tensor:
    """Coordinates (t, j) within block 3, for j = 1 to N."""
    return torch.arange(layout.num_positions) * layout.num_symbols + ALARM_SYMBOL
