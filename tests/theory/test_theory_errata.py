"""The paper's statements that fail as printed or are loose: each failure, as a number.

``docs/theory.md`` lists them. The constructions are built here as the paper prints them.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch.nn.functional import one_hot, pad

from kvcat.theory import (
    definition_optimum,
    hull_lemma_bound,
    incompressible_network,
    optimal_error,
    paper_bound,
    sharp_constant,
)
from kvcat.theory import definitions as d
from kvcat.theory.histogram import (
    block_moves,
    compressible_histogram,
    histogram,
    incompressible_histogram,
)
from kvcat.types import Float, Int, Tensor

TOKENS = torch.tensor([0, 0, 1, 2])  # the input 1123


def nilpotent_output(tokens: Int[Tensor, " n"], num_symbols: int) -> Float[Tensor, " m"]:
    """Proposition 1 with W_V = W_O = ((0, 0), (I, 0)).

    Its square is 0, and so is the output, which should be the histogram.
    """
    moved = block_moves(2, num_symbols, (2, 1))
    return _with_attention(
        incompressible_histogram(num_symbols, max(2, len(tokens))), moved, moved
    )(tokens)


def unmoved_output(tokens: Int[Tensor, " n"], num_symbols: int) -> Float[Tensor, " m"]:
    """Proposition 2 with the printed W_V, which moves nothing to y, and W_O = I: 0."""
    return _printed_one_slot(tokens, block_moves(4, num_symbols, (1, 1), (2, 2), (3, 1)))(tokens)


def doubled_blocks(tokens: Int[Tensor, " n"], num_symbols: int) -> Float[Tensor, " four_m"]:
    """Proposition 2 with W_V transposed and W_O = I: the last token's blocks before the last map.

    Claimed are (e_a, p_n, hist, 0). Blocks 1 and 2 come through W_V and W_O and, once more, through
    the residual: (e_a + hist, p_n + mean of the p_i, hist, 0).
    """
    model = _printed_one_slot(tokens, block_moves(4, num_symbols, (1, 1), (2, 2), (1, 3)))
    x = model.blocks[0].feed_forward(model.embed(tokens))
    block = model.blocks[1]
    one = torch.eye(x.shape[1], dtype=torch.float64)
    zeros = torch.zeros(2 * x.shape[1], dtype=torch.float64)
    identity = d.FeedForward(
        torch.cat([one, -one], 1), zeros, torch.cat([one, -one]), zeros[: x.shape[1]]
    )
    before = replace(block, feed_forward=identity)
    return d.run_block(
        before, x, [(x @ head.w_k, x @ head.w_v) for head in block.heads], causal=False
    )[-1]


def misplaced_counts(
    prefix: Int[Tensor, " n"], suffix: Int[Tensor, " k"], num_symbols: int
) -> Float[Tensor, " m"]:
    """Proposition 2 in the corrected network after the printed slot, with the counts in block 1.

    The average is read in block 3, so the prefix is missing: S_b / (n + k), not (S_a + S_b) / (n +
    k).
    """
    model = compressible_histogram(num_symbols, len(prefix) + len(suffix))
    policy = d.one_slot_policy(
        block_moves(4, num_symbols, (1, 1)), block_moves(4, num_symbols, (2, 4))
    )
    return d.answer(model, d.compress(policy, d.prefix_cache(model, prefix)), len(prefix), suffix)


def _printed_one_slot(tokens: Tensor, w_v: Tensor) -> d.Transformer:
    model = compressible_histogram(len(w_v) // 4, max(2, len(tokens)))
    return _with_attention(model, w_v, torch.eye(len(w_v), dtype=torch.float64))


def _with_attention(model: d.Transformer, w_v: Tensor, w_o: Tensor) -> d.Transformer:
    """The model with other W_V and W_O in its second block."""
    first, last = model.blocks
    return replace(
        model, blocks=(first, replace(last, heads=(replace(last.heads[0], w_v=w_v),), w_o=w_o))
    )


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
    n = len(prefix)
    k = suffix_len
    m = num_symbols
    if n < 1 or k < 1 or n + k > longest:
        raise ValueError(
            f"the lemma needs n, k >= 1 and n + k <= N = {longest}, got n = {n}, k = {k}"
        )
    corner = pad(one_hot(torch.tensor(list(prefix)), m).to(torch.float64), (0, 0, 0, longest - n))
    free = list(range(n, n + k) if shifted else range(k))
    distances: list[Tensor] = []
    for length in range(1, longest + 1):
        offsets = (
            pad(one_hot(d.sequences(m, length), m).double(), (0, 0, 0, longest - length)) - corner
        )
        ordered = offsets[:, free].sort(-1, descending=True).values
        # the nearest point of the simplex is relu(p - c), of sum 1
        c = (ordered.cumsum(-1) - 1) / torch.arange(1, m + 1)
        last = (ordered > c).sum(-1, keepdim=True) - 1
        offsets[:, free] = torch.minimum(offsets[:, free], c.gather(-1, last))
        distances.append(torch.linalg.vector_norm(offsets.flatten(1), dim=-1))
    delta = ((n + k) / (n - 1 + k) - 1) * math.sqrt(2 * k) / 2
    return PrintedIncompressible(torch.cat(distances), delta)


def vacuous_budgets(table: d.FunctionTable) -> tuple[int, int, float]:
    """Budgets with 1 <= r(n) <= n, those with r(n) < n (none), the error of one kept token."""
    budgets = list(itertools.product(*(range(1, n + 1) for n in range(1, table.longest))))
    below = [budget for budget in budgets if all(r < n for n, r in enumerate(budget, 1))]
    network = incompressible_network(table, constant=1.0)
    ones = [(symbol,) for symbol in range(table.num_symbols)]
    kept = d.compressibility(network, (d.keep_all, d.keep_all), lambda n: n, prefixes=ones)
    return len(budgets), len(below), kept.error


def close(values, *expected):
    return values.tolist() == pytest.approx(expected, abs=1e-12)


def test_no_budget_of_at_least_one_slot_is_below_n_everywhere():
    assert vacuous_budgets(d.parity(2, 4)) == (6, 0, 0.0)


def test_the_constant_falls_with_n_and_the_optimum_does_not():
    assert paper_bound(11, 1, 10) == pytest.approx(0.0038, abs=5e-5)
    for longest in (4, 12):
        best = definition_optimum(2, longest, lambda n: max(1, n - 1))
        assert (best.prefix_len, best.error) == (2, pytest.approx(0.1414, abs=5e-5))


def test_the_printed_matrices_give_no_histogram():
    assert close(histogram(TOKENS, 3), 0.5, 0.25, 0.25)
    assert close(nilpotent_output(TOKENS, 3), 0, 0, 0)
    assert close(unmoved_output(TOKENS, 3), 0, 0, 0)
    assert close(doubled_blocks(TOKENS, 3)[:3], 0.5, 0.25, 1.25)
    assert close(misplaced_counts(TOKENS[:2], TOKENS[2:], 3), 0, 0.25, 0.25)


def test_two_printed_constants_are_loose():
    corners = torch.eye(3, dtype=torch.float64)
    assert paper_bound(3, 1, 1) == pytest.approx(1 / 8)
    assert optimal_error(2, 3, 1, 1) == pytest.approx(2**0.5 / 8)
    assert float(hull_lemma_bound(corners, 1.25)) == pytest.approx(2**0.5 / 8)
    assert float(sharp_constant(corners, 1.25)) == pytest.approx((2 / 3) ** 0.5 / 4)


def test_the_printed_rho_bar_with_te_of_i_is_wrong_on_every_sequence():
    as_run = printed_incompressible(2, 4, (0, 0), 2)
    as_printed = printed_incompressible(2, 4, (0, 0), 2, shifted=False)
    assert (as_run.num_wrong, as_printed.num_wrong, len(as_run.distances)) == (26, 30, 30)


@pytest.mark.parametrize(
    ("m", "N", "n", "k", "wrong", "total"), [(2, 5, 3, 2, 58, 62), (3, 4, 2, 2, 111, 120)]
)
def test_the_printed_rho_bar_is_wrong_on_almost_every_sequence_for_every_prefix(
    m, N, n, k, wrong, total
):
    for prefix in itertools.product(range(m), repeat=n):
        shifted = printed_incompressible(m, N, prefix, k)
        assert (shifted.num_wrong, len(shifted.distances)) == (wrong, total)
        beyond = shifted.distances >= shifted.delta
        assert float(shifted.distances[~beyond].max()) < shifted.delta / 2
        printed = printed_incompressible(m, N, prefix, k, shifted=False)
        assert printed.num_wrong == total
