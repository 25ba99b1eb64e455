"""Orthogonal matching pursuit: keys chosen so that few of them carry the attention mass of the whole prefix."""

from collections.abc import Iterator

import torch

from kvcat.compress.box import TallSystem, solve_box
from kvcat.compress.common import top_positions
from kvcat.compress.heads import HeadBlock
from kvcat.types import Float, Int, Tensor

_TOLERANCE = 1e-8


def pursue(
    block: HeadBlock,
    top: Float[Tensor, "heads queries one"],
    mass: Float[Tensor, "heads queries"],
    num_slots: int,
    *,
    bounds: tuple[float, float],
    picks: int = 1,
) -> Int[Tensor, "heads slots"]:
    """Positions of the chosen keys of every head, ascending; no key is chosen twice.

    With the atoms a_j = exp(s_.j - top) times the queries' weights, and the mass b = sum_t a_t over the whole prefix:
    start from the residual r = b; add the key with the largest a_j.r; fit weights w in the box of the log-bias to all
    chosen atoms, minimising |b - sum_j w_j a_j|; set r = b - sum_j w_j a_j; and so on. The correlations follow from
    products of atoms alone: a_j.r = a_j.b - sum_i a_j.a_i w_i, so that the atoms are read once per iteration, in chunks
    of queries; they are kept only where one chunk holds them all. Float64.

    Args:
        block: heads with their queries.
        top: largest dense score of each query, nats.
        mass: b before the weights.
        num_slots: keys to choose, in [1, prefix].
        bounds: box on the log-bias, nats.
        picks: keys added between two fits of the weights, those with the largest correlations.

    References: Zweiger et al. 2026, arXiv:2602.16284 (AM-OMP), whose weights are bounded by 0 alone; Pati et al. 1993.
    """
    heads, prefix, _ = block.keys.shape
    wanted, chunks = block.weighted(mass.unsqueeze(-1), slice(None)).double(), list(block.query_chunks())
    held = _atoms(block, top, chunks[0]) if len(chunks) == 1 else None

    def atoms() -> Iterator[tuple[slice, Float[Tensor, "heads chunk prefix"]]]:
        return ((chunk, _atoms(block, top, chunk) if held is None else held) for chunk in chunks)

    reach = torch.stack([part.mT @ wanted[:, chunk] for chunk, part in atoms()]).sum(0).squeeze(-1)
    size = wanted.square().sum((1, 2))
    chosen = torch.zeros(heads, num_slots, dtype=torch.long, device=reach.device)
    products = reach.new_zeros(heads, num_slots, prefix)
    correlation, taken = reach.clone(), torch.zeros_like(reach, dtype=torch.bool)
    for start in range(0, num_slots, picks):
        stop = min(start + picks, num_slots)
        best = top_positions(correlation.masked_fill(taken, -torch.inf), stop - start)
        taken.scatter_(1, best, value=True)
        chosen[:, start:stop] = best
        if stop == num_slots:
            break
        for _, part in atoms():
            own = part.gather(2, best.unsqueeze(1).expand(-1, part.shape[1], -1))
            products[:, start:stop] += own.mT @ part
        index = chosen[:, :stop]
        gram = products[:, :stop].gather(2, index.unsqueeze(1).expand(-1, stop, -1))
        weights = solve_box(TallSystem(gram, reach.gather(1, index)), size, bounds=bounds, tolerance=_TOLERANCE)
        correlation = reach - (weights.unsqueeze(1) @ products[:, :stop]).squeeze(1)
    return chosen.sort(-1).values


def _atoms(
    block: HeadBlock, top: Float[Tensor, "heads queries one"], chunk: slice
) -> Float[Tensor, "heads chunk prefix"]:
    return block.weighted((block.scores(chunk) - top[:, chunk]).exp_(), chunk).double()
