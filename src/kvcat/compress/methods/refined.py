"""Attention Matching refined: keys, log-bias and values of its slots improved together."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch

from kvcat.cache import CompactCache
from kvcat.compress.base import Compressor, compact_cache
from kvcat.compress.heads import Heads
from kvcat.compress.methods.attention_matching import PRESETS, AttentionMatching
from kvcat.compress.protection import behind_protected, without_protected
from kvcat.compress.queries import fitted_queries
from kvcat.compress.refinement import refine_layers
from kvcat.compress.trace import Trace
from kvcat.errors import check_least, check_one_of

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

    preset: str = "stable"
    num_steps: int = 12
    budgets: str = "adaptive"
    log_bias: bool = True

    def __post_init__(self) -> None:
        check_one_of("preset", self.preset, _RIDGES)
        check_least(0, num_steps=self.num_steps)
        self._start()

    @torch.no_grad()
    def compress(self, trace: Trace, sizes: Sequence[int]) -> Iterator[CompactCache]:
        """The caches; the start's work is done once for all sizes."""
        if not sizes:
            return
        own_weight = PRESETS[self.preset].get("own_weight", AttentionMatching.own_weight)
        heads = Heads(trace.unprotected, fitted_queries(trace, own_weight, by_share=True))
        options = {option.name: getattr(self, option.name) for option in fields(self)}
        for start in self._start().compress(trace, sizes):
            start_layers = [
                without_protected(layer, trace.num_protected) for layer in start.ordinary_layers()
            ]
            layers = refine_layers(
                heads,
                start_layers,
                self.num_steps,
                pull=_PULL,
                ridge=_RIDGES[self.preset],
                log_bias=self.log_bias,
            )
            layers = [behind_protected(trace, *each) for each in enumerate(layers)]
            # with a file of budgets, its digest
            options["budgets"] = start.metadata["budgets"]
            yield compact_cache(trace, layers, "refined", options)

    def _start(self) -> AttentionMatching:
        return AttentionMatching(self.preset, budgets=self.budgets, log_bias=self.log_bias)
