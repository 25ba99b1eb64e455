"""What a dense forward leaves in every layer."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from kvcat.attention import enable
from kvcat.errors import InputError
from kvcat.models.structure import decoder_layers, hidden_states
from kvcat.types import Float, Int, Tensor


@dataclass(frozen=True, eq=False)
class Capture:
    """Keys, values and queries of a dense forward, and the input of the head; no gradient.

    Args:
        keys: per layer, after rotation; behind a compact cache its slots come first.
        values: per layer, likewise.
        queries: per layer, after rotation, of ``query_positions``.
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
        query_positions: tokens whose queries are kept, ascending; None: all.
        hidden_start: token from which on the input of the head is kept, 0..tokens - 1.
        past: what the tokens follow, such as ``CompactCache.to_transformers(model)``; it grows by the tokens.
        chunk_tokens: most tokens of each example that run at once, at least 1.
    """
    num_tokens = input_ids.shape[1]
    if not 0 <= hidden_start < num_tokens:
        raise InputError(f"hidden_start must lie in 0..{num_tokens - 1}, got {hidden_start}")
    if chunk_tokens < 1:
        raise InputError(f"chunk_tokens must be at least 1, not {chunk_tokens}")
    enable(model)
    num_layers = len(decoder_layers(model))
    wanted = torch.arange(num_tokens) if query_positions is None else query_positions.cpu()
    if num_tokens > chunk_tokens and past is None:
        past = DynamicCache()
    before = 0 if past is None else int(past.get_seq_length())
    last: dict[int, tuple[Tensor, Tensor, float]] = {}
    queries: list[list[Tensor]] = [[] for _ in range(num_layers)]
    hidden, norms = [], [[] for _ in range(num_layers)]  # type: ignore[var-annotated]
    with _inputs_of_layers(model, lambda i, states: norms[i].append(states.float().square().sum(-1))):
        for start, ids in zip(range(0, num_tokens, chunk_tokens), input_ids.split(chunk_tokens, 1), strict=True):
            if start and past is not None and past.get_seq_length() != before + start:
                chunks = f"{num_tokens} tokens cannot follow it in chunks of {chunk_tokens}"
                raise InputError(f"past does not grow: {chunks}")
            own = wanted[(wanted >= start) & (wanted < start + ids.shape[1])].to(ids.device) - start

            def record(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, own: Tensor = own) -> None:
                queries[layer].append(q if len(own) == q.shape[2] else q[:, :, own])
                last[layer] = k, v, scale

            states = hidden_states(
                model, input_ids=ids, use_cache=past is not None, past_key_values=past, kv_record=record
            )
            hidden.append(states[:, max(0, hidden_start - start) :].clone())
    if sorted(last) != list(range(num_layers)):
        attending = f"{len(last)} of its {num_layers} layers attend through transformers' attention interface"
        raise InputError(f"{type(model).__name__} is not supported: {attending}")
    keys, values, scales = (list(part) for part in zip(*(last[i] for i in range(num_layers)), strict=True))
    joined = [_joined(queries.pop(0)) for _ in range(num_layers)]
    stream = [torch.cat(parts, 1).median(1).values for parts in norms]
    return Capture(keys, values, joined, _joined(hidden), scales, stream)


@contextmanager
def _inputs_of_layers(model: PreTrainedModel, note: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Show the number and the input of every decoder layer that runs during the block."""

    def hook(index: int, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        note(index, arguments[0] if arguments else named["hidden_states"])

    with ExitStack() as handles:
        for i, layer in enumerate(decoder_layers(model)):
            handles.enter_context(
                layer.register_forward_pre_hook(lambda _, given, named, i=i: hook(i, given, named), with_kwargs=True)
            )
        yield


def _joined(parts: list[Float[Tensor, "... _ width"]]) -> Float[Tensor, "... tokens width"]:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)
