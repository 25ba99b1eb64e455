"""What one dense forward leaves in every layer."""

from dataclasses import dataclass

import torch
from transformers import Cache, PreTrainedModel

from kvcat.attention import Recorder, enable
from kvcat.errors import InputError
from kvcat.models.structure import hidden_states
from kvcat.types import Float, Int, Tensor


@dataclass(frozen=True, eq=False)
class Capture:
    """Keys, values and queries of a dense forward, and the input of the head; no gradient.

    Args:
        keys: per layer, after rotation; behind a compact cache its slots come first.
        values: per layer, likewise.
        queries: per layer, after rotation; from ``query_start`` on.
        hidden: input of the head (``logits_from_hidden`` makes logits of it).
        scales: per layer, the factor on q.k.
        query_start: position of the first query kept.
    """

    keys: list[Float[Tensor, "batch kv_heads slots head_dim"]]
    values: list[Float[Tensor, "batch kv_heads slots value_dim"]]
    queries: list[Float[Tensor, "batch heads queries head_dim"]]
    hidden: Float[Tensor, "batch tokens hidden"]
    scales: list[float]
    query_start: int = 0


@torch.no_grad()
def capture(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "batch tokens"],
    *,
    query_start: int = 0,
    past: Cache | None = None,
) -> Capture:
    """One dense forward, with what attention saw in every layer.

    Args:
        model: a causal LM that passed ``self_test``; it is switched to kvcat's attention.
        input_ids: token ids, no padding.
        query_start: token from which on queries are kept, 0..tokens - 1.
        past: what the tokens follow, such as ``CompactCache.to_transformers(model, read_only=True)``.

    Raises:
        InputError: query_start outside the sequence, or layers without keys and values of their own.
    """
    if not 0 <= query_start < input_ids.shape[1]:
        raise InputError(f"query_start must lie in 0..{input_ids.shape[1] - 1}, got {query_start}")
    enable(model)
    recorder = Recorder(query_start)
    hidden = hidden_states(
        model, input_ids=input_ids, use_cache=past is not None, past_key_values=past, kv_recorder=recorder
    )
    layers = range(model.config.get_text_config(decoder=True).num_hidden_layers)
    if sorted(recorder.keys) != list(layers):
        raise InputError(
            f"{type(model).__name__} is not supported: {len(recorder.keys)} of its {len(layers)} layers attend "
            "through transformers' attention interface"
        )
    return Capture(
        keys=[recorder.keys[i] for i in layers],
        values=[recorder.values[i] for i in layers],
        queries=[recorder.queries[i] for i in layers],
        hidden=hidden,
        scales=[recorder.scales[i] for i in layers],
        query_start=query_start,
    )
