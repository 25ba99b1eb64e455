"""Which keys of the prefix Attention Matching keeps."""

from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import avg_pool1d, max_pool1d

from kvcat.compress.common import top_positions
from kvcat.compress.heads import HeadBlock
from kvcat.compress.matching_pursuit import pursue
from kvcat.errors import InputError
from kvcat.types import Float, Int, Tensor

SELECTIONS = ("rms", "mean", "max", "omp")
_POOLS = {"avg": partial(avg_pool1d, count_include_pad=False), "max": max_pool1d}


@dataclass(frozen=True)
class DenseAttention:
    """What is kept of the dense attention of a block of heads.

    Args:
        top: what is taken off the scores of each query, nats: the largest, or the log of their whole mass.
        mass: sum over the prefix of exp(score - top).
        outputs: attention over the prefix.
        importance: how much attention each position gets: over all queries the sum of its squared weights ("rms", and
            "omp", which does not read it), the sum ("mean") or the largest ("max"), each times the query's own weight.
    """

    top: Float[Tensor, "heads queries one"]
    mass: Float[Tensor, "heads queries"]
    outputs: Float[Tensor, "heads queries value_dim"]
    importance: Float[Tensor, "heads prefix"]

    def select(self, rows: Int[Tensor, " rows"]) -> "DenseAttention":
        """Some of the heads."""
        return DenseAttention(self.top[rows], self.mass[rows], self.outputs[rows], self.importance[rows])


@dataclass(frozen=True)
class KeySelection:
    """How keys are chosen.

    Args:
        score: "rms", "mean" or "max" keep the keys whose attention weights are largest in that sense over the queries;
            "omp" chooses them one after the other so that they make up the attention mass (``pursue``).
        kernel_size: positions over which attention is pooled before keys are chosen, odd; 1 does not pool.
        pooling: "avg" or "max".
        picks: keys that "omp" adds between two fits of their weights, at least 1; more are faster.

    Raises:
        InputError: an option out of its range, or one that this score does not have.
    """

    score: str = "rms"
    kernel_size: int = 1
    pooling: str = "avg"
    picks: int = 1

    def __post_init__(self) -> None:
        if self.score not in SELECTIONS:
            raise InputError(f"selection must be one of {', '.join(SELECTIONS)}, not {self.score!r}")
        if self.kernel_size < 1 or self.kernel_size % 2 == 0:
            raise InputError(f"kernel_size must be odd and at least 1, not {self.kernel_size}")
        if self.pooling not in _POOLS:
            raise InputError(f"pooling must be one of {', '.join(_POOLS)}, not {self.pooling!r}")
        if self.picks < 1:
            raise InputError(f"picks must be at least 1, not {self.picks}")
        if self.score == "omp" and self.kernel_size > 1:
            raise InputError(f"kernel_size {self.kernel_size} pools attention, which selection 'omp' does not read")
        if self.score != "omp" and self.picks > 1:
            raise InputError(f"picks {self.picks} is an option of selection 'omp', not of {self.score!r}")


def summarise(block: HeadBlock, score: str = "rms", *, relative: bool = False) -> DenseAttention:
    """Dense attention of a block of heads, in chunks of queries.

    Args:
        block: heads with their queries.
        score: one of ``SELECTIONS``; what ``importance`` holds.
        relative: every query's mass is 1, so that the log-bias is fitted to relative masses.
    """
    tops, masses, outputs, importance = [], [], [], torch.zeros_like(block.keys[..., 0])
    for chunk in block.query_chunks():
        weights = block.scores(chunk)
        tops.append(weights.amax(-1, keepdim=True))
        weights = weights.sub_(tops[-1]).exp_()
        masses.append(weights.sum(-1))
        weights = weights.div_(masses[-1].unsqueeze(-1))
        outputs.append(weights @ block.values)
        weights = block.weighted(weights, chunk)
        if score == "max":
            importance = torch.maximum(importance, weights.amax(-2))
        else:
            importance += (weights if score == "mean" else weights.square_()).sum(-2)
    top, mass = torch.cat(tops, 1), torch.cat(masses, 1)
    if relative:
        top, mass = top + mass.log().unsqueeze(-1), torch.ones_like(mass)
    return DenseAttention(top, mass, torch.cat(outputs, 1), importance)


def select_slots(
    block: HeadBlock, dense: DenseAttention, num_slots: int, selection: KeySelection, bounds: tuple[float, float]
) -> Int[Tensor, "heads slots"]:
    """Positions of the kept keys, ascending.

    Args:
        block: heads with their queries.
        dense: their dense attention, summarised for the selection's score.
        num_slots: keys per head, in [1, prefix].
        selection: how to choose.
        bounds: box on the log-bias that the keys will get, nats.
    """
    if selection.score == "omp":
        return pursue(block, dense.top, dense.mass, num_slots, bounds=bounds, picks=selection.picks)
    importance, width = dense.importance, selection.kernel_size
    if width > 1:
        importance = _POOLS[selection.pooling](importance, width, stride=1, padding=width // 2)
    return top_positions(importance, num_slots)
