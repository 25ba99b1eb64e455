"""Where a gradient-based cache starts from."""

from dataclasses import replace

import torch

from kvcat.cache import CompactCache, CompactLayer
from kvcat.compress.attention_matching import AttentionMatching
from kvcat.compress.common import example_generators, kept_layer
from kvcat.compress.eviction import Eviction
from kvcat.compress.scorers import SCORERS
from kvcat.compress.tracing import Trace
from kvcat.errors import InputError
from kvcat.types import Int, Tensor

STARTS = ("first", "random", "attention", "attention-matching", *(n for n in SCORERS if n not in ("first", "random")))


def check_start(init: str | CompactCache, num_sinks: int) -> None:
    """Refuses an unknown start.

    Raises:
        InputError: no such start, or num_sinks negative or with another start than "random".
    """
    if isinstance(init, str) and init not in STARTS:
        raise InputError(f"init must be a compact cache or one of {', '.join(map(repr, STARTS))}, not {init!r}")
    if num_sinks < 0 or (num_sinks and init != "random"):
        raise InputError(f"num_sinks must be at least 0, and 0 unless init is 'random', not {num_sinks}")


def starting_layers(
    trace: Trace, num_slots: int, init: str | CompactCache, *, seed: int, num_sinks: int
) -> list[CompactLayer]:
    """Slots to start from, float32 (float64 where the model is), and copies: they may be written to.

    Args:
        trace: of the windows to compress.
        num_slots: slots per layer and head, smaller than the prefix.
        init: as in ``GradientCompression``.
        seed: of the random positions.
        num_sinks: first positions that random ones come after.

    Raises:
        InputError: a compact cache that does not fit the trace or the number of slots.
    """
    if init in ("first", "random"):
        positions = _positions(trace, num_slots, num_sinks if init == "random" else num_slots, seed)
        layers = [
            kept_layer(trace, index, positions.unsqueeze(1).expand(-1, keys.shape[1], -1))
            for index, keys in enumerate(trace.keys)
        ]
    else:
        layers = _fitting(trace, num_slots, init if isinstance(init, CompactCache) else _made(trace, num_slots, init))
    biases = [None if layer.log_bias is None else _wide(layer.log_bias) for layer in layers]
    return [CompactLayer(_wide(x.keys), _wide(x.values), bias) for x, bias in zip(layers, biases, strict=True)]


def _made(trace: Trace, num_slots: int, init: str) -> CompactCache:
    if init == "attention":
        return AttentionMatching(log_bias=False, values="original")(trace, num_slots=num_slots)
    return (AttentionMatching() if init == "attention-matching" else Eviction(init))(trace, num_slots=num_slots)


def _positions(trace: Trace, num_slots: int, num_sinks: int, seed: int) -> Int[Tensor, "batch slots"]:
    sinks = min(num_sinks, num_slots)
    rows = []
    for generator in example_generators(trace, seed):
        drawn = torch.randperm(trace.num_slots - sinks, generator=generator)[: num_slots - sinks] + sinks
        rows.append(torch.cat([torch.arange(sinks), drawn]).sort().values)
    return torch.stack(rows).to(trace.input_ids.device)


def _fitting(trace: Trace, num_slots: int, init: CompactCache) -> list[CompactLayer]:
    if init.fingerprint != trace.fingerprint or init.num_tokens != trace.prefix_len:
        raise InputError(
            f"init is a cache of {init.num_tokens} tokens and model {init.fingerprint[:12]}, the trace one of "
            f"{trace.prefix_len} tokens and model {trace.fingerprint[:12]}"
        )
    if init.batch_size not in (1, trace.batch_size):
        raise InputError(f"init has {init.batch_size} examples, the trace {trace.batch_size}")
    layers = [layer for layer in init.layers if isinstance(layer, CompactLayer)]
    if not init.is_uniform or len(layers) < len(init.layers):
        raise InputError(f"init keeps other numbers of slots in other heads, {init.num_slots} at most: not supported")
    if init.num_slots != num_slots:
        raise InputError(f"init has {init.num_slots} slots, {num_slots} are wanted")
    rows = torch.arange(trace.batch_size) % init.batch_size
    return [layer.to(trace.keys[0].device).select(rows) for layer in layers]


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
        if trace.fingerprint != first.fingerprint or found.shape[1] != prefix.shape[1] or (found != prefix).any():
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
        _memo={},
    )


def _wide(states: Tensor) -> Tensor:
    return states.to(torch.float64 if states.dtype == torch.float64 else torch.float32, copy=True)
