"""Captures the keys, values, queries and hidden states that a dense forward computes in every
layer.
"""

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from tqdm import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvcat.attention import enable, exclusive
from kvcat.cache import (
    Factors,
    LayerState,
    PrefixCache,
    cache_argument,
    check_token_ids,
    continue_states,
    held_factors,
    rope_factors,
)
from kvcat.errors import InputError
from kvcat.memory import CHUNK_TOKENS
from kvcat.models.rounded import Rounded
from kvcat.models.structure import attention_child, decoder_layers, hidden_states
from kvcat.progress import disable_bar
from kvcat.types import Float, Int, Tensor, check_no_autocast


@dataclass(frozen=True, eq=False)
class Capture:
    """Keys, values and queries of a dense forward, and the input of the head; no gradient.

    Args:
        keys: per layer, after rotation; after a compact cache its slots come first.
        values: per layer, likewise.
        queries: per layer, after rotation, of ``query_positions``; rounded if that was asked for.
        hidden: input of the head (``logits_from_hidden`` makes logits of it), from
            ``hidden_start`` on.
        scales: per layer, the factor on q.k.
        stream: per layer, the squared norm of the residual stream that enters it, the median over
            tokens. Where a norm follows the attention, this is divided by the factor by which the
            norm enlarges the attention's output, so that it compares with that output.
    """

    keys: list[Float[Tensor, "batch _ _ _"]]
    values: list[Float[Tensor, "batch _ _ _"]]
    queries: list[Any]  # Float[Tensor, "batch heads queries head_dim"], or Rounded
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
    chunk_tokens: int = CHUNK_TOKENS,
    rope: Factors | None = None,
    layers: Sequence[int] | None = None,
    first_slot: int = 0,
    rounded: bool = False,
) -> Capture:
    """The keys, values, queries and hidden states of a dense forward.

    Up to ``chunk_tokens`` tokens run at once. A longer text runs chunk by chunk with a growing
    cache: only the keys, the values and the kept queries and hidden states grow with its length,
    while activations grow with the chunk. No attention mask is made, except where a layer's sliding
    window is shorter than the text. In a terminal a bar shows the progress after two seconds;
    TQDM_DISABLE=1 hides it.

    Args:
        model: a causal LM that passed ``self_test``; it is switched to kvcat's attention.
        input_ids: token ids, no padding.
        query_positions: tokens whose queries are kept, ascending; None: all.
        hidden_start: first token for which the input of the head is kept, 0..tokens - 1.
        past: cache that the tokens follow, such as ``CompactCache.to_transformers(model)``; it
            grows by the tokens.
        chunk_tokens: most tokens of each example that run at once, at least 1.
        rope: the rotary factors of all tokens; None: those that transformers uses for a text of
            this length.
        layers: numbers of the layers whose states are captured; None: all. The lists of the result
            have these layers in this order.
        first_slot: first slot of every layer whose key and value are captured, those of ``past``
            included, from the end if negative; the others are in no result.
        rounded: whether queries are kept in 8 bits, rounded as soon as a layer has made them. Then
            what is kept of all layers lies in a few blocks of memory, which are freed together.

    Raises:
        InputError: ``torch.autocast`` is on, or an argument is not valid.
    """
    check_no_autocast(model.device)
    num_tokens = input_ids.shape[1]
    chunk_tokens = int(chunk_tokens)  # torch takes no number of numpy
    check_token_ids(model, input_ids)
    enable(model)
    continue_states(model)
    if query_positions is None:
        query_positions = torch.arange(num_tokens)
    if rope is None:
        past_tokens = 0 if past is None else int(past.get_seq_length())
        rope = rope_factors(model.config, past_tokens + num_tokens)
    modules = decoder_layers(model)
    numbers = list(range(len(modules)) if layers is None else layers)
    blocks = _Blocks(len(numbers))
    if num_tokens > chunk_tokens and past is None:
        # a cache of the configuration has recurrent states, and cuts sliding windows
        is_whole = len(numbers) == len(modules)
        past = DynamicCache() if is_whole else DynamicCache(config=model.config)
        if is_whole and rounded:
            rooms: list[Any] = [_Room(blocks, num_tokens) for _ in modules]
            past = Cache(layers=rooms)
    num_chunks = -(-num_tokens // chunk_tokens)
    total = len(modules) * num_chunks
    hidden = []
    with ExitStack() as stack:
        stack.enter_context(exclusive(model))
        # a compact cache holds its factors itself in every forward
        held = None if isinstance(past, PrefixCache) else rope
        stack.enter_context(held_factors(model, held))
        bar = tqdm(desc="reading", total=total, delay=2.0, disable=disable_bar(), leave=False)
        stack.enter_context(bar)
        recording = _Recording(
            type(model).__name__,
            numbers,
            query_positions.cpu(),
            bar,
            first_slot,
            num_tokens,
            rounded=rounded,
            blocks=blocks,
        )
        for number, layer in enumerate(modules):
            hook = partial(recording.measure, number=number)
            stack.enter_context(layer.register_forward_pre_hook(hook, with_kwargs=True))
            for handle in recording.watch_norm(layer, number):
                stack.enter_context(handle)
        starts = range(0, num_tokens, chunk_tokens)
        for start, chunk in zip(starts, input_ids.split(chunk_tokens, dim=1), strict=True):
            recording.begin_chunk(chunk, start)
            options = {"use_cache": past is not None, "kv_record": recording.record}
            options.update(cache_argument(past))
            states = hidden_states(model, input_ids=chunk, **options)
            # a slice would keep the states of the whole chunk in memory
            hidden.append(states[:, max(0, hidden_start - start) :].clone())
    return recording.result(hidden)


class _Blocks:
    """Memory for tensors of all layers that stay, allocated at once on a CPU.

    One by one they would lie between the activations of a forward pass, and the C library keeps the
    holes that these leave: two to three times what stays.

    Args:
        num_layers: of which each asks once for a tensor of each kind.
    """

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.free: dict[tuple[Any, ...], list[Tensor]] = {}

    def empty(self, kind: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """An uninitialised tensor of a kind, with the type and device of another."""
        if like.device.type != "cpu":
            return like.new_empty(*shape)
        # layers may differ; pages that nobody writes to take no memory
        key = (kind, like.dtype, *shape)
        if not self.free.get(key):
            self.free[key] = list(like.new_empty(self.num_layers, *shape))
        return self.free[key].pop()

    def copy(self, kind: str, states: Tensor) -> Tensor:
        """A copy of a tensor."""
        return self.empty(kind, states.shape, states).copy_(states)


class _Room(DynamicLayer):
    """The keys and values of a layer in a block, with room for a text of known length.

    Args:
        blocks: of all layers.
        num_tokens: of the text.
    """

    def __init__(self, blocks: _Blocks, num_tokens: int) -> None:
        super().__init__()
        self.blocks = blocks
        self.num_tokens = num_tokens
        self.num_held = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Hold the next tokens; the result are the keys and values of all so far."""
        if not self.is_initialized:
            self.dtype, self.device = key_states.dtype, key_states.device
            self.all_keys, self.all_values = (
                self.blocks.empty(
                    kind, (*states.shape[:2], self.num_tokens, states.shape[3]), states
                )
                for kind, states in (("keys", key_states), ("values", value_states))
            )
            self.is_initialized = True
        start = self.num_held
        self.num_held += key_states.shape[2]
        self.all_keys[:, :, start : self.num_held] = key_states
        self.all_values[:, :, start : self.num_held] = value_states
        self.keys = self.all_keys[:, :, : self.num_held]
        self.values = self.all_values[:, :, : self.num_held]
        return self.keys, self.values


class _Recording:
    """Collects what the layers of a model compute, chunk after chunk.

    Args:
        model_class: name of the model's class, for messages.
        numbers: of the layers whose states are kept.
        query_positions: tokens whose queries are kept, ascending, on the CPU.
        bar: advances by one for each layer of each chunk.
        first_slot: as in ``capture``.
        num_tokens: of the text.
        rounded: as in ``capture``.
        blocks: for what is kept.
    """

    def __init__(
        self,
        model_class: str,
        numbers: list[int],
        query_positions: Int[Tensor, " kept"],
        bar: Any,
        first_slot: int,
        num_tokens: int,
        *,
        rounded: bool,
        blocks: _Blocks,
    ):
        self.model_class = model_class
        self.numbers = numbers
        self.query_positions = query_positions
        self.bar = bar
        self.first_slot = first_slot
        self.num_tokens = num_tokens
        self.is_rounded = rounded
        self.blocks = blocks
        self.chunk = slice(0, num_tokens)
        # positions in this chunk whose queries are kept
        self.chunk_positions = query_positions
        # keys and values of the whole text so far, and the factor on q.k, by layer
        self.latest: dict[int, tuple[Tensor, Tensor, float]] = {}
        # per layer, one tensor for each chunk
        self.queries: dict[int, list[Tensor]] = {number: [] for number in numbers}
        self.rounded: dict[int, Rounded] = {}
        self.num_rounded = 0  # queries of the chunks before this one
        # of every token; a small tensor for each chunk would leave holes as well
        self.norms: dict[int, Tensor] = {}
        # squared norm after a norm that follows the attention, relative to that before it
        self.enlargements: dict[int, list[Tensor]] = {number: [] for number in numbers}
        self.attention_output: Tensor | None = None
        self.thread = threading.get_ident()

    def _is_own_forward(self) -> bool:
        """Whether a hook runs in a forward of this capture.

        Another thread may run the model without kvcat, for example by ``generate``.
        """
        return threading.get_ident() == self.thread

    def begin_chunk(self, chunk: Int[Tensor, "batch tokens"], start: int) -> None:
        """Choose the queries to keep of a chunk whose first token has the position ``start``."""
        self.chunk = slice(start, start + chunk.shape[1])
        positions = self.query_positions
        in_chunk = (positions >= start) & (positions < start + chunk.shape[1])
        self.chunk_positions = positions[in_chunk].to(chunk.device) - start
        self.num_rounded = int((positions < start).sum())

    def record(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float
    ) -> None:
        """Keep the queries, keys and values that a layer's attention received."""
        if layer not in self.queries:
            return
        positions = self.chunk_positions
        is_all = len(positions) == queries.shape[2]
        kept = queries if is_all else queries[:, :, positions]
        if self.is_rounded:
            self._round(layer, kept)
        else:
            self.queries[layer].append(kept)
        if self.first_slot:  # without the memory of the slots before it
            keys = keys[:, :, self.first_slot :]
            values = values[:, :, self.first_slot :]
            keys = self.blocks.copy("keys", keys)
            values = self.blocks.copy("values", values)
        self.latest[layer] = (keys, values, scale)

    def _round(self, layer: int, queries: Tensor) -> None:
        """Keep queries of a layer in 8 bits."""
        some = Rounded.of(queries)
        if layer not in self.rounded:
            num_queries = len(self.query_positions)
            self.rounded[layer] = Rounded(
                *(
                    self.blocks.empty(kind, (*each.shape[:2], num_queries, each.shape[3]), each)
                    for kind, each in (("queries", some.integers), ("scales", some.scales))
                )
            )
        rows = slice(self.num_rounded, self.num_rounded + queries.shape[2])
        self.rounded[layer].integers[:, :, rows] = some.integers
        self.rounded[layer].scales[:, :, rows] = some.scales

    def measure(
        self, _layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, number: int
    ) -> None:
        """Keep the squared norms of the residual stream that enters a layer."""
        if not self._is_own_forward():
            return
        states = args[0] if args else kwargs["hidden_states"]
        if number in self.queries:
            norms = states.float().square().sum(-1)
            if number not in self.norms:
                shape = (len(norms), self.num_tokens)
                self.norms[number] = self.blocks.empty("norms", shape, norms)
            self.norms[number][:, self.chunk] = norms
        self.bar.update()

    def watch_norm(self, layer: nn.Module, number: int) -> list[RemovableHandle]:
        """Hooks that measure how much a norm between the attention and the stream enlarges.

        Gemma 3 and OLMo 2 have such a norm. It is the module of the layer that gets the attention's
        output itself; other models add this output to the stream first.
        """
        attention = attention_child(layer)
        if attention is None or number not in self.enlargements:
            return []

        def keep(_module: nn.Module, _args: Any, output: Any) -> None:
            if not self._is_own_forward():
                return
            self.attention_output = output[0] if isinstance(output, tuple) else output

        def compare(_module: nn.Module, args: Any, output: Any) -> None:
            before = self.attention_output
            if not self._is_own_forward() or before is None or not args or args[0] is not before:
                return
            self.attention_output = None
            # clamped: an attention output of zeros has no direction to enlarge
            size = before.float().square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)
            self.enlargements[number].append(output.float().square().sum(-1) / size)

        others = [child for child in layer.children() if child is not attention]
        handles = [attention.register_forward_hook(keep)]
        handles += [child.register_forward_hook(compare) for child in others]
        return handles

    def _stream(self, layer: int) -> Float[Tensor, " batch"]:
        """The squared norm of the stream as ``Capture`` has it."""
        stream = self.norms[layer].median(dim=1).values
        if self.enlargements[layer]:
            stream = stream / torch.cat(self.enlargements[layer], dim=1).median(dim=1).values
        return stream

    def result(self, hidden: list[Tensor]) -> Capture:
        """The capture of all chunks; ``hidden`` has the kept hidden states of each."""
        if sorted(self.latest) != sorted(self.numbers):
            raise InputError(
                f"{self.model_class} is not supported: not all of its layers attend through "
                "transformers' attention interface"
            )
        keys = []
        values = []
        scales = []
        queries = []
        stream = []
        for layer in self.numbers:
            layer_keys, layer_values, scale = self.latest[layer]
            keys.append(layer_keys)
            values.append(layer_values)
            scales.append(scale)
            queries.append(self.rounded[layer] if self.is_rounded else _joined(self.queries[layer]))
            # only one layer's queries are in memory twice, as chunks and joined
            self.queries[layer] = []
            stream.append(self._stream(layer))
        return Capture(keys, values, queries, _joined(hidden), scales, stream)


@torch.no_grad()
def layer_states(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "batch tokens"],
    layers: Sequence[int],
    *,
    past: Cache | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    rope: Factors | None = None,
) -> dict[int, LayerState]:
    """The states of layers with a sliding window or a recurrent state after the tokens.

    Args:
        model, input_ids, chunk_tokens, rope: as in ``capture``.
        layers: numbers of these layers; without any, nothing is run.
        past: cache that the tokens follow, such as ``CompactCache.to_transformers(model)``; it
            grows by the tokens.
    """
    if not layers:
        return {}
    enable(model)
    continue_states(model)
    cache = DynamicCache(config=model.config) if past is None else past
    held = None if isinstance(past, PrefixCache) else rope
    with exclusive(model), held_factors(model, held):
        for chunk in input_ids.split(chunk_tokens, dim=1):
            hidden_states(model, input_ids=chunk, use_cache=True, **cache_argument(cache))
    return {layer: LayerState.of(cache.layers[layer]) for layer in layers}


def _joined(chunks: list[Float[Tensor, "... _ width"]]) -> Float[Tensor, "... tokens width"]:
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim=-2)
