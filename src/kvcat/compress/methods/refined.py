"""Attention Matching refined: keys, log-bias and values of its slots improved together."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from tqdm.auto import tqdm

from kvcat.cache import CompactCache, CompactLayer, Head, Layer
from kvcat.compress.base import Compressor, compact_cache
from kvcat.compress.heads import HeadIndex, Heads, dense_attention
from kvcat.compress.methods.attention_matching import PRESETS, AttentionMatching
from kvcat.compress.queries import fitted_queries
from kvcat.compress.refinement import Objective, Slots, refine_slots
from kvcat.compress.trace import Trace
from kvcat.errors import InputError, check_least
from kvcat.types import Tensor, at_least_float32

_PULL = 0.1
_RIDGES = {"stable": 0.05, "known": 0.01}


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
    num_steps: int = 8
    budgets: str = "adaptive"
    log_bias: bool = True

    def __post_init__(self) -> None:
        if self.preset not in _RIDGES:
            choices = ", ".join(_RIDGES)
            raise InputError(f"preset must be one of {choices}, not {self.preset!r}")
        check_least(0, num_steps=self.num_steps)
        self._start()

    @torch.no_grad()
    def compress(self, trace: Trace, sizes: Sequence[int]) -> Iterator[CompactCache]:
        """The caches; the start's work is done once for all sizes."""
        if not sizes:
            return
        own_weight = PRESETS[self.preset].get("own_weight", AttentionMatching.own_weight)
        heads = Heads(trace, fitted_queries(trace, own_weight, by_share=True))
        if heads.fitted.causal:
            raise InputError(
                "refined needs queries at positions after the prefix, and those of this prefix "
                "cannot be moved there: use attention-matching"
            )
        options = {option.name: getattr(self, option.name) for option in fields(self)}
        for start in self._start().compress(trace, sizes):
            layers = self._refined(heads, start.layers)
            yield compact_cache(trace, layers, "refined", options)

    def _start(self) -> AttentionMatching:
        return AttentionMatching(self.preset, budgets=self.budgets, log_bias=self.log_bias)

    def _refined(self, heads: Heads, start: Sequence[Layer]) -> list[Layer]:
        """The layers of a cache with better slots."""
        slots_of_heads: dict[HeadIndex, Head] = {
            (layer, example, head): slots.head(example, head)
            for layer, slots in enumerate(start)
            for example, counts in enumerate(slots.counts)
            for head in range(len(counts))
        }
        sizes = {index: len(keys) for index, (keys, _, _) in slots_of_heads.items()}
        groups = heads.groups_for_fit(sizes)
        for group in tqdm(groups, "refinement", delay=2.0, disable=None, leave=False):
            if sizes[group[0]] == len(heads.trace.head(*group[0])[0]):
                continue  # these heads keep the whole prefix
            batch = heads.load_fitted(group)
            objective = Objective.of(
                batch,
                dense_attention(batch),
                _stacked([slots_of_heads[index] for index in group]),
                pull=_PULL,
                ridge=_RIDGES[self.preset],
                log_bias=self.log_bias,
            )
            refined = refine_slots(objective, self.num_steps)
            for index, keys, values, log_bias in zip(group, *refined, strict=True):
                before = slots_of_heads[index]
                has_bias = before[2] is not None
                slots_of_heads[index] = (
                    keys.to(before[0].dtype),
                    values.to(before[1].dtype),
                    log_bias if has_bias else None,
                )
        return [_layer(slots_of_heads, index, layer) for index, layer in enumerate(start)]


def _stacked(heads: list[Head]) -> Slots:
    """The slots of heads with equally many; without log-bias it is 0."""
    keys = at_least_float32(torch.stack([keys for keys, _, _ in heads]))
    values = at_least_float32(torch.stack([values for _, values, _ in heads]))
    biases = [bias for _, _, bias in heads if bias is not None]
    log_bias = at_least_float32(torch.stack(biases)) if biases else torch.zeros_like(keys[..., 0])
    return Slots(keys, values, log_bias)


def _layer(slots_of_heads: dict[HeadIndex, Head], index: int, start: Layer) -> Layer:
    """One layer from the slots of its heads."""
    keys: list[list[Tensor]] = []
    values: list[list[Tensor]] = []
    biases: list[list[Tensor]] = []
    for example, counts in enumerate(start.counts):
        slots = [slots_of_heads[index, example, head] for head in range(len(counts))]
        keys.append([head_keys for head_keys, _, _ in slots])
        values.append([head_values for _, head_values, _ in slots])
        biases.append([bias for _, _, bias in slots if bias is not None])
    return CompactLayer.ragged(keys, values, None if start.log_bias is None else biases)
