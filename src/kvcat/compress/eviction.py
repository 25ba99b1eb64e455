"""Eviction: some of the prefix's own slots, unchanged."""

from dataclasses import dataclass
from typing import Any

import torch

from kvcat.cache import CompactCache, CompactLayer
from kvcat.compress.common import compact_cache, slots_for, take_slots, top_positions
from kvcat.compress.scorers import SCORERS, Scorer
from kvcat.compress.tracing import Trace
from kvcat.errors import InputError


@dataclass(frozen=True, init=False)
class Eviction:
    """Keeps, per layer and KV head, the slots that a scorer ranks highest, with their keys and values as they are.

    The scorers read the prefix only: what follows it never changes the result.

    Args:
        name: "first", "random", "keynorm", "snapkv" or "h2o".
        options: of the scorer, such as seed (random) or window, kernel_size, pooling (snapkv).

    Raises:
        InputError: an unknown name, or an option the scorer does not have.
    """

    name: str
    scorer: Scorer

    def __init__(self, name: str, **options: Any):
        if name not in SCORERS:
            raise InputError(f"no eviction scorer {name!r}; there are {', '.join(SCORERS)}")
        object.__setattr__(self, "name", name)
        try:
            object.__setattr__(self, "scorer", SCORERS[name](**options))
        except TypeError as error:
            raise InputError(f"{name}: {error}") from error

    @torch.no_grad()
    def __call__(
        self, trace: Trace, *, keep_ratio: float | int | None = None, num_slots: int | None = None
    ) -> CompactCache:
        """The compact cache with ceil(keep_ratio * prefix_len) or num_slots slots per layer and head.

        Args:
            trace: of the windows to compress.
            keep_ratio: fraction kept, in (0, 1]; 1 returns the dense cache.
            num_slots: number kept, in [1, prefix_len].

        Raises:
            InputError: keep_ratio or num_slots out of range.
        """
        slots = slots_for(trace.prefix_len, keep_ratio, num_slots)
        if slots == trace.prefix_len:
            return trace.dense_cache()
        layers = []
        for keys, values, scores in zip(trace.keys, trace.values, self.scorer(trace, slots), strict=True):
            positions = top_positions(scores, slots)
            layers.append(CompactLayer(take_slots(keys, positions), take_slots(values, positions)))
        return compact_cache(trace, layers, self.name)
