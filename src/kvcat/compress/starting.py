"""Where a gradient-based cache starts from."""

from dataclasses import replace

import torch

from kvcat.cache import CompactCache, Layer
from kvcat.compress.attention_matching import AttentionMatching
from kvcat.compress.checking import check_options
from kvcat.compress.common import Compressor, best_layer, example_generators, wide
from kvcat.compress.eviction import Eviction
from kvcat.compress.naming import parse_method
from kvcat.compress.scorers import SCORERS
from kvcat.compress.tracing import Trace
from kvcat.errors import InputError
from kvcat.types import Float, Tensor

STARTS = ("first", "random", "attention", "attention-matching", *(n for n in SCORERS if n not in ("first", "random")))


def check_start(init: str | CompactCache, num_sinks: int) -> None:
    """Refuses an unknown start.

    Raises:
        InputError: no such start, options that it does not have or take, or num_sinks negative or with another start
            than "random".
    """
    if isinstance(init, str):
        _maker(init)
    if num_sinks < 0 or (num_sinks and init != "random"):
        raise InputError(f"num_sinks must be at least 0, and 0 unless init is 'random', not {num_sinks}")


def starting_layers(
    trace: Trace, num_slots: int, init: str | CompactCache, *, seed: int, num_sinks: int
) -> list[Layer]:
    """Slots to start from, float32 (float64 where the model is).

    Args:
        trace: of the windows to compress.
        num_slots: slots per layer and head, on average at most where heads differ, smaller than the prefix.
        init: as in ``GradientCompression``.
        seed: of the random positions.
        num_sinks: first positions that random ones come after.

    Raises:
        InputError: a compact cache that does not fit the trace or the number of slots.
    """
    if isinstance(init, CompactCache):
        layers = _fitting(trace, num_slots, init)
    elif (maker := _maker(init)) is not None:
        layers = maker(trace, num_slots=num_slots).layers
    else:
        sinks = min(num_slots, num_sinks if init == "random" else num_slots)
        layers = [best_layer(trace, index, own, num_slots) for index, own in enumerate(_scores(trace, sinks, seed))]
    return [layer.to(dtype=wide(layer.keys).dtype) for layer in layers]


def _maker(init: str) -> Compressor | None:
    """The method that makes a start, from its name and options; None: positions, the same in every layer."""
    name, options = parse_method(init)
    if name not in STARTS:
        raise InputError(f"init must be a compact cache or one of {', '.join(map(repr, STARTS))}, not {name!r}")
    if name in ("first", "random"):
        if options:
            raise InputError(f"init {name!r} has no option {next(iter(options))!r}: give the gradient method's own")
        return None
    if name in SCORERS:
        check_options(SCORERS[name], options, f"init {name}")
        return Eviction(name, **options)
    check_options(AttentionMatching, options, f"init {name}")
    kept = {"log_bias": False, "values": "original"} if name == "attention" else {}
    return AttentionMatching(**{**kept, **options})


def _scores(trace: Trace, sinks: int, seed: int) -> list[Float[Tensor, "batch kv_heads _"]]:
    """Per layer the scores of slots that rise from a random order of their ranks, the sinks before all."""
    ranks = [trace.ranks(layer) for layer in range(len(trace.keys))]
    counts = torch.stack([trace.counts(layer).amax(1) for layer in range(len(trace.keys))]).amax(0).tolist()
    scores = torch.zeros(len(counts), max(counts))
    for own, count, generator in zip(scores, counts, example_generators(trace, seed), strict=True):
        first = min(sinks, count)
        order = torch.cat([torch.arange(first), torch.randperm(count - first, generator=generator) + first])
        own[order] = -torch.arange(count).float()
    spread = scores.to(trace.input_ids.device).unsqueeze(1)
    return [spread.expand(-1, own.shape[1], -1).gather(2, own.clamp(min=0)) for own in ranks]


def _fitting(trace: Trace, num_slots: int, init: CompactCache) -> list[Layer]:
    if init.fingerprint != trace.fingerprint or init.num_tokens != trace.prefix_len:
        raise InputError(
            f"init is a cache of {init.num_tokens} tokens and model {init.fingerprint[:12]}, the trace one of "
            f"{trace.prefix_len} tokens and model {trace.fingerprint[:12]}"
        )
    if init.batch_size not in (1, trace.batch_size):
        raise InputError(f"init has {init.batch_size} examples, the trace {trace.batch_size}")
    slots = init.mean_slots
    if slots > num_slots or (init.is_uniform and slots < num_slots):
        raise InputError(f"init has {slots:.6g} slots, {num_slots} are wanted")
    rows = torch.arange(trace.batch_size) % init.batch_size
    return [layer.to(trace.keys[0].device).select(rows) for layer in init.layers]


def joined(traces: list[Trace]) -> Trace:
    """One example whose queries are those of every row of every trace, for compressors that read the queries.

    Args:
        traces: of one prefix.

    Raises:
        InputError: other models, or other prefixes.
    """
    first = traces[0]
    prefix = first.input_ids[:1, : first.prefix_len]
    for trace in traces:
        found = trace.input_ids[:, : trace.prefix_len]
        same = (trace.fingerprint, trace.past_len, found.shape[1]) == (
            first.fingerprint,
            first.past_len,
            first.prefix_len,
        )
        if not same or (found != prefix).any():
            raise InputError(
                f"one cache is shared by one prefix only: these {len(traces)} traces have several models or prefixes"
            )
    queries = [
        torch.cat([part.transpose(1, 2).flatten(0, 1) for part in parts]).unsqueeze(0).transpose(1, 2)
        for parts in zip(*(trace.queries for trace in traces), strict=True)
    ]
    row = slice(0, 1)
    return replace(
        first,
        input_ids=first.input_ids[row],
        keys=[k[row] for k in first.keys],
        values=[v[row] for v in first.values],
        queries=queries,
        tail_queries=[q[row] for q in first.tail_queries],
        hidden=first.hidden[row],
        log_bias=None if first.log_bias is None else [bias[row] for bias in first.log_bias],
        _memo={},
    )
