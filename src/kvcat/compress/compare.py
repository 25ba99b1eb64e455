"""Replay of a suffix on a compact cache, comparison with the dense model, and the smallest good cache."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel

from kvcat.attention import enable
from kvcat.cache import CompactCache
from kvcat.compress.trace import Trace, split_supervision
from kvcat.errors import InputError
from kvcat.losses import score_positions
from kvcat.models import frozen, hidden_states, logits_from_hidden, output_head
from kvcat.types import Float, Int, Tensor


def replay(
    model: PreTrainedModel, cache: CompactCache, suffix_ids: Int[Tensor, "batch suffix"]
) -> Float[Tensor, "batch suffix vocab"]:
    """Logits of the suffix positions when the compact cache stands for the prefix.

    Args:
        model: the model the cache was made with.
        cache: compact prefix; one cached example serves any number of rows.
        suffix_ids: tokens after the prefix.

    Raises:
        InputError: another model, no tokens, or a batch that does not fit.
    """
    with torch.no_grad():
        return logits_from_hidden(model, replay_hidden(model, cache, suffix_ids))


def replay_hidden(
    model: PreTrainedModel, cache: CompactCache, suffix_ids: Int[Tensor, "batch suffix"], *, chunk_tokens: int = 4096
) -> Float[Tensor, "batch suffix hidden"]:
    """Input of the head at the suffix positions, as ``replay``; at most ``chunk_tokens`` an example run at once."""
    return torch.cat(list(_replayed(model, cache, suffix_ids, chunk_tokens)), dim=1)


@torch.no_grad()
def _replayed(
    model: PreTrainedModel, cache: CompactCache, suffix_ids: Int[Tensor, "batch suffix"], chunk_tokens: int
) -> Iterator[Float[Tensor, "batch positions hidden"]]:
    if chunk_tokens < 1:
        raise InputError(f"chunk_tokens must be at least 1, not {chunk_tokens}")
    past = cache.inputs(model, suffix_ids)["past_key_values"]
    enable(model)  # whose attention needs no mask of chunk x suffix
    for tokens in suffix_ids.split(chunk_tokens, dim=1):
        with frozen(model):
            hidden = hidden_states(model, input_ids=tokens, past_key_values=past, use_cache=True)
        yield hidden


@dataclass(frozen=True)
class Scores:
    """How the suffix fares on a compact cache, one figure per example.

    Args:
        nll: negative log-likelihood of the suffix on the compact cache, nats per token.
        nll_dense: the same on the dense cache.
        delta_nll: nll - nll_dense, nats per token.
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
def compare(trace: Trace, cache: CompactCache, *, start: int = 0, chunk_tokens: int = 4096) -> Scores:
    """The suffix of the trace on the compact cache against the dense forward.

    The first suffix token is predicted from the prefix's last position, which no compression changes: both NLLs count
    it with the dense prediction.

    Args:
        trace: with a suffix.
        cache: a compact cache of this trace's prefix.
        start: first suffix position that counts, with the token it predicts; 0 takes the whole suffix.
        chunk_tokens: as in ``replay_hidden``.

    Raises:
        InputError: no suffix, a cache of another model, prefix length or batch, a start that leaves no token, or
            chunk_tokens below 1.
    """
    length = trace.suffix_ids.shape[1]
    if length == 0:
        raise InputError(
            f"the trace ends with its prefix of {trace.prefix_len} tokens: there is no suffix to compare on"
        )
    if not 0 <= start < max(1, length - 1):
        raise InputError(f"start must be in [0, {length - 2}] for a suffix of {length} tokens, not {start}")
    scores = _position_scores(trace, cache, chunk_tokens)
    nll, nll_dense, kl, top1 = (scores[name][:, start:] for name in _NAMES)
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
    return _position_scores(trace, cache, 4096)["kl"][:, trace.supervision_start - trace.prefix_len :].double().mean(1)


_NAMES = ("nll", "nll_teacher", "kl", "top1")


def _position_scores(trace: Trace, cache: CompactCache, chunk_tokens: int) -> dict[str, Float[Tensor, "batch suffix"]]:
    """Scores of every suffix position; the last one has no target and is given token 0."""
    if cache.num_tokens != trace.prefix_len or cache.batch_size not in (1, trace.batch_size):
        raise InputError(
            f"a cache of {cache.batch_size} prefixes of {cache.num_tokens} tokens does not belong to a trace of "
            f"{trace.batch_size} prefixes of {trace.prefix_len}"
        )
    head, stop, parts = output_head(trace.model), 0, []
    targets = pad(trace.suffix_ids[:, 1:], (0, 1))
    for hidden in _replayed(trace.model, cache, trace.suffix_ids, chunk_tokens):
        start, stop = stop, stop + hidden.shape[1]
        parts.append(score_positions(head, hidden, targets[:, start:stop], trace.hidden[:, start + 1 : stop + 1]))
    return {name: torch.cat([getattr(part, name) for part in parts], 1) for name in _NAMES}


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
    held_out: Trace | float = 0.25,
    on_try: Callable[[int, float], None] | None = None,
) -> SmallestCache:
    """Find the smallest compact cache whose KL(dense || compact) on held-out positions is at most ``max_kl``.

    Bisection over the number of slots, until one slot fewer misses the mark; the whole prefix always reaches it. The KL
    of a real method does not fall with every slot: of all numbers tried the smallest that reached the mark is taken.

    Args:
        trace: of the windows to compress.
        compressor: any; it is given a part of the trace, or the trace itself where ``held_out`` is another one.
        max_kl: nats per token, at least 0; every example of a batch has to reach it.
        held_out: fraction in (0, 1) of the supervising positions, the last ones, that the compressor does not see and
            the KL is taken at; or another trace of the same prefix, whose supervising positions serve.
        on_try: called after every try with the number of slots and the KL.

    Raises:
        InputError: an argument out of its range, a trace with supervision "self" and a fraction held out, a trace of
            another prefix or of the same tokens, or a KL that is not a number.
    """
    if not 0 <= max_kl < math.inf:
        raise InputError(f"max_kl must be at least 0 nats per token and finite, not {max_kl}")
    if isinstance(held_out, Trace):
        _check_held_out(trace, held_out)
        learn, judge = trace, held_out
    else:
        learn, judge = split_supervision(trace, held_out)
    best, found, tried = trace.dense_cache(), 0.0, {}
    missed, reached = 0, trace.num_slots
    while reached - missed > 1:
        # half way on a logarithmic scale: small caches are made quickly, so the search begins among them
        slots = min(max(round(math.sqrt(max(1, missed) * reached)), missed + 1), reached - 1)
        cache = compressor(learn, num_slots=slots)
        kl = tried[slots] = supervised_kl(judge, cache).max().item()
        if math.isnan(kl):
            raise InputError(
                f"the KL of a cache of {slots} slots is not a number: {type(compressor).__name__} went wrong"
            )
        if on_try is not None:
            on_try(slots, kl)
        if kl <= max_kl:
            best, found, reached = cache, kl, slots
        else:
            missed = slots
    return SmallestCache(best, reached, found, tried)


def _check_held_out(learn: Trace, judge: Trace) -> None:
    judge.check_supervises()
    prefixes = [t.input_ids[:, : t.prefix_len] for t in (learn, judge)]
    if learn.fingerprint != judge.fingerprint or not torch.equal(*prefixes):
        raise InputError("held_out is a trace of another model or of other prefixes than the trace to compress")
    if torch.equal(learn.input_ids, judge.input_ids):
        raise InputError("held_out has the tokens of the trace to compress: it must hold others after the prefix")
