"""Replay of a suffix on a compact cache, comparison with the dense model, and the smallest good
cache.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel

from kvcat.attention import enable
from kvcat.cache import CompactCache, cache_argument
from kvcat.compress.trace import Trace, split_supervision
from kvcat.errors import InputError, check_in, check_kind, whole
from kvcat.losses import PositionScores, score_positions
from kvcat.models import frozen, hidden_states, logits_from_hidden, output_head
from kvcat.types import Float, Int, Tensor


def replay(
    model: PreTrainedModel, cache: CompactCache, suffix_ids: Int[Tensor, "batch suffix"]
) -> Float[Tensor, "batch suffix vocab"]:
    """Logits of the suffix positions after a compact cache of the prefix.

    A cache of one example fits a suffix of any number of rows.

    Raises:
        InputError: another model, no tokens, or a batch that does not fit.
    """
    with torch.no_grad():
        return logits_from_hidden(model, replay_hidden(model, cache, suffix_ids))


@torch.no_grad()
def replay_hidden(
    model: PreTrainedModel,
    cache: CompactCache,
    suffix_ids: Int[Tensor, "batch suffix"],
    *,
    any_length: bool = False,
    chunk_tokens: int = 4096,
) -> Float[Tensor, "batch suffix hidden"]:
    """Input of the head at the suffix positions, as ``replay``.

    With ``any_length`` the cache's rotary factors are held however long the text becomes, as its
    trace held them. ``chunk_tokens`` are the most tokens of each example that run at once.
    """
    check_kind(CompactCache, "a CompactCache", cache=cache)
    cache.check_tokens(model, suffix_ids, any_length=any_length)
    past = cache.to_transformers(model, any_length=any_length)
    enable(model)  # whose attention needs no mask of chunk x suffix
    with frozen(model):
        # in order: each chunk is appended to the cache
        chunks = [
            hidden_states(model, input_ids=ids, use_cache=True, **cache_argument(past))
            for ids in suffix_ids.split(chunk_tokens, dim=1)
        ]
    return torch.cat(chunks, dim=1)


@dataclass(frozen=True)
class Scores:
    """Scores of the suffix on a compact cache, one figure per example.

    Args:
        nll, nll_dense: negative log-likelihood of the suffix on the compact and on the dense cache,
            nats per token.
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
def compare(
    trace: Trace, cache: CompactCache, *, start: int = 0, chunk_tokens: int = 4096
) -> Scores:
    """Scores of the trace's suffix on the compact cache, compared with the dense forward.

    The first suffix token is predicted from the prefix's last position, which no compression
    changes: both NLLs count it with the dense prediction.

    Args:
        trace: with a suffix.
        cache: a compact cache of this trace's prefix.
        start: first suffix position that counts, with the token it predicts; 0 takes the whole
            suffix.
        chunk_tokens: most suffix tokens of each example that run at once.

    Raises:
        InputError: no suffix, a cache of another model, text, prefix length or batch, or a start
            that leaves no token.
    """
    check_kind(Trace, "a Trace", trace=trace)
    check_kind(CompactCache, "a CompactCache", cache=cache)
    suffix_len = trace.suffix_ids.shape[1]
    if suffix_len == 0:
        raise InputError(
            f"the trace ends with its prefix of {trace.prefix_len} tokens: no suffix to compare on"
        )
    check_in(f"[0, {max(0, suffix_len - 2)}]", start=whole("start", start))
    scores: Any = _position_scores(trace, cache, chunk_tokens)
    # the last position predicts no token of the suffix
    nll = scores.nll[:, start:-1]
    nll_dense = scores.nll_teacher[:, start:-1]
    if start == 0:
        head = output_head(trace.model)
        first = score_positions(head, trace.hidden[:, :1], trace.suffix_ids[:, :1]).nll
        nll = torch.cat([first, nll], dim=1)
        nll_dense = torch.cat([first, nll_dense], dim=1)
    mean_nll = nll.mean(1)
    mean_nll_dense = nll_dense.mean(1)
    return Scores(
        nll=mean_nll,
        nll_dense=mean_nll_dense,
        delta_nll=mean_nll - mean_nll_dense,
        delta_ppl=mean_nll.exp() - mean_nll_dense.exp(),
        kl=scores.kl[:, start:].mean(1),
        top1=scores.top1[:, start:].mean(1),
    )


def supervised_kl(trace: Trace, cache: CompactCache) -> Float[Tensor, " batch"]:
    """KL(dense || compact) per example, mean over the supervising positions of the trace, nats per
    token.

    Raises:
        InputError: no such positions, or a cache of another model, text or batch.
    """
    trace.check_supervises()
    kl: Any = _position_scores(trace, cache).kl
    mean = kl[:, trace.text.supervision_start - trace.prefix_len :].double().mean(1)
    return mean.clamp_min(0.0)  # rounding makes the KL of equal distributions a little negative


