"""The log-bias and the values of a compact cache, fitted again to another trace."""

from dataclasses import replace

import torch

from kvcat.cache import CompactCache, CompactLayer, Layer
from kvcat.compress.fitting import fit_to_dense
from kvcat.compress.head_attention import DenseAttention, dense_attention
from kvcat.compress.heads import HeadIndex, Heads
from kvcat.compress.queries import fitted_queries
from kvcat.compress.trace import Trace
from kvcat.errors import InputError
from kvcat.types import Tensor, at_least_float32

_GROUP_ELEMENTS = 2**24  # most numbers that heads solved together hold


@torch.no_grad()
def refit_slots(trace: Trace, cache: CompactCache) -> CompactCache:
    """The cache with the log-bias and the values with which its keys attend as the trace's prefix.

    The fit is that of ``AttentionMatching`` with its default options. The keys do not change, and
    values are pulled towards those of the cache.

    Args:
        trace: dense trace of the cache's tokens.
        cache: in ordinary numbers.

    Raises:
        InputError: a trace with supervision "self" of a model whose queries cannot be moved.
    """
    fitted_to = fitted_queries(trace, 1.0, by_share=True)
    if fitted_to.causal:
        raise InputError("the trace has no queries after its prefix to fit to")
    heads = Heads(trace, fitted_to, None, _GROUP_ELEMENTS)
    dense: dict[HeadIndex, DenseAttention] = {}
    for group in heads.groups_for_scores():
        attention = dense_attention(heads.load(group))
        dense.update(zip(group, attention.split(), strict=True))
    layers = []
    for index, layer in enumerate(cache.ordinary_layers()):
        num_examples, num_heads = layer.counts.shape
        values: list[Tensor] = []
        biases: list[Tensor] = []
        for example in range(num_examples):
            for head in range(num_heads):
                place = (index, example, head)
                bias, fitted = _refit_head(heads, dense[place], place, layer)
                values.append(fitted.to(layer.values.dtype))
                biases.append(bias)
        if isinstance(layer, CompactLayer):
            shape = layer.keys.shape[:3]
            fitted_values = torch.stack(values).reshape(layer.values.shape)
            log_bias = torch.stack(biases).reshape(shape)
        else:
            fitted_values = torch.cat(values)
            log_bias = torch.cat(biases)
        layers.append(replace(layer, values=fitted_values, log_bias=log_bias))
    return replace(cache, layers=layers, metadata={**cache.metadata, "refit": trace.supervision})


def _refit_head(
    heads: Heads, dense: DenseAttention, place: HeadIndex, layer: Layer
) -> tuple[Tensor, Tensor]:
    """Log-bias and values of one head's slots."""
    _, example, head = place
    keys, values, _ = layer.head(example, head)
    batch = heads.load_fitted([place])
    scores = batch.scores(keys=at_least_float32(keys)[None])
    of_head = DenseAttention(*(tensor[None] for tensor in dense))
    bias, fitted, _ = fit_to_dense(scores, of_head, at_least_float32(values)[None])
    return bias[0], fitted[0]
