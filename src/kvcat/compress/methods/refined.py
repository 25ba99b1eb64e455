"""Attention Matching refined: keys, log-bias and values of its slots improved together."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from kvcat.cache import Layer
from kvcat.compress.base import Compressor
from kvcat.compress.heads import Heads
from kvcat.compress.methods.attention_matching import PRESETS, AttentionMatching
from kvcat.compress.prefix import Prefix
from kvcat.compress.queries import fitted_queries
from kvcat.compress.refinement import refine_layers
from kvcat.errors import check_least, check_one_of
from kvcat.options import check_options

_PULL = 0.1
# with less than 1, later text that attends to what the fitted queries pass over loses more than
# Attention Matching does
_RIDGES = {"stable": 1.0, "known": 0.01}


@dataclass(frozen=True)
class RefinedMatching(Compressor):
    """Slots of Attention Matching whose keys move as well.

    Starts from the cache of ``AttentionMatching`` and takes a few steps of L-BFGS per layer and KV
    head on the squared error of the attention outputs and of the prefix's share of the attention
    (``Objective``). Keys and log-bias move freely, pulled towards where they start; values are the
    best ones for them at every step. The queries and their weights are those of Attention Matching,
    and every head keeps its number of slots.

    Args:
        preset: "stable", for later text that is not known yet, or "known", for the case that no
            queries other than the supervising ones will follow.
        num_steps: steps tried; 0 solves for the values alone.
        budgets: as in ``AttentionMatching``.
        log_bias: False: no log-bias, neither at the start nor later.

    Raises:
        InputError: an option out of its range; on a call, a trace whose queries cannot be moved to
            positions after the prefix.

    References: Zweiger et al. 2026, arXiv:2602.16284 (the start); keys by L-BFGS and values in
        closed form: Jiang and Jin 2026, arXiv:2603.27819.
    """

    fits_queries: ClassVar[bool] = True
    preset: str = "stable"
    num_steps: int = 12
    budgets: str = "adaptive"
    log_bias: bool = True

    def __post_init__(self) -> None:
        check_one_of("preset", self.preset, _RIDGES)
        check_options(type(self), vars(self), "refined")
        check_least(0, num_steps=self.num_steps)
        self._start  # noqa: B018 its options are checked

    @cached_property
    def _start(self) -> AttentionMatching:
        """The method that makes the start."""
        return AttentionMatching(self.preset, budgets=self.budgets, log_bias=self.log_bias)

    def facts(self, prefix: Prefix) -> dict[str, object]:
        """The options, with the digest of a file of budgets."""
        return {**super().facts(prefix), "budgets": self._start.facts(prefix)["budgets"]}

    @torch.no_grad()
    def fit(self, prefix: Prefix, sizes: Sequence[int]) -> Iterator[Sequence[Layer]]:
        """The refined layers; the start's work is done once for all sizes."""
        own_weight = PRESETS[self.preset].get("own_weight", AttentionMatching.own_weight)
        heads = Heads(prefix, fitted_queries(prefix, own_weight, by_share=True))
        for start in self._start.fit(prefix, sizes):
            yield refine_layers(
                heads,
                start,
                self.num_steps,
                pull=_PULL,
                ridge=_RIDGES[self.preset],
                log_bias=self.log_bias,
            )
