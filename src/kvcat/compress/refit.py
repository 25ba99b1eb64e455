"""Values fitted again to a cache that must do without its log-bias."""

from dataclasses import replace

import torch

from kvcat.cache import CompactCache
from kvcat.compress.heads import HeadBatch, HeadIndex, dense_attention, head_groups, load_heads
from kvcat.compress.queries import fitted_queries
from kvcat.compress.solvers import check_ridge, fit_values
from kvcat.compress.trace import Trace
from kvcat.errors import InputError
from kvcat.types import Float, Tensor


@torch.no_grad()
def refit_without_log_bias(
    trace: Trace, cache: CompactCache, *, ridge: float = 1e-2, own_weight: float = 1.0
) -> CompactCache:
    """The same keys without log-bias, their values fitted so that attention over them equals the dense one again.

    For every head the values C minimise |W C - O|^2 + ridge * |W|_2^2 * |C - C_0|^2, with the attention weights
    W = softmax(q.K_kept), the outputs O of the dense prefix and the cache's own values C_0, over the queries and with
    the weights that ``AttentionMatching`` fits to: there no head does worse than with the log-bias merely dropped.
    Layers without log-bias stay as they are.

    Args:
        trace: of the prefix that the cache stands for, with queries after it.
        cache: of this trace.
        ridge: relative to the squared spectral norm of W, larger than 0.
        own_weight: as in ``AttentionMatching``.

    Raises:
        InputError: a cache of another model, prefix length or batch, a trace that supervises itself, or a ridge that
            is not larger than 0.
    """
    check_ridge(ridge)
    own = (trace.fingerprint, trace.prefix_len, trace.batch_size)
    if (cache.fingerprint, cache.num_tokens, cache.batch_size) != own:
        raise InputError(
            f"a cache of {cache.batch_size} prefixes of {cache.num_tokens} tokens does not belong to a trace of "
            f"{trace.batch_size} prefixes of {trace.prefix_len}, or not to its model"
        )
    if trace.supervision == "self":
        raise InputError("a refit needs queries that see the whole prefix, which supervision='self' lacks")
    fitted = fitted_queries(trace, own_weight, by_share=True)
    layers = list(cache.layers)
    found: dict[HeadIndex, Tensor] = {}
    for group in head_groups(trace, fitted):
        by_slots: dict[int, list[HeadIndex]] = {}
        for layer, example, head in group:
            if layers[layer].log_bias is not None:
                by_slots.setdefault(int(layers[layer].counts[example, head]), []).append((layer, example, head))
        for alike in by_slots.values():
            values = _refitted(load_heads(trace, fitted, alike), alike, cache, ridge)
            found.update(zip(alike, values, strict=True))
    for index, old in enumerate(layers):
        if old.log_bias is not None:
            rows, heads = old.counts.shape
            values = torch.cat([found[index, b, h] for b in range(rows) for h in range(heads)])
            layers[index] = replace(old, values=values.view_as(old.values).to(old.values.dtype), log_bias=None)
    return replace(cache, layers=layers, metadata={**cache.metadata, "log_bias": "none, values refitted"})


def _refitted(
    batch: HeadBatch, heads: list[HeadIndex], cache: CompactCache, ridge: float
) -> Float[Tensor, "heads slots value_dim"]:
    """Values of a batch of heads."""
    keys, values, _ = zip(*(cache.layers[i].head(b, h) for i, b, h in heads), strict=True)
    attention = (batch.queries @ torch.stack(keys).to(batch.keys).mT).softmax(-1)
    dense, towards = dense_attention(batch), torch.stack(values).to(batch.keys)
    weights = dense.weights.unsqueeze(-1)
    return fit_values(attention * weights, dense.outputs * weights, ridge=ridge, towards=towards)
