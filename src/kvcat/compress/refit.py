"""The log-bias and the values of a compact cache, fitted again to another trace."""

from dataclasses import replace

import torch

from kvcat.cache import CompactCache, CompactLayer, HeadSlots
from kvcat.compress.fitting import fit_to_dense
from kvcat.compress.heads import HeadIndex, Heads
from kvcat.compress.prefix import Prefix
from kvcat.compress.queries import fitted_queries
from kvcat.compress.trace import Trace
from kvcat.errors import InputError
from kvcat.types import at_least_float32


@torch.no_grad()
def refit_slots(trace: Trace, cache: CompactCache) -> CompactCache:
    """The cache with the log-bias and the values with which its keys attend as the trace's prefix.

    The fit is that of ``AttentionMatching`` with its default options. The keys do not change, and
    values are pulled towards those of the cache.

    Args:
        trace: dense trace of the cache's tokens.
        cache: unquantised.

    Raises:
        InputError: a trace with supervision "self" of a model whose queries cannot be moved.
    """
    prefix = Prefix.of(trace)
    heads = Heads(prefix, fitted_queries(prefix, 1.0, by_share=True))
    if heads.is_causal:
        raise InputError("the trace has no queries after its prefix to fit to")
    layers = []
    for index, layer in enumerate(cache.ordinary_layers()):
        grid = [
            [_refit_head(heads, (index, example, head), slots) for head, slots in enumerate(row)]
            for example, row in enumerate(layer.heads())
        ]
        layers.append(CompactLayer.of_heads(grid))
    record = replace(cache.record, refit=trace.text.supervision)
    return replace(cache, layers=layers, record=record)


def _refit_head(heads: Heads, place: HeadIndex, slots: HeadSlots) -> HeadSlots:
    """One head's slots with the log-bias and values of the fit."""
    batch, dense = heads.fitted_attention([place])
    scores = batch.scores(keys=at_least_float32(slots.keys)[None])
    bias, values, _ = fit_to_dense(scores, dense, at_least_float32(slots.values)[None])
    return replace(slots, values=values[0].to(slots.values.dtype), log_bias=bias[0])
