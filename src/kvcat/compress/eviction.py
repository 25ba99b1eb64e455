"""Eviction: some of the prefix's own slots, unchanged."""

from dataclasses import dataclass
from typing import Any

import torch

from kvcat.cache import CompactCache
from kvcat.compress.common import best_layer, compact_cache, slots_for
from kvcat.compress.scorers import SCORERS, Scorer
from kvcat.compress.tracing import Trace
from kvcat.errors import InputError


@dataclass(frozen=True, init=False)
class Eviction:
    """Keeps, per layer and KV head, the slots that a scorer ranks highest, with their keys and values as they are.

    The scorers read the prefix only: what follows it never changes the result.

    Args:
        name: "first", "random", "streaming", "keynorm", "snapkv", "h2o" or "tova".
        options: of the scorer, such as seed (random), num_sinks (streaming) or window, kernel_size, pooling (snapkv).

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
        if slots >= trace.num_slots:
            return trace.dense_cache()
        scores = self.scorer(trace, slots)
        layers = [best_layer(trace, index, own, slots) for index, own in enumerate(scores)]
        return compact_cache(trace, layers, self.name, vars(self.scorer))
