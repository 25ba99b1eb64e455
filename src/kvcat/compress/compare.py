"""Replay of a suffix on a compact cache, comparison with the dense model, and the smallest good cache."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel

from kvcat.attention import enable
from kvcat.cache import CompactCache
from kvcat.compress.trace import Trace, split_supervision
from kvcat.errors import InputError
from kvcat.losses import PositionScores, score_positions
from kvcat.models import frozen, hidden_states, logits_from_hidden, output_head
from kvcat.types import Float, Int, Tensor

_CHUNK_TOKENS = 4096  # of each example, run at once


def replay(
    model: PreTrainedModel, cache: CompactCache, suffix_ids: Int[Tensor, "batch suffix"]
) -> Float[Tensor, "batch suffix vocab"]:
    """Logits of the suffix positions when the compact cache stands for the prefix; one example serves any rows.

    Raises:
        InputError: another model, no tokens, or a batch that does not fit.
    """
    with torch.no_grad():
        return logits_from_hidden(model, replay_hidden(model, cache, suffix_ids))


@torch.no_grad()
def replay_hidden(
    model: PreTrainedModel, cache: CompactCache, suffix_ids: Int[Tensor, "batch suffix"]
) -> Float[Tensor, "batch suffix hidden"]:
    """Input of the head at the suffix positions, as ``replay``."""
    options: Any = {"past_key_values": cache.inputs(model, suffix_ids)["past_key_values"], "use_cache": True}
    enable(model)  # whose attention needs no mask of chunk x suffix
    with frozen(model):
        parts = [hidden_states(model, input_ids=ids, **options) for ids in suffix_ids.split(_CHUNK_TOKENS, dim=1)]
    return torch.cat(parts, dim=1)


@dataclass(frozen=True)
class Scores:
    """How the suffix fares on a compact cache, one figure per example.

    Args:
        nll, nll_dense: negative log-likelihood of the suffix on the compact and on the dense cache, nats per token.
        delta_nll: nll - nll_dense.
        delta_ppl: exp(nll) - exp(nll_dense).
        kl: KL(dense || compact), mean over the suffix's query positions, nats.
        top1: fraction of the suffix's query positions where both have the same most likely token.
    """

    nll: Float[Tensor, " batch"]
    nll_dense: Float[Tensor, " batch"]
    delta_nll: Float[Tensor, " batch"]
    delta_ppl: Float[Tensor, " batch"]
    kl: Float[Tensor, " batch"]
    top1: Float[Tensor, " batch"]


@torch.no_grad()
def compare(trace: Trace, cache: CompactCache, *, start: int = 0) -> Scores:
    """The suffix of the trace on the compact cache against the dense forward.

    The first suffix token is predicted from the prefix's last position, which no compression changes: both NLLs count
    it with the dense prediction.

    Args:
        trace: with a suffix.
        cache: a compact cache of this trace's prefix.
        start: first suffix position that counts, with the token it predicts; 0 takes the whole suffix.

    Raises:
        InputError: no suffix, a cache of another model, prefix length or batch, or a start that leaves no token.
    """
    length = trace.suffix_ids.shape[1]
    if length == 0:
        raise InputError(f"the trace ends with its prefix of {trace.prefix_len} tokens: no suffix to compare on")
    if not 0 <= start < max(1, length - 1):
        raise InputError(f"start must be in [0, {length - 2}] for a suffix of {length} tokens, not {start}")
    nll, nll_dense, kl, top1 = (part[:, start:] for part in vars(_position_scores(trace, cache)).values())
    # the last position predicts no token of the suffix
    nll, nll_dense = nll[:, :-1], nll_dense[:, :-1]
    if start == 0:
        first = score_positions(output_head(trace.model), trace.hidden[:, :1], trace.suffix_ids[:, :1]).nll
        nll, nll_dense = torch.cat([first, nll], 1), torch.cat([first, nll_dense], 1)
    nll, nll_dense, kl, top1 = (part.mean(1) for part in (nll, nll_dense, kl, top1))
    return Scores(nll, nll_dense, nll - nll_dense, nll.exp() - nll_dense.exp(), kl, top1)


def supervised_kl(trace: Trace, cache: CompactCache) -> Float[Tensor, " batch"]:
    """KL(dense || compact) per example, mean over the supervising positions of the trace, nats per token.

    Raises:
        InputError: no such positions, or a cache of another model or batch.
    """
    trace.check_supervises()
    kl: Any = _position_scores(trace, cache).kl
    return kl[:, trace.supervision_start - trace.prefix_len :].double().mean(1)


def _position_scores(trace: Trace, cache: CompactCache) -> PositionScores:
    """Scores of every suffix position; the last one has no target and is given token 0."""
    if cache.num_tokens != trace.prefix_len or cache.batch_size not in (1, trace.batch_size):
        raise InputError(
            f"a cache of {cache.batch_size} prefixes of {cache.num_tokens} tokens does not belong to a trace of "
            f"{trace.batch_size} prefixes of {trace.prefix_len}"
        )
    hidden, targets = replay_hidden(trace.model, cache, trace.suffix_ids), pad(trace.suffix_ids[:, 1:], (0, 1))
    return score_positions(output_head(trace.model), hidden, targets, trace.hidden[:, 1:])


@dataclass(frozen=True)
class SmallestCache:
    """What ``smallest_cache`` found.

    Args:
        cache: the smallest one tried that reaches the KL.
        num_slots: its budget, slots per layer and head.
        kl: of the worst example at the held-out positions, nats per token; 0 for the whole prefix.
        tried: KL by number of slots, in the order of the tries.
    """

    cache: CompactCache
    num_slots: int
    kl: float
    tried: dict[int, float]


def smallest_cache(
    trace: Trace,
    compressor: Callable[..., CompactCache],
    max_kl: float,
    *,
    held_out: float = 0.25,
    on_try: Callable[[int, float], None] | None = None,
) -> SmallestCache:
    """Find the smallest compact cache whose KL(dense || compact) on held-out positions is at most ``max_kl``.

    Bisection over the number of slots, until one slot fewer misses the mark; the whole prefix always reaches it. The KL
    of a real method does not fall with every slot: of all numbers tried the smallest that reached the mark is taken.

    Args:
        trace: of the windows to compress.
        compressor: any; it is given the part of the trace that ends before the held-out positions.
        max_kl: nats per token, at least 0; every example of a batch has to reach it.
        held_out: fraction in (0, 1) of the supervising positions, the last ones, that the KL is taken at.
        on_try: called after every try with the number of slots and the KL.

    Raises:
        InputError: an argument out of its range, a trace with supervision "self", or a KL that is not a number.
    """
    if not 0 <= max_kl < math.inf:
        raise InputError(f"max_kl must be at least 0 nats per token and finite, not {max_kl}")
    learn, judge = split_supervision(trace, held_out)
    best, found, tried = trace.dense_cache(), 0.0, {}
    missed, reached = 0, trace.num_slots
    while reached - missed > 1:
        # half way on a logarithmic scale: small caches are made quickly, so the search begins among them
        slots = min(max(round(math.sqrt(max(1, missed) * reached)), missed + 1), reached - 1)
        cache = compressor(learn, num_slots=slots)
        kl = tried[slots] = supervised_kl(judge, cache).max().item()
        if math.isnan(kl):
            raise InputError(f"the KL of {slots} slots is not a number: {type(compressor).__name__} went wrong")
        if on_try is not None:
            on_try(slots, kl)
        if kl <= max_kl:
            best, found, reached = cache, kl, slots
        else:
            missed = slots
    return SmallestCache(best, reached, found, tried)
