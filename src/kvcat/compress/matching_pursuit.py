"""Orthogonal matching pursuit: keys chosen so that few of them carry the attention mass of the whole prefix."""

import math

import torch

from kvcat.compress.base import top_positions
from kvcat.compress.solvers import solve_box
from kvcat.types import Float, Int, Tensor

_PICKS = 4
_TOLERANCE, _MAX_STEPS = 1e-4, 40


def pursue(
    atoms: Float[Tensor, "heads queries prefix"], num_slots: int, *, bounds: tuple[float, float]
) -> Int[Tensor, "heads slots"]:
    """Positions of the chosen keys of every head, ascending; no key is chosen twice.

    With the atoms a_j and their sum b over the whole prefix: start from the residual r = b; add the four keys with the
    largest a_j.r; fit weights w in the box of the log-bias to all chosen atoms, in at most 40 steps towards the least
    |b - sum_j w_j a_j|; set r = b - sum_j w_j a_j; and so on. The correlations follow from products of atoms alone,
    a_j.r = a_j.b - sum_i a_j.a_i w_i.

    Args:
        atoms: attention mass that each key gets from each query, times the query's weight.
        num_slots: keys to choose, in [1, prefix].
        bounds: box on the log-bias, nats.

    References: Zweiger et al. 2026, arXiv:2602.16284 (AM-OMP), whose weights are bounded by 0 alone; Pati et al. 1993.
    """
    heads, _, prefix = atoms.shape
    low, high = math.exp(bounds[0]), math.exp(bounds[1])
    reach = (atoms.sum(-1).unsqueeze(1) @ atoms).squeeze(1).double()
    chosen = torch.zeros(heads, num_slots, dtype=torch.long, device=atoms.device)
    products = reach.new_zeros(heads, num_slots, prefix)
    correlation, taken = reach.clone(), torch.zeros_like(reach, dtype=torch.bool)
    for start in range(0, num_slots, _PICKS):
        stop = min(start + _PICKS, num_slots)
        best = top_positions(correlation.masked_fill(taken, -torch.inf), stop - start)
        taken.scatter_(1, best, value=True)
        chosen[:, start:stop] = best
        if stop == num_slots:
            break
        own = atoms.gather(2, best.unsqueeze(1).expand(-1, atoms.shape[1], -1))
        products[:, start:stop] = own.mT @ atoms
        index = chosen[:, :stop]
        gram = products[:, :stop].gather(2, index.unsqueeze(1).expand(-1, stop, -1))
        target = reach.gather(1, index)
        weights = solve_box(gram, target, low, high, pull=0.0, tolerance=_TOLERANCE, max_steps=_MAX_STEPS)
        correlation = reach - (weights.unsqueeze(1) @ products[:, :stop]).squeeze(1)
    return chosen.sort(-1).values
