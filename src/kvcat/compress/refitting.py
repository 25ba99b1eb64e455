"""Values fitted again to a cache that must do without its log-bias."""

from dataclasses import replace

import torch

from kvcat.cache import CompactCache
from kvcat.compress.asking import ask, own_queries
from kvcat.compress.heads import Head, HeadBlock, head_groups, load_block
from kvcat.compress.solvers import check_ridge, fit_values
from kvcat.compress.tracing import Trace
from kvcat.errors import InputError
from kvcat.types import Float, Tensor


@torch.no_grad()
def refit_without_log_bias(
    trace: Trace, cache: CompactCache, *, ridge: float = 1e-2, weights: str = "share", own_weight: float = 1.0
) -> CompactCache:
    """The same keys without log-bias, their values fitted so that attention over them equals the dense one again.

    For every head the values C minimise |W C - O|^2 + ridge * |W|_2^2 * |C - C_0|^2, with the attention weights
    W = softmax(q.K_kept), the outputs O of the dense prefix and the cache's own values C_0, over the queries and with
    the weights that ``AttentionMatching`` fits to (``ask``): there no head does worse than with the log-bias merely
    dropped. Layers without log-bias stay as they are.

    Args:
        trace: of the prefix that the cache stands for, with queries after it.
        cache: of this trace.
        ridge: relative to the squared spectral norm of W, larger than 0.
        weights, own_weight: as in ``AttentionMatching``.

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
    layers, fitted = list(cache.layers), {}
    biased = [index for index, layer in enumerate(layers) if layer.log_bias is not None]
    asked = ask(trace, own_queries(trace) if own_weight else None, own_weight, by_share=weights == "share")
    for heads in head_groups(asked.trace, biased):
        by_slots: dict[int, list[Head]] = {}
        for index, example, head in heads:
            by_slots.setdefault(int(layers[index].counts[example, head]), []).append((index, example, head))
        for alike in by_slots.values():
            fitted.update(
                zip(alike, _fit(load_block(asked.trace, alike, None, asked.weights), alike, cache, ridge), strict=True)
            )
    for index in biased:
        old = layers[index]
        rows, heads = old.counts.shape
        values = torch.cat([fitted[index, b, h] for b in range(rows) for h in range(heads)])
        layers[index] = replace(old, values=values.view_as(old.values).to(old.values.dtype), log_bias=None)
    return replace(cache, layers=layers, metadata={**cache.metadata, "log_bias": "none, values refitted"})


def _fit(
    block: HeadBlock, heads: list[Head], cache: CompactCache, ridge: float
) -> Float[Tensor, "heads slots value_dim"]:
    """Values of a block of heads."""
    own_keys, own_values, _ = zip(*(cache.layers[i].head(b, h) for i, b, h in heads), strict=True)
    keys, values = torch.stack(own_keys).to(block.keys), torch.stack(own_values).to(block.keys)
    outputs = torch.cat([block.scores(chunk).softmax(-1) @ block.values for chunk in block.query_chunks()], dim=1)
    weights = (block.queries @ keys.mT).softmax(-1)
    left, every = outputs - weights @ values, slice(None)
    return values + fit_values(block.weighted(weights, every), block.weighted(left, every), ridge=ridge)
