"""Eviction: a subset of the prefix's slots, unchanged. Every file of this folder is a scorer."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvcat.cache import Layer
from kvcat.compress.base import Compressor, Scorer, best_layers, classes_in
from kvcat.compress.prefix import Prefix
from kvcat.errors import check_kind, unknown_name
from kvcat.options import check_options
from kvcat.types import Float, Tensor

SCORERS: dict[str, type[Scorer]] = classes_in(__name__, __path__, Scorer)


@dataclass(frozen=True, init=False)
class Eviction(Compressor):
    """Keeps, per layer and KV head, the slots of the highest scores with their original keys and
    values.

    The scorers read only the prefix: the text after it never changes the result.

    Args:
        name: "first", "random", "streaming", "keynorm", "snapkv", "h2o" or "tova".
        scorer_class: a scorer of another package, which is registered under ``name``; None: kvcat's
            scorer of that name.
        options: options of the scorer, such as seed (random), num_sinks (streaming) or window,
            kernel_size, pooling (snapkv).

    Raises:
        InputError: an unknown name, an option that the scorer does not have, or a value out of its
            range.
    """

    scorer_name: str
    scorer: Scorer

    def __init__(
        self,
        name: str,
        /,
        scorer_class: type[Scorer] | None = None,
        *,
        bits: int | None = None,
        **options: Any,
    ):
        check_kind(str, "the name of a scorer", name=name)
        if scorer_class is None:
            if name not in SCORERS:
                raise unknown_name("eviction scorer", name, SCORERS)
            scorer_class = SCORERS[name]
        check_options(scorer_class, options, name)
        object.__setattr__(self, "bits", bits)
        object.__setattr__(self, "scorer_name", name)
        object.__setattr__(self, "scorer", scorer_class(**options))

    @property
    def name(self) -> str:
        """The scorer's name."""
        return self.scorer_name

    @property
    def needs_all_queries(self) -> bool:  # type: ignore[override]
        """Whether the scorer does."""
        return self.scorer.needs_all_queries

    @property
    def draws(self) -> bool:
        """Whether the result depends on a seed."""
        return hasattr(self.scorer, "seed")

    def with_seed(self, seed: int) -> "Eviction":
        """The same scorer with another seed."""
        scorer: Any = self.scorer
        if scorer.seed == seed:
            return self
        seeded = copy.copy(self)
        object.__setattr__(seeded, "scorer", replace(scorer, seed=seed))
        return seeded

    def facts(self, prefix: Prefix) -> dict[str, object]:  # noqa: ARG002
        """The scorer's options."""
        return dict(vars(self.scorer))

    @torch.no_grad()
    def fit(self, prefix: Prefix, sizes: Sequence[int]) -> Iterator[Sequence[Layer]]:
        """The kept slots; scores are measured once for all sizes, on the whole prefix."""
        measured = self.scorer.measure(prefix.trace) if sizes else []
        for size in sizes:
            num_recent = self.scorer.num_recent(size)
            scores = [_with_recent(of_layer, num_recent) for of_layer in measured]
            yield best_layers(prefix, scores, size)


def _with_recent(
    scores: Float[Tensor, "batch kv_heads prefix"], num_recent: int
) -> Float[Tensor, "batch kv_heads prefix"]:
    """The scores with infinity for the last positions."""
    first_recent = scores.shape[-1] - num_recent
    scores = scores.clone()
    scores[..., first_recent:] = torch.inf
    return scores
