"""A gradient search for the cache that serves a prefix best: an upper bound on what any policy can reach there.

A policy is free at every prefix, so a cache is searched for each prefix on its own.

References: KV-CAT, definition of KV compressibility.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvcat.theory.compression import Cache, answer, prefix_cache
from kvcat.theory.definitions import Transformer
from kvcat.types import Float, Int, Tensor

_SHARPNESS = (10.0, 100.0, 1e3, 1e4)  # of the smooth maximum, over the error reached before; for the last steps


@dataclass(frozen=True, eq=False)
class FoundCache:
    """A cache and the largest error max_b || M([a, b]) - M_{C,a}(b) || behind it over the suffixes searched with."""

    cache: Cache
    error: float


def search_cache(
    model: Transformer,
    prefix: Int[Tensor, " n"],
    suffixes: Sequence[Tensor],
    num_slots: int,
    *,
    num_steps: int = 300,
    num_restarts: int = 3,
    seed: int = 0,
    start: Cache | None = None,
) -> FoundCache:
    """The best cache found of r keys and values per block and head, judged by its worst error over the suffixes.

    Minimises log sum_b exp(beta e_b) / beta, e_b the error behind suffix b, over all keys and values at once: Adam
    with beta rising from 10 to 1000 over the start's error, then, from the best start, L-BFGS with beta up to 10^4
    over the error reached.
    The largest error itself decides which cache seen is the best. An upper bound: where the problem is not convex
    there may be better caches.

    Args:
        model: M.
        prefix: a.
        suffixes: b, int64 arrays (batch, k) of one length each; together 1 suffix at least.
        num_slots: r, 0 to n.
        num_steps: steps of Adam for each start, and at most of L-BFGS for each of its four sharpnesses.
        num_restarts: number of starts, each from r tokens of the prefix's own cache with noise (the first from all of
            them without, where r = n).
        seed: of the starts.
        start: a cache of r slots to begin the first of them from.

    Raises:
        ValueError: an argument outside its range, a start of another number of slots.
    """
    if not 0 <= num_slots <= prefix.shape[0]:
        raise ValueError(f"the slots must number 0 to {prefix.shape[0]}, got {num_slots}")
    if num_steps < 1 or num_restarts < 1:
        raise ValueError(f"a search takes at least one step and one start, got {num_steps} and {num_restarts}")
    if not suffixes or not all(rows.ndim == 2 and rows.numel() for rows in suffixes):
        raise ValueError("suffixes are arrays (batch, k), none of them empty")
    if start is not None and {keys.shape[0] for heads in start for keys, _ in heads} != {num_slots}:
        raise ValueError(f"the cache to start from does not have {num_slots} slots")
    with torch.no_grad():
        problem = _Problem.of(model, prefix, suffixes)
        draw = torch.Generator().manual_seed(seed)
        starts = [problem.draw_start(num_slots, draw) for _ in range(num_restarts)]
        if num_slots == prefix.shape[0]:
            starts[0] = problem.flatten(problem.whole)  # exact in causal models, and where no block before mixes
        if start is not None:
            starts[0] = problem.flatten(start)
    descents = [_Descent(problem, first, num_slots) for first in (starts if num_slots else starts[:1])]
    if num_slots:
        for descent in descents:
            descent.adam(num_steps)
    best = min(descents, key=lambda descent: descent.error)
    if num_slots:
        best.polish(num_steps)
    return FoundCache(problem.cache(best.best, num_slots), best.error)


@dataclass(frozen=True, eq=False)
class _Problem:
    """Errors as a function of one vector: the cache, tensor by tensor, each in units of its size in the whole cache."""

    model: Transformer
    prefix_len: int
    suffixes: Sequence[Tensor]
    targets: tuple[Tensor, ...]
    whole: Cache
    units: tuple[float, ...]

    @classmethod
    def of(cls, model: Transformer, prefix: Tensor, suffixes: Sequence[Tensor]) -> "_Problem":
        targets = tuple(model(torch.cat([prefix.expand(len(rows), -1), rows], 1)) for rows in suffixes)
        whole = prefix_cache(model, prefix)
        sizes = [float(part.square().mean().sqrt()) for part in _parts(whole)]
        return cls(model, prefix.shape[0], suffixes, targets, whole, tuple(size or 1.0 for size in sizes))

    def flatten(self, cache: Cache) -> Tensor:
        return torch.cat([(part / unit).flatten() for part, unit in zip(_parts(cache), self.units, strict=True)])

    def draw_start(self, num_slots: int, draw: torch.Generator) -> Tensor:
        kept = torch.randperm(self.prefix_len, generator=draw)[:num_slots]
        chosen = tuple(tuple((keys[kept], values[kept]) for keys, values in heads) for heads in self.whole)
        flat = self.flatten(chosen)
        return flat + 0.1 * torch.randn(flat.shape, generator=draw, dtype=torch.float64)

    def cache(self, flat: Tensor, num_slots: int) -> Cache:
        widths = [part.shape[1] for part in _parts(self.whole)]
        pieces = iter(
            piece.reshape(num_slots, width) * unit
            for piece, width, unit in zip(
                flat.split([num_slots * width for width in widths]), widths, self.units, strict=True
            )
        )
        return tuple(tuple((next(pieces), next(pieces)) for _ in heads) for heads in self.whole)

    def errors(self, flat: Tensor, num_slots: int) -> Float[Tensor, " suffixes"]:
        cache = self.cache(flat, num_slots)
        differences = [
            answer(self.model, cache, self.prefix_len, rows) - target
            for rows, target in zip(self.suffixes, self.targets, strict=True)
        ]
        return torch.cat([torch.linalg.vector_norm(rows, dim=-1) for rows in differences])


def _parts(cache: Cache) -> list[Tensor]:
    return [part for heads in cache for pair in heads for part in pair]


class _Descent:
    """The smallest largest error seen on the way down from one start, and the vector it was seen at."""

    def __init__(self, problem: _Problem, start: Tensor, num_slots: int) -> None:
        self.problem, self.num_slots = problem, num_slots
        self.flat = start.clone().requires_grad_()
        self.best, self.error = start, float("inf")
        with torch.no_grad():
            self.loss(1.0)

    def loss(self, sharpness: float) -> Tensor:
        """The smooth maximum at the current vector, which is remembered if it is the best."""
        errors = self.problem.errors(self.flat, self.num_slots)
        largest = float(errors.detach().max())
        if largest < self.error:
            self.best, self.error = self.flat.detach().clone(), largest
        return (sharpness * errors).logsumexp(0) / sharpness

    def adam(self, num_steps: int) -> None:
        """Adam with rising sharpness, in units of the error at the start."""
        if self.error == 0:
            return
        first = self.error
        adam = torch.optim.Adam([self.flat], lr=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, num_steps, eta_min=1e-3)
        for step in range(num_steps):
            adam.zero_grad()
            self.loss(10 ** (1 + 2 * step / num_steps) / first).backward()
            adam.step()
            schedule.step()

    def polish(self, num_steps: int) -> None:
        """L-BFGS from the best vector, for one sharpness after the other."""
        for sharpness in _SHARPNESS:
            if self.error == 0:
                return
            with torch.no_grad():
                self.flat.copy_(self.best)
            scaled = sharpness / self.error
            optimiser = torch.optim.LBFGS([self.flat], max_iter=num_steps, line_search_fn="strong_wolfe")

            def closure(optimiser: torch.optim.Optimizer = optimiser, scaled: float = scaled) -> float:
                optimiser.zero_grad()
                value = self.loss(scaled)
                value.backward()
                return float(value.detach())

            optimiser.step(closure)
