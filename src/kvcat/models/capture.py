"""What a dense forward leaves in every layer."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from kvcat.attention import Recorder, enable
from kvcat.errors import InputError
from kvcat.models.structure import decoder_layers, hidden_states
from kvcat.types import Float, Int, Tensor


@dataclass(frozen=True, eq=False)
class Capture:
    """Keys, values and queries of a dense forward, and the input of the head; no gradient.

    Args:
        keys: per layer, after rotation; behind a compact cache its slots come first.
        values: per layer, likewise.
        queries: per layer, after rotation; from ``query_start`` on.
        hidden: input of the head (``logits_from_hidden`` makes logits of it); from ``hidden_start`` on.
        scales: per layer, the factor on q.k.
        stream: per layer, the squared norm of the residual stream that enters it, the median over tokens.
    """

    keys: list[Float[Tensor, "batch kv_heads _ head_dim"]]
    values: list[Float[Tensor, "batch kv_heads _ value_dim"]]
    queries: list[Float[Tensor, "batch heads queries head_dim"]]
    hidden: Float[Tensor, "batch tokens hidden"]
    scales: list[float]
    stream: list[Float[Tensor, " batch"]]


@torch.no_grad()
def capture(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "batch tokens"],
    *,
    query_start: int = 0,
    query_positions: Int[Tensor, " kept"] | None = None,
    hidden_start: int = 0,
    past: Cache | None = None,
    chunk_tokens: int = 4096,
) -> Capture:
    """A dense forward, with what attention saw in every layer.

    Up to ``chunk_tokens`` tokens run at once. More run chunk after chunk behind a growing cache, so that only the keys,
    the values and what is kept of queries and ``hidden`` grow with the length, and activations with the chunk. No
    attention mask is made but where a layer's sliding window is shorter than the text.

    Args:
        model: a causal LM that passed ``self_test``; it is switched to kvcat's attention.
        input_ids: token ids, no padding.
        query_start: token from which on queries are kept, 0..tokens - 1.
        query_positions: tokens whose queries are kept in place of these, ascending; None: all from there on.
        hidden_start: token from which on the input of the head is kept, 0..tokens - 1.
        past: what the tokens follow, such as ``CompactCache.to_transformers(model)``; it grows by the tokens.
        chunk_tokens: most tokens of each example that run at once, at least 1.

    Raises:
        InputError: a number out of its range, or layers without keys and values of their own.
    """
    num_tokens = input_ids.shape[1]
    for name, start in (("query_start", query_start), ("hidden_start", hidden_start)):
        if not 0 <= start < num_tokens:
            raise InputError(f"{name} must lie in 0..{num_tokens - 1}, got {start}")
    if chunk_tokens < 1:
        raise InputError(f"chunk_tokens must be at least 1, not {chunk_tokens}")
    enable(model)
    step = min(num_tokens, chunk_tokens)
    if step < num_tokens and past is None:
        past = DynamicCache()
    before = 0 if past is None else int(past.get_seq_length())
    queries, hidden, recorder = [], [], Recorder()
    norms: dict[int, list[Tensor]] = {}
    for start in range(0, num_tokens, step):
        if start and past is not None and past.get_seq_length() != before + start:
            raise InputError(f"past does not grow: {num_tokens} tokens cannot follow it in chunks of {step}")
        recorder = Recorder(max(0, query_start - start))
        if query_positions is not None:
            here = (query_positions >= start) & (query_positions < start + step)
            recorder.query_positions = query_positions[here].to(input_ids.device) - start
        with _stream_norms(model, norms):
            states = hidden_states(
                model,
                input_ids=input_ids[:, start : start + step],
                use_cache=past is not None,
                past_key_values=past,
                kv_recorder=recorder,
            )
        _check_layers(model, recorder)
        queries.append(recorder.queries)
        hidden.append(states[:, max(0, hidden_start - start) :].clone())
    layers = range(len(recorder.keys))
    return Capture(
        keys=[recorder.keys[i] for i in layers],
        values=[recorder.values[i] for i in layers],
        queries=[_joined([part.pop(i) for part in queries]) for i in layers],
        hidden=_joined(hidden),
        scales=[recorder.scales[i] for i in layers],
        stream=[torch.cat(norms[i], 1).median(1).values for i in layers],
    )


@contextmanager
def _stream_norms(model: PreTrainedModel, found: dict[int, list[Tensor]]) -> Iterator[None]:
    """Append to each layer's list the squared norms (batch, tokens) of the states that enter it."""

    def note(index: int, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        states = arguments[0] if arguments else named["hidden_states"]
        found.setdefault(index, []).append(states.float().square().sum(-1))

    hooks = [
        layer.register_forward_pre_hook(lambda _, given, named, i=i: note(i, given, named), with_kwargs=True)
        for i, layer in enumerate(decoder_layers(model))
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _check_layers(model: PreTrainedModel, recorder: Recorder) -> None:
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if sorted(recorder.keys) != list(range(num_layers)):
        raise InputError(
            f"{type(model).__name__} is not supported: {len(recorder.keys)} of its {num_layers} layers attend "
            "through transformers' attention interface"
        )


def _joined(parts: list[Float[Tensor, "... _ width"]]) -> Float[Tensor, "... tokens width"]:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)
