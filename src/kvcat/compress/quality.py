"""Budgets as the quality wanted: the smallest compact cache that reaches it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvcat.cache import CompactCache
from kvcat.compress.common import Compressor
from kvcat.compress.replaying import replay_hidden
from kvcat.compress.teacher import Teacher, held_out_start
from kvcat.compress.tracing import Trace
from kvcat.errors import InputError
from kvcat.types import Float, Tensor


@dataclass(frozen=True)
class SmallestCache:
    """What ``smallest_cache`` found.

    Args:
        cache: the smallest one tried that reaches ``max_kl``.
        num_slots: its budget, slots per layer and head.
        kl: its KL at the held-out positions, nats per token, the worst example's; 0 for the whole prefix.
        max_kl: what was asked for.
        tried: KL by number of slots, in the order of the tries.
    """

    cache: CompactCache
    num_slots: int
    kl: float
    max_kl: float
    tried: dict[int, float]


def smallest_cache(
    trace: Trace,
    compressor: Compressor,
    max_kl: float,
    *,
    held_out: Trace | float = 0.25,
    max_tries: int | None = None,
    on_try: Callable[[int, float], None] | None = None,
) -> SmallestCache:
    """The smallest compact cache with KL(dense || compact) of at most ``max_kl`` at positions it was not fitted to.

    Bisection over the number of slots between 1 and the prefix length, at which the KL is 0, so that there always is an
    answer. It ends where one slot fewer misses the mark, or after ``max_tries``. The KL of a real method does not fall
    with every slot; of all numbers tried the smallest that reached the mark is taken, as on the lower envelope of
    what was seen. Every example of a batch has to reach it.

    Args:
        trace: of the windows to compress.
        compressor: any; it is given a part of the trace, or the trace itself where ``held_out`` is another one.
        max_kl: nats per token, at least 0.
        held_out: fraction in (0, 1) of the supervising positions, the last ones, that the compressor does not see and
            the KL is taken at; or another trace of the same prefix, whose supervising positions serve.
        max_tries: most caches made, at least 1; None: until the answer is exact. The whole prefix costs no try.
        on_try: called after every try with the number of slots and the KL.

    Raises:
        InputError: an argument out of its range, a trace with supervision "self" and a fraction held out, a trace of
            another prefix or of the same tokens, or a KL that is not a number.
    """
    if not (max_kl >= 0 and math.isfinite(max_kl)):
        raise InputError(f"max_kl must be at least 0 nats per token and finite, not {max_kl}")
    if max_tries is not None and max_tries < 1:
        raise InputError(f"max_tries must be at least 1, not {max_tries}")
    learn, judge = (trace, held_out) if isinstance(held_out, Trace) else split_supervision(trace, held_out)
    if isinstance(held_out, Trace):
        _check_held_out(learn, judge)
    best, found, tried = trace.dense_cache(), 0.0, {}
    missed, reached = 0, trace.num_slots
    while reached - missed > 1 and (max_tries is None or len(tried) < max_tries):
        slots = _between(missed, reached)
        cache = compressor(learn, num_slots=slots)
        kl = supervised_kl(judge, cache).max().item()
        if math.isnan(kl):
            raise InputError(
                f"the KL of a cache of {slots} slots is not a number: {type(compressor).__name__} went wrong"
            )
        tried[slots] = kl
        if on_try is not None:
            on_try(slots, kl)
        if kl <= max_kl:
            best, found, reached = cache, kl, slots
        else:
            missed = slots
    return SmallestCache(best, reached, found, max_kl, tried)


def supervised_kl(trace: Trace, cache: CompactCache) -> Float[Tensor, " batch"]:
    """KL(dense || compact) per example, mean over the supervising positions of the trace, nats per token.

    ``compare`` gives the mean over the whole suffix; this one leaves out what comes before ``supervision_start``.

    Args:
        trace: with predictions after its prefix.
        cache: a compact cache of this trace's prefix.

    Raises:
        InputError: no such predictions, or a cache of another model or batch.
    """
    first, last = trace.supervision_start - trace.prefix_len, held_out_start(trace, 0.0)
    return Teacher(trace, first, last).kl(replay_hidden(trace.model, cache, trace.suffix_ids))


def split_supervision(trace: Trace, fraction: float) -> tuple[Trace, Trace]:
    """A trace in two of the same prefix: one that ends before the held-out positions, one supervised by these only.

    Nothing is computed again: earlier positions never depend on later ones.

    Args:
        trace: with predictions after its prefix, at least two of them supervising.
        fraction: held out, in (0, 1): the last ceil(fraction * n) of the n supervising positions.

    Raises:
        InputError: fraction out of range, a trace with supervision "self", or no position left to learn from.
    """
    if not 0 < fraction < 1:
        raise InputError(f"held_out must be a trace, or a fraction in (0, 1), not {fraction}")
    stop = trace.prefix_len + held_out_start(trace, fraction)
    own = stop - trace.supervision_start
    learn = replace(
        trace,
        input_ids=trace.input_ids[:, :stop],
        queries=[q[:, :, :own] for q in trace.queries],
        hidden=trace.hidden[:, : stop - trace.prefix_len + 1],
        _memo={},
    )
    judge = replace(trace, supervision_start=stop, queries=[q[:, :, own:] for q in trace.queries], _memo={})
    return learn, judge


def _between(missed: int, reached: int) -> int:
    """Half way on a logarithmic scale: the answer is looked for where caches are small and quickly made."""
    middle = round(math.sqrt(max(1, missed) * reached))
    return min(max(middle, missed + 1), reached - 1)


def _check_held_out(learn: Trace, judge: Trace) -> None:
    held_out_start(judge, 0.0)
    prefixes = [t.input_ids[:, : t.prefix_len] for t in (learn, judge)]
    same = prefixes[0].shape == prefixes[1].shape and bool((prefixes[0] == prefixes[1]).all())
    if not same or learn.fingerprint != judge.fingerprint:
        raise InputError("held_out is a trace of another model or of other prefixes than the trace to compress")
    if learn.input_ids.shape == judge.input_ids.shape and bool((learn.input_ids == judge.input_ids).all()):
        raise InputError("held_out has the tokens of the trace to compress: it must hold others after the prefix")
