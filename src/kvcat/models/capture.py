"""What a dense forward leaves in every layer."""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tqdm import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel

from kvcat.attention import enable
from kvcat.cache import Factors, PrefixCache, cache_argument, check_token_ids, held_factors, rope_factors
from kvcat.errors import InputError, check_least
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

    keys: list[Float[Tensor, "batch _ _ _"]]
    values: list[Float[Tensor, "batch _ _ _"]]
    queries: list[Float[Tensor, "batch _ queries _"]]
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
    rope: Factors | None = None,
) -> Capture:
    """A dense forward, with what attention saw in every layer.

    Up to ``chunk_tokens`` tokens run at once. More run chunk after chunk behind a growing cache, so that only the keys,
    the values and what is kept of queries and ``hidden`` grow with the length, and activations with the chunk. No
    attention mask is made but where a layer's sliding window is shorter than the text. In a terminal a bar shows what
    takes more than two seconds; TQDM_DISABLE=1 hides it.

    Args:
        model: a causal LM that passed ``self_test``; it is switched to kvcat's attention.
        input_ids: token ids, no padding.
        query_positions: tokens whose queries are kept, ascending; None: all.
        hidden_start: token from which on the input of the head is kept, 0..tokens - 1.
        past: what the tokens follow, such as ``CompactCache.to_transformers(model)``; it grows by the tokens.
        chunk_tokens: most tokens of each example that run at once, at least 1.
        rope: the rotary factors of all tokens; None: those that transformers takes for a text of this length.
    """
    num_tokens = input_ids.shape[1]
    check_least(1, chunk_tokens=chunk_tokens)
    check_token_ids(model, input_ids)
    enable(model)
    layers = decoder_layers(model)
    wanted = torch.arange(num_tokens) if query_positions is None else query_positions.cpu()
    if rope is None:
        behind = 0 if past is None else int(past.get_seq_length())
        rope = rope_factors(model.config, behind + num_tokens)
    if num_tokens > chunk_tokens and past is None:
        past = DynamicCache()
    last: dict[int, tuple[Tensor, Tensor, float]] = {}
    queries: list[list[Tensor]] = [[] for _ in layers]
    norms: list[list[Tensor]] = [[] for _ in layers]
    hidden = []

    def measure(_layer: Any, given: tuple[Any, ...], named: dict[str, Any], *, index: int) -> None:
        states = given[0] if given else named["hidden_states"]
        if states.dim() != 3:
            shape = "x".join(map(str, states.shape))
            raise InputError(
                f"{type(model).__name__} is not supported: its layers get hidden states of shape {shape}, not of "
                "batch, tokens and channels"
            )
        norms[index].append(states.float().square().sum(-1))
        bar.update()

    with ExitStack() as hooks:
        total = len(layers) * -(-num_tokens // chunk_tokens)
        # a compact cache holds its own factors in every forward
        hooks.enter_context(held_factors(model, None if isinstance(past, PrefixCache) else rope))
        bar = hooks.enter_context(tqdm(desc="reading", total=total, delay=2.0, disable=None, leave=False))
        for index, layer in enumerate(layers):
            hooks.enter_context(layer.register_forward_pre_hook(partial(measure, index=index), with_kwargs=True))
        for start, ids in zip(range(0, num_tokens, chunk_tokens), input_ids.split(chunk_tokens, 1), strict=True):
            own = wanted[(wanted >= start) & (wanted < start + ids.shape[1])].to(ids.device) - start

            def record(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, own: Tensor = own) -> None:
                queries[layer].append(q if len(own) == q.shape[2] else q[:, :, own])
                last[layer] = k, v, scale

            options = {"use_cache": past is not None, "kv_record": record, **cache_argument(past)}
            states = hidden_states(model, input_ids=ids, **options)
            hidden.append(states[:, max(0, hidden_start - start) :].clone())
    if sorted(last) != list(range(len(layers))):
        attending = f"{len(last)} of its {len(layers)} layers attend through transformers' attention interface"
        raise InputError(f"{type(model).__name__} is not supported: {attending}")
    keys, values, scales = (list(part) for part in zip(*(last[i] for i in range(len(layers))), strict=True))
    joined = [_joined(queries.pop(0)) for _ in layers]
    stream = [torch.cat(parts, 1).median(1).values for parts in norms]
    return Capture(keys, values, joined, _joined(hidden), scales, stream)


def _joined(parts: list[Float[Tensor, "... _ width"]]) -> Float[Tensor, "... tokens width"]:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)
