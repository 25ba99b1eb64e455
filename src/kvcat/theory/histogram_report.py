"""Both histogram networks side by side: what they compute, what one slot costs each, and what no policy can save.

References: KV-CAT, Propositions "hist_non_compressible" and "hist_compressible".
"""

from dataclasses import dataclass

import torch

from kvcat.theory.compression import Policy, WorstCase, compress, compressibility, prefix_cache, suffix_error
from kvcat.theory.definitions import Transformer, sequences
from kvcat.theory.histogram import compressible_histogram, histogram, histogram_policy, incompressible_histogram
from kvcat.theory.histogram_maps import first_map_deviation, linear_map_deviation, rescaling_map_deviation
from kvcat.theory.histogram_optimum import definition_optimum, optimal_policy
from kvcat.theory.searching import search_cache
from kvcat.types import Tensor

EXHAUSTIVE = 30_000
"""Up to so many pairs (a, b) all are looked at; beyond, as many are drawn."""


@dataclass(frozen=True)
class NetworkCheck:
    """One network, verified.

    Attributes:
        widths: of embedding, first hidden layer, residual stream, second hidden layer, output.
        task_error: the largest || M(a) - hist(a) || of the sequences looked at.
        map_error: the largest deviation of its feed-forward maps from what they claim, over every reachable input.
        behind_policy: the worst error behind its policy and where.
        num_pairs: pairs (a, b) looked at; all there are if ``exhaustive``.
    """

    widths: tuple[int, ...]
    task_error: float
    map_error: float
    behind_policy: WorstCase
    num_pairs: int
    exhaustive: bool


@dataclass(frozen=True)
class HistogramReport:
    """The two networks of one architecture at one slot.

    Attributes:
        incompressible: Proposition 1's in four blocks, behind the best policy there is.
        optimum: what that policy's error has to be by the exact optimum.
        found: the best error a gradient search reached at the prefix where the optimum is attained, one slot.
        compressible: Proposition 2's, behind its policy.
    """

    incompressible: NetworkCheck
    optimum: float
    found: float
    compressible: NetworkCheck


def histogram_report(num_symbols: int, longest: int, *, seed: int = 0) -> HistogramReport:
    """Both networks for m symbols and sequences of up to N, compressed to one slot.

    Args:
        num_symbols: m, at least 2.
        longest: N, at least 2.
        seed: of the search, of real inputs, and of pairs where there are too many to look at all.

    Raises:
        ValueError: an argument outside its range.
    """
    plain = incompressible_histogram(num_symbols, longest, num_blocks=4)
    summed = compressible_histogram(num_symbols, longest)
    best = optimal_policy(num_symbols, longest, lambda _: 1)
    optimum = definition_optimum(num_symbols, longest, lambda _: 1)
    linear = linear_map_deviation(plain, num_draws=1000, largest=100.0, seed=seed).largest
    rescaling = rescaling_map_deviation(summed).largest
    prefix = torch.zeros(optimum.prefix_len, dtype=torch.int64)
    suffixes = [torch.arange(num_symbols)[:, None].expand(-1, k) for k in optimum.suffix_lens]  # those that decide
    return HistogramReport(
        _check(plain, best, max(linear, first_map_deviation(plain).largest), seed),
        optimum.error,
        search_cache(plain, prefix, suffixes, 1, num_steps=100, num_restarts=1, seed=seed).error,
        _check(summed, histogram_policy(num_symbols), max(rescaling, first_map_deviation(summed).largest), seed),
    )


def _check(model: Transformer, policy: Policy, map_error: float, seed: int) -> NetworkCheck:
    m, longest = model.num_symbols, model.num_positions
    num_pairs = sum((length - 1) * m**length for length in range(2, longest + 1))
    exhaustive = num_pairs <= EXHAUSTIVE
    if exhaustive:
        worst = compressibility(model, policy, lambda _: 1)
        whole = [sequences(m, length) for length in range(1, longest + 1)]
    else:
        worst, whole = _drawn(model, policy, seed)
        num_pairs = EXHAUSTIVE
    task = max(float((model(rows) - histogram(rows, m)).norm(dim=-1).max()) for rows in whole)
    first, second = (block.feed_forward for block in model.blocks)
    widths = (first.w_1.shape[0], first.w_1.shape[1], second.w_1.shape[0], second.w_1.shape[1], second.w_2.shape[1])
    return NetworkCheck(widths, task, map_error, worst, num_pairs, exhaustive)


def _drawn(model: Transformer, policy: Policy, seed: int, at_once: int = 100) -> tuple[WorstCase, list[Tensor]]:
    """The worst of ``EXHAUSTIVE`` pairs: ``at_once`` suffixes of one length behind each of many prefixes."""
    m, longest = model.num_symbols, model.num_positions
    draw = torch.Generator().manual_seed(seed)
    worst, whole = WorstCase(-1.0, (), ()), []
    for number in range(EXHAUSTIVE // at_once):
        n = int(torch.randint(1, longest, (), generator=draw))
        k = int(torch.randint(1, longest - n + 1, (), generator=draw))
        prefix = torch.randint(m, (n,), generator=draw)
        if number % 2:  # one symbol repeated: the worst prefixes for the average, as such suffixes are
            prefix[:] = prefix[0]
        suffixes = torch.randint(m, (at_once, k), generator=draw)
        suffixes[:m] = torch.arange(m)[:, None]
        errors = suffix_error(model, compress(policy, prefix_cache(model, prefix)), prefix, suffixes)
        at = int(errors.argmax())
        if float(errors[at]) > worst.error:
            worst = WorstCase(float(errors[at]), tuple(prefix.tolist()), tuple(suffixes[at].tolist()))
        whole.append(torch.cat([prefix.expand(at_once, -1), suffixes], 1))
    return worst, whole
