"""A dense forward and what compressors learn from it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from kvcat.cache import CompactCache, CompactLayer, Head, fingerprint, layer_windows
from kvcat.compress.freezing import frozen
from kvcat.compress.sequences import Reconstruction
from kvcat.errors import InputError
from kvcat.models import capture, logits_from_hidden
from kvcat.types import Float, Int, Tensor

_TAIL = 32
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Trace:
    """Keys, values and queries of one forward, split at the end of the prefix.

    The forward is dense, or goes on from a compact cache: then the slots of the prefix are those of the cache and of
    the tokens behind it. Heads that had fewer slots in the cache than others of their layer are filled up with slots of
    log-bias -inf, which no query sees and no compressor keeps; ``head`` leaves them out.

    Args:
        model: the model that ran.
        input_ids: all tokens, prefix first.
        prefix_len: number of tokens to compress.
        supervision: whose queries a compressor may use: "suffix" the later tokens', "self" the prefix's own.
        supervision_start: first position whose query and teacher logits supervise.
        keys: per layer, keys of the prefix's slots after rotation: one per token, fewer behind a compact cache.
        values: per layer, their values.
        queries: per layer, queries after rotation of the positions from ``supervision_start`` on ("suffix"), or of the
            whole prefix ("self").
        tail_queries: per layer, queries after rotation of the last positions of the prefix, at most 32 of them.
        scales: per layer, the factor on q.k.
        hidden: input of the head at the positions from the last of the prefix on.
        fingerprint: identifies the model's weights.
        past_len: tokens that a compact cache stood for; 0: none.
        log_bias: per layer, nats added to the scores of the prefix's slots, -inf where a head has none; None: none.
    """

    model: PreTrainedModel
    input_ids: Int[Tensor, "batch tokens"]
    prefix_len: int
    supervision: str
    supervision_start: int
    keys: list[Float[Tensor, "batch kv_heads _ head_dim"]]
    values: list[Float[Tensor, "batch kv_heads _ value_dim"]]
    queries: list[Float[Tensor, "batch heads queries head_dim"]]
    tail_queries: list[Float[Tensor, "batch heads tail head_dim"]]
    scales: list[float]
    hidden: Float[Tensor, "batch positions hidden"]
    fingerprint: str
    past_len: int = 0
    log_bias: list[Float[Tensor, "batch kv_heads _"]] | None = None
    _memo: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_tokens(self) -> int:
        """Length of the prefix: the position of the token after it."""
        return self.prefix_len

    @property
    def num_slots(self) -> int:
        """Slots of the prefix per layer and head, where they differ of the fullest: what a compressor keeps at most."""
        return max(int(self.counts(layer).max()) for layer in range(len(self.keys)))

    @property
    def batch_size(self) -> int:
        """Number of examples."""
        return self.input_ids.shape[0]

    @property
    def suffix_ids(self) -> Int[Tensor, "batch suffix"]:
        """Tokens after the prefix."""
        return self.input_ids[:, self.prefix_len :]

    @property
    def logits(self) -> Float[Tensor, "batch suffix vocab"]:
        """Dense logits of the suffix positions, made anew at every call."""
        return self.logits_at(0, self.suffix_ids.shape[1])

    def logits_at(self, start: int, stop: int) -> Float[Tensor, "batch positions vocab"]:
        """Dense logits of the suffix positions from start to stop; position -1 is the last of the prefix.

        Args:
            start: first suffix position, at least -1.
            stop: one past the last.
        """
        with torch.no_grad():
            return logits_from_hidden(self.model, self.hidden[:, start + 1 : stop + 1])

    def dense_cache(self) -> CompactCache:
        """The prefix with all its slots: one per token, but for what was compact before."""
        biases = self.log_bias or [None] * len(self.keys)
        layers = [CompactLayer(*parts).without_absent() for parts in zip(self.keys, self.values, biases, strict=True)]
        cache = CompactCache(layers, self.prefix_len, self.fingerprint)
        return replace(cache, metadata={"method": "dense", "num_slots": f"{cache.mean_slots:.6g}"})

    def counts(self, layer: int) -> Int[Tensor, "batch kv_heads"]:
        """Slots of the prefix that every head of a layer has; on the CPU.

        Args:
            layer: index of the layer.
        """
        if self.log_bias is None:
            return torch.full(self.keys[layer].shape[:2], self.keys[layer].shape[2])
        return (self.log_bias[layer] > -torch.inf).sum(-1).cpu()

    def ranks(self, layer: int) -> Int[Tensor, "batch kv_heads slots"]:
        """Number of every slot among those that its head has, from 0; -1 for a slot that the head does not have.

        Args:
            layer: index of the layer.
        """
        keys = self.keys[layer]
        if self.log_bias is None:
            return torch.arange(keys.shape[2], device=keys.device).expand(keys.shape[:3])
        there = self.log_bias[layer] > -torch.inf
        return (there.cumsum(-1) - 1).masked_fill(~there, -1)

    def head(self, layer: int, example: int, head: int) -> Head:
        """Keys, values and log-bias of the slots that a head of the prefix has.

        Args:
            layer: index of the layer.
            example: row of the batch.
            head: KV head.
        """
        keys, values = self.keys[layer][example, head], self.values[layer][example, head]
        if self.log_bias is None:
            return keys, values, None
        bias = self.log_bias[layer][example, head]
        there = bias > -torch.inf
        return (keys, values, bias) if bool(there.all()) else (keys[there], values[there], bias[there])

    def prefix_queries(self, start: int) -> list[Float[Tensor, "batch heads queries head_dim"]]:
        """Per layer, the queries of the prefix positions from start on; more than the last 32 cost a second forward.

        Args:
            start: first position, in [0, prefix_len).

        Raises:
            InputError: a compact cache stood for part of the prefix: its queries are gone.
        """
        if self.past_len:
            raise InputError(
                "eviction by attention needs the queries of the whole prefix, part of which is compact already"
            )
        if self.supervision == "self":
            return [q[:, :, start:] for q in self.queries]
        count = self.prefix_len - start
        if count <= self.tail_queries[0].shape[2]:
            return [q[:, :, -count:] for q in self.tail_queries]
        with frozen(self.model):
            ids = self.input_ids[:, : self.prefix_len]
            return capture(self.model, ids, query_start=start, hidden_start=self.prefix_len - 1).queries

    def memo(self, key: Any, make: Callable[[], _Value]) -> _Value:
        """What ``make`` returned the first time this key was asked for: work shared between keep ratios and methods.

        Args:
            key: hashable; names the value and all options it depends on.
            make: computes the value.
        """
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]


def trace(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "batch tokens"] | Reconstruction,
    prefix_len: int | None = None,
    *,
    supervision: str = "suffix",
    past: CompactCache | None = None,
    chunk_tokens: int = 4096,
) -> Trace:
    """A forward over prefix and suffix, kept for compression and for comparison.

    Args:
        model: a decoder-only transformers model.
        input_ids: windows of equal length, or a reconstruction sequence, which brings its own prefix length.
        prefix_len: number of tokens to compress, in [1, tokens); with "self" up to all tokens, which is the default.
        supervision: "suffix" lets compressors use the queries after the prefix, "self" the prefix's own.
        past: a compact cache of the first ``past.num_tokens`` tokens, fewer than the prefix has: these are not run
            again, and prefix and cache are compressed together. As many examples as ``input_ids``.
        chunk_tokens: most tokens of each example that run at once (``capture``).

    Raises:
        InputError: lengths that do not fit, more tokens than the model has positions, layers that cannot be
            compressed (sliding windows shorter than the sequence, linear attention), or a cache of something else.
    """
    if supervision not in ("suffix", "self"):
        raise InputError(f"supervision must be 'suffix' or 'self', not {supervision!r}")
    start = None
    if isinstance(input_ids, Reconstruction):
        start, prefix_len, input_ids = input_ids.supervision_start, input_ids.prefix_len, input_ids.input_ids
    num_tokens = input_ids.shape[1]
    if prefix_len is None:
        if supervision == "suffix":
            raise InputError(
                "prefix_len is missing: without a suffix use supervision='self' or a reconstruction sequence"
            )
        prefix_len = num_tokens
    longest = num_tokens - (supervision == "suffix")
    if not 1 <= prefix_len <= longest:
        raise InputError(f"prefix_len must be in [1, {longest}] for {num_tokens} tokens, not {prefix_len}")
    _check_model(model, num_tokens)
    known = 0 if past is None else _check_past(past, model, prefix_len, len(input_ids))
    start = prefix_len if start is None else start
    tail = max(known, prefix_len - _TAIL)
    first = known if supervision == "self" else tail
    wide = None if past is None else replace(past, layers=[layer.padded() for layer in past.layers])
    with frozen(model):
        seen = capture(
            model,
            input_ids[:, known:],
            query_start=first - known,
            hidden_start=prefix_len - 1 - known,
            past=None if wide is None else wide.to_transformers(model),
            chunk_tokens=chunk_tokens,
        )
    if not all(bool(x.isfinite().all()) for x in (seen.hidden, *seen.keys, *seen.values)):
        raise InputError(
            f"{type(model).__name__} computes numbers that are not finite: its weights hold NaN or infinity"
        )
    own = slice(0, prefix_len - first) if supervision == "self" else slice(start - first, None)
    added = prefix_len - known
    slots = [added + (0 if wide is None else wide.layers[i].num_slots) for i in range(len(seen.keys))]
    return Trace(
        model=model,
        input_ids=input_ids,
        prefix_len=prefix_len,
        supervision=supervision,
        supervision_start=start,
        keys=_cut(seen.keys, [slice(count) for count in slots]),
        values=_cut(seen.values, [slice(count) for count in slots]),
        tail_queries=[q[:, :, tail - first : prefix_len - first].clone() for q in seen.queries],
        queries=_cut(seen.queries, [own] * len(slots)),
        scales=list(seen.scales),
        hidden=seen.hidden,
        fingerprint=fingerprint(model),
        past_len=known,
        log_bias=None if wide is None else _log_bias(wide, added),
    )


def _cut(states: list[Tensor], parts: list[slice]) -> list[Tensor]:
    """Part of every layer's states; a layer's own go as soon as the part is there."""
    for index, part in enumerate(parts):
        states[index] = states[index][:, :, part].clone()
    return states


def _check_past(past: CompactCache, model: PreTrainedModel, prefix_len: int, batch: int) -> int:
    past.check_model(model)
    if past.num_tokens >= prefix_len:
        raise InputError(f"past holds {past.num_tokens} tokens: the prefix of {prefix_len} adds none to them")
    if past.batch_size != batch:
        raise InputError(f"past holds {past.batch_size} examples, input_ids {batch}")
    return past.num_tokens


def _log_bias(past: CompactCache, added: int) -> list[Float[Tensor, "batch kv_heads _"]]:
    """The log-bias of all slots, 0 for those of the tokens behind the cache."""
    biases = [(x.log_bias, x.keys) for x in past.layers if isinstance(x, CompactLayer)]
    wide = [k.new_zeros(k.shape[:3], dtype=torch.float32) if bias is None else bias for bias, k in biases]
    return [torch.nn.functional.pad(bias, (0, added)) for bias in wide]


def _check_model(model: PreTrainedModel, num_tokens: int) -> None:
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    window = min((w for w in layer_windows(model.config) if w is not None), default=math.inf)
    if window < num_tokens:
        raise InputError(
            f"{name}: a sliding window of {window} tokens is shorter than the sequence of {num_tokens}; "
            "compressing such layers is not supported yet"
        )
    positions = getattr(config, "max_position_embeddings", None) or math.inf
    if num_tokens > positions:
        raise InputError(
            f"{num_tokens} tokens exceed the {positions} positions of {name}; a shorter text, or supervision='self' "
            "in place of a reconstruction sequence, needs fewer"
        )