def _position_scores(trace: Trace, cache: CompactCache, chunk_tokens: int = 4096) -> PositionScores:
    """Scores of every suffix position; the last one has no target, and token 0 serves as one."""
    if cache.num_tokens != trace.prefix_len or cache.batch_size not in (1, trace.batch_size):
        raise InputError(
            f"a cache of {cache.batch_size} prefixes of {cache.num_tokens} tokens does not belong "
            f"to a trace of "
            f"{trace.batch_size} prefixes of {trace.prefix_len}"
        )
    cache.check_document(trace.input_ids[:, : trace.prefix_len], "the cache")
    factors = cache.rotary_factors(trace.model)
    if factors != trace.text.rope:
        raise InputError(
            f"the cache has the {factors} rotary factors and the trace the {trace.text.rope} ones: "
            "trace both with the same "
            "room for the text that follows (room=)"
        )
    hidden = replay_hidden(
        trace.model, cache, trace.suffix_ids, any_length=True, chunk_tokens=chunk_tokens
    )
    targets = pad(trace.suffix_ids[:, 1:], (0, 1))
    return score_positions(output_head(trace.model), hidden, targets, trace.hidden[:, 1:])


@dataclass(frozen=True)
class SmallestCache:
    """The result of ``smallest_cache``.

    Args:
        cache: the smallest one tried that reaches the KL.
        num_slots: its budget, slots per layer and head.
        kl: KL of the worst example at the held-out positions, nats per token; 0 for the whole
            prefix.
        tried: KL by number of slots, in the order of the tries.
    """

    cache: CompactCache
    num_slots: int
    kl: float
    tried: dict[int, float]


class NotReachedError(InputError):
    """Not even all slots in few bits are as close as a cache has to be."""


def smallest_cache(
    trace: Trace,
    compressor: Callable[..., CompactCache],
    max_kl: float,
    *,
    held_out: float = 0.25,
    on_try: Callable[[int, float], None] | None = None,
) -> SmallestCache:
    """The smallest compact cache whose KL(dense || compact) on held-out positions is at most
    ``max_kl``.

    Bisection over the number of slots, until one slot fewer has a larger KL. The whole prefix
    always reaches ``max_kl``, if the compressor does not round it to few bits. The KL of a real
    method does not fall with every slot: of all numbers tried, the result is the smallest that
    reached ``max_kl``.

    Args:
        trace: trace of the windows to compress.
        compressor: any compressor; it sees the trace up to the held-out positions.
        max_kl: nats per token, at least 0; every example of a batch has to reach it.
        held_out: fraction in (0, 1) of the supervising positions. The KL is measured at these, the
            last ones.
        on_try: called after every try with the number of slots and the KL.

    Raises:
        InputError: an argument out of its range, a trace with supervision "self", or a KL that is
            not a number.
        NotReachedError: a compressor with bits, in which not even all slots reach the KL.
    """
    check_in("[0, inf)", max_kl=max_kl)
    learn, judge = split_supervision(trace, held_out)
    best = SmallestCache(trace.dense_cache(), trace.max_slots, 0.0, tried={})

    def tried(num_slots: int) -> tuple[CompactCache, float]:
        cache = compressor(learn, num_slots=num_slots)
        kl = supervised_kl(judge, cache).max().item()
        if math.isnan(kl):
            name = type(compressor).__name__
            raise InputError(f"the KL of {num_slots} slots is not a number: {name} failed")
        best.tried[num_slots] = kl
        if on_try is not None:
            on_try(num_slots, kl)
        return cache, kl

    bits = getattr(compressor, "bits", None)
    if bits is not None:
        cache, kl = tried(best.num_slots)
        if kl > max_kl:
            raise NotReachedError(
                f"all {best.num_slots} slots in {bits} bits have a KL of {kl:.2g}, more than "
                f"max_kl {max_kl:g}: take more bits, or a larger max_kl"
            )
        best = SmallestCache(cache, best.num_slots, kl, best.tried)
    too_few = max(0, trace.num_protected - 1)
    while best.num_slots - too_few > 1:
        # half way on a logarithmic scale: small caches are made quickly, so the search begins there
        middle = round(math.sqrt(max(1, too_few) * best.num_slots))
        num_slots = min(max(middle, too_few + 1), best.num_slots - 1)
        cache, kl = tried(num_slots)
        if kl <= max_kl:
            best = SmallestCache(cache, num_slots, kl, best.tried)
        else:
            too_few = num_slots
    return best
