"""Eviction: some of the prefix's own slots, unchanged. Every file of this folder is a scorer, named as the file."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvcat.cache import CompactCache
from kvcat.compress.base import Compressor, Scorer, best_layer, classes_in, compact_cache
from kvcat.compress.trace import Trace
from kvcat.errors import InputError
from kvcat.options import check_options

SCORERS: dict[str, type[Scorer]] = classes_in(__name__, __path__, Scorer)


@dataclass(frozen=True, init=False)
class Eviction(Compressor):
    """Keeps, per layer and KV head, the slots that a scorer ranks highest, with their keys and values as they are.

    The scorers read the prefix only: what follows it never changes the result.

    Args:
        name: "first", "random", "streaming", "keynorm", "snapkv", "h2o" or "tova".
        options: of the scorer, such as seed (random), num_sinks (streaming) or window, kernel_size, pooling (snapkv).

    Raises:
        InputError: an unknown name, or an option that the scorer does not have or take.
    """

    name: str
    scorer: Scorer

    def __init__(self, name: str, /, **options: Any):
        if name not in SCORERS:
            raise InputError(f"no eviction scorer {name!r}; there are {', '.join(SCORERS)}")
        check_options(SCORERS[name], options, name)
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "scorer", SCORERS[name](**options))

    @property
    def draws(self) -> bool:
        """Whether the result depends on a seed."""
        return hasattr(self.scorer, "seed")

    @torch.no_grad()
    def compress(self, trace: Trace, sizes: Sequence[int]) -> Iterator[CompactCache]:
        """The caches; scores are measured once for all sizes."""
        measured = self.scorer.measure(trace) if sizes else []
        for size in sizes:
            scores, recent = [own.clone() for own in measured], self.scorer.num_recent(size)
            for own in scores:
                own[..., own.shape[-1] - recent :] = torch.inf
            layers = [best_layer(trace, index, own, size) for index, own in enumerate(scores)]
            yield compact_cache(trace, layers, self.name, vars(self.scorer))
