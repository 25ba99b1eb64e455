"""How far the feed-forward maps of the histogram constructions are from what they claim to be.

References: KV-CAT, appendix "Motivating example", the maps rho_1 and rho_2.
"""

from dataclasses import dataclass

import torch

from kvcat.theory.definitions import Transformer
from kvcat.theory.histogram import count_vectors
from kvcat.types import Float, Int, Tensor


@dataclass(frozen=True)
class MapDeviation:
    """The largest deviation of any output coordinate, and the number of inputs looked at."""

    largest: float
    num_inputs: int


def position_code(positions: Int[Tensor, " i"], num_symbols: int) -> Float[Tensor, "i m"]:
    """p_i = (i, 1, 0, ..., 0) for i = 1, 2, ..."""
    code = torch.zeros(positions.shape[0], num_symbols, dtype=torch.float64)
    code[:, 0] = positions
    code[:, 1] = 1.0
    return code


def first_map_deviation(model: Transformer) -> MapDeviation:
    """rho_1(te(a, i)) against (e_a, 0), or (e_a, p_i, 0, 0) in four blocks, for every symbol and position."""
    m, longest = model.num_symbols, model.num_positions
    out = model.blocks[0].feed_forward(model.embedding)
    claimed = torch.zeros_like(out)
    claimed[..., :m] = torch.eye(m, dtype=torch.float64)[:, None]
    if out.shape[-1] == 4 * m:
        claimed[..., m : 2 * m] = position_code(torch.arange(1, longest + 1), m)
    return MapDeviation(float((out - claimed).abs().max()), m * longest)


def linear_map_deviation(model: Transformer, *, num_draws: int, largest: float, seed: int) -> MapDeviation:
    """The last map of Proposition 1 against (..., y, ...) -> y for real inputs in [-largest, largest].

    Args:
        model: ``incompressible_histogram``, of two blocks (y the second) or of four (y the third).
        num_draws: number of inputs.
        largest: bound on the inputs; policies are unbounded, so the claim has none.
        seed: of the inputs.
    """
    m, last = model.num_symbols, model.blocks[1].feed_forward
    draw = torch.Generator().manual_seed(seed)
    inputs = largest * (2 * torch.rand(num_draws, last.w_1.shape[0], generator=draw, dtype=torch.float64) - 1)
    at = m if inputs.shape[1] == 2 * m else 2 * m
    return MapDeviation(float((last(inputs) - inputs[:, at : at + m]).abs().max()), num_draws)


def rescaling_map_deviation(
    model: Transformer, *, num_real: int | None = None, seed: int = 0, longest: int | None = None
) -> MapDeviation:
    """rho_2 of Proposition 2 against y, at z = 0, and (k + 1) y / (n + k), at z = p_n / (k + 1).

    Args:
        model: ``compressible_histogram``.
        num_real: None for every reachable input: x = p_(n+k), w = e_b and y the counts of a sequence that ends in b
            over n + k or k + 1. A number for as many real y, uniform in [0, (n + k) / (k + 1)]^m, at every reachable
            (x, z), and the corners 0 and (n + k) / (k + 1) as well.
        seed: of the real inputs.
        longest: look at n + k up to this alone; default N.
    """
    m, last = model.num_symbols, model.blocks[1].feed_forward
    draw = torch.Generator().manual_seed(seed)
    worst, num_inputs = 0.0, 0
    for j in range(1, (longest or model.num_positions) + 1):
        for n in range(j):  # n = 0 stands for no compression
            divisor = j - n + 1 if n else j
            if num_real is None:
                w, y = _reachable(m, j)
                y = y / divisor
            else:
                y = torch.rand(num_real, m, generator=draw, dtype=torch.float64)
                y = torch.cat([y, torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * m)])
                y = y * j / divisor
                w = torch.eye(m, dtype=torch.float64)[torch.arange(len(y)) % m]
            x = position_code(torch.tensor([j]), m).expand_as(y)
            z = position_code(torch.tensor([n]), m) / divisor if n else torch.zeros(1, m, dtype=torch.float64)
            out = last(torch.cat([w, x, y, z.expand_as(y)], 1))
            worst = max(worst, float((out - y * divisor / j).abs().max()))
            num_inputs += len(y)
    return MapDeviation(worst, num_inputs)


def _reachable(num_symbols: int, length: int) -> tuple[Tensor, Tensor]:
    """Last symbols, one-hot, and counts of every multiset of this size that contains them."""
    counts = count_vectors(num_symbols, length)
    row, symbol = (counts > 0).nonzero(as_tuple=True)
    return torch.eye(num_symbols, dtype=torch.float64)[symbol], counts[row].to(torch.float64)
