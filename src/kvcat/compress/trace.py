"""A dense forward and what compressors learn from it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast, get_args

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel

from kvcat.cache import (
    CompactCache,
    CompactLayer,
    Factors,
    Head,
    check_batch_of_ids,
    document_digest,
    fingerprint,
    layer_windows,
    rope_factors,
)
from kvcat.choices import Supervision
from kvcat.errors import InputError, check_least
from kvcat.models import Capture, capture, frozen, logits_from_hidden, positions_of
from kvcat.types import Float, Int, Tensor

SAMPLED_POSITIONS = 4096
_TAIL = 32


@dataclass(frozen=True)
class Reconstruction:
    """A sequence <text><instruction><text> whose second copy supervises the first.

    The second copy begins at ``supervision_start``.

    ``about`` says how the text became tokens, for the metadata of caches: "chat", yes or no, and of
    a chat template "chat_template", a hash of its source.
    """

    input_ids: Int[Tensor, "batch tokens"]
    prefix_len: int
    supervision_start: int
    about: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Trace:
    """Keys, values and queries of one forward, split at the end of the prefix.

    The forward is dense, or continues from a compact cache. Then the slots of the prefix are those
    of the cache and of the tokens behind it. Heads with fewer slots are filled up with slots of
    log-bias -inf; ``head`` leaves these out.

    Args:
        model: the model that ran.
        input_ids: all tokens, prefix first.
        prefix_len: number of tokens to compress.
        supervision: what compressors are fitted to; with "self" the prefix's own queries, else
            those of tokens after the prefix.
        supervision_start: first position whose query and teacher logits supervise.
        keys, values: per layer, of the prefix's slots after rotation: one per token, fewer behind a
            compact cache.
        queries: per layer, queries after rotation from ``supervision_start`` on, or with "self" of
            the prefix.
        suffix_keys: per layer, keys of the tokens after the prefix.
        prefix_positions: positions of the prefix whose queries are kept: evenly spaced ones, at
            most 4096, and the last 32; all with "self"; of those behind a compact cache.
        prefix_queries: per layer, queries after rotation of these positions.
        scales: per layer, the factor on q.k.
        stream: per layer, the squared norm of the residual stream that enters it, the median over
            tokens.
        hidden: input of the head at the positions from the last of the prefix on.
        fingerprint: identifies the model's weights.
        past_len: tokens that a compact cache stood for; 0: none.
        log_bias: per layer, nats added to the scores of the prefix's slots, -inf where a head has
            none; None: none.
        about: how a document became tokens (``Reconstruction``); part of the metadata of caches.
        rope: the rotary factors of all keys and queries, "short" or "long"; None where these do not
            depend on the length of the text.
        room: tokens that were to follow the prefix; None: those of the suffix.
    """

    model: PreTrainedModel
    input_ids: Int[Tensor, "batch tokens"]
    prefix_len: int
    supervision: Supervision
    supervision_start: int
    keys: Sequence[Float[Tensor, "batch _ _ _"]]
    values: Sequence[Float[Tensor, "batch _ _ _"]]
    queries: Sequence[Float[Tensor, "batch _ queries _"]]
    suffix_keys: Sequence[Float[Tensor, "batch _ suffix _"]]
    prefix_positions: Int[Tensor, " sampled"]
    prefix_queries: Sequence[Float[Tensor, "batch _ sampled _"]]
    scales: Sequence[float]
    stream: Sequence[Float[Tensor, " batch"]]
    hidden: Float[Tensor, "batch positions hidden"]
    fingerprint: str
    past_len: int = 0
    log_bias: Sequence[Float[Tensor, "batch _ _"]] | None = None
    about: Mapping[str, str] = field(default_factory=dict)
    rope: Factors | None = None
    room: int | None = None

    @property
    def num_slots(self) -> int:
        """Slots in the fullest head: the most that a compressor can keep."""
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
        """Dense logits of the suffix positions, computed again at every call."""
        with torch.no_grad():
            return logits_from_hidden(self.model, self.hidden[:, 1:])

    def dense_cache(self) -> CompactCache:
        """The uncompressed prefix, except for parts that were already compact."""
        biases = self.log_bias or [None] * len(self.keys)
        layers = [
            CompactLayer(keys, values, bias).without_absent()
            for keys, values, bias in zip(self.keys, self.values, biases, strict=True)
        ]
        cache = CompactCache(layers, self.prefix_len, self.fingerprint)
        facts = {"method": "dense", "num_slots": f"{cache.mean_slots:.6g}", **self.facts()}
        return replace(cache, metadata=facts)

    def facts(self) -> dict[str, str]:
        """Metadata of caches about the prefix, such as the hash of its tokens and its rotary
        factors.
        """
        document = document_digest(self.input_ids[:, : self.prefix_len])
        facts = {"supervision": self.supervision, **self.about, "document": document}
        if self.rope is not None:
            facts["rope"] = self.rope
            if self.room is not None:
                facts["room"] = str(self.room)
        return facts

    def counts(self, layer: int) -> Int[Tensor, "batch kv_heads"]:
        """Slots of the prefix that every head of a layer has; on the CPU."""
        return (self.ranks(layer) >= 0).sum(-1).cpu()

    def ranks(self, layer: int) -> Int[Tensor, "batch kv_heads slots"]:
        """Index of each slot within its head; -1 for padding."""
        keys = self.keys[layer]
        if self.log_bias is None:
            return torch.arange(keys.shape[2], device=keys.device).expand(keys.shape[:3])
        exists = self.log_bias[layer] > -torch.inf
        return (exists.cumsum(-1) - 1).masked_fill(~exists, -1)

    def head(self, layer: int, example: int, head: int) -> Head:
        """Keys, values and log-bias of the slots that a head of the prefix has."""
        keys = self.keys[layer][example, head]
        values = self.values[layer][example, head]
        if self.log_bias is None:
            return keys, values, None
        bias = self.log_bias[layer][example, head]
        exists = bias > -torch.inf
        if bool(exists.all()):
            return keys, values, bias
        return keys[exists], values[exists], bias[exists]

    def prefix_queries_from(self, start: int) -> Sequence[Float[Tensor, "batch _ queries _"]]:
        """Per layer, the queries of all prefix positions from ``start`` on.

        A second forward computes them where some were not kept.

        Raises:
            InputError: a compact cache stood for part of the prefix: its queries are gone.
        """
        if self.past_len:
            raise InputError(
                "eviction by attention needs all queries of the prefix, part of which is already "
                "compact"
            )
        num_kept = int((self.prefix_positions >= start).sum())
        if num_kept == self.prefix_len - start:
            return [queries[:, :, queries.shape[2] - num_kept :] for queries in self.prefix_queries]
        with frozen(self.model):
            captured = capture(
                self.model,
                self.input_ids[:, : self.prefix_len],
                query_positions=torch.arange(start, self.prefix_len),
                hidden_start=self.prefix_len - 1,
                rope=self.rope,
            )
        return captured.queries

    def check_supervises(self) -> None:
        """Reject a trace without predictions after its prefix."""
        if self.supervision == "self":
            raise InputError(
                "a trace with supervision='self' has no predictions after its prefix: trace a "
                "suffix or a reconstruction sequence, or use AttentionMatching"
            )


def trace(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "batch tokens"] | Reconstruction,
    prefix_len: int | None = None,
    *,
    supervision: str | None = None,
    past: CompactCache | None = None,
    room: int | None = None,
    chunk_tokens: int = 4096,
) -> Trace:
    """A forward over prefix and suffix, kept for compression and for comparison.

    Args:
        model: a decoder-only transformers model.
        input_ids: windows of equal length, or a reconstruction sequence, which brings its own
            prefix length.
        prefix_len: number of tokens to compress, in [1, tokens); with "self" up to all tokens,
            which is the default.
        supervision: one of ``Supervision``. "self" lets compressors use the prefix's own queries
            alone. The others use those after the prefix and say what text that is; None: "suffix",
            or "reconstruction" of such a sequence.
        past: a compact cache of the prefix's first tokens, which are not run again; it is
            compressed with the rest.
        room: tokens of questions and answers that will follow the prefix, at least 0. It matters
            for models alone whose rotary factors depend on the length of the text (LongRoPE):
            prefix and room decide which factors the trace and its caches have. None: the tokens of
            the suffix; of a reconstruction sequence, or with "self", 0.
        chunk_tokens: most tokens of each example that run at once (``capture``).

    Raises:
        InputError: lengths that do not fit, more tokens than the model has positions, layers that
            cannot be compressed (sliding windows shorter than the sequence, linear attention), a
            cache of something else, or a negative room.
    """
    supervision_start = None
    about: Mapping[str, str] = {}
    check_least(0, room=0 if room is None else room)
    if isinstance(input_ids, Reconstruction):
        supervision = supervision or "reconstruction"
        about = input_ids.about
        supervision_start = input_ids.supervision_start
        prefix_len = input_ids.prefix_len
        input_ids = input_ids.input_ids
    check_batch_of_ids(input_ids)
    source = _checked_supervision(supervision or "suffix")
    num_tokens = input_ids.shape[1]
    prefix_len = _checked_prefix(num_tokens, prefix_len, source)
    _check_model(model, num_tokens, prefix_len, source)
    is_followed = source not in ("self", "reconstruction")
    expected_len = num_tokens if is_followed and room is None else prefix_len + (room or 0)
    rope = rope_factors(model.config, expected_len)
    past_len = 0
    past_layers: list[CompactLayer] = []
    if past is not None:
        past_len = _check_past(past, model, prefix_len, len(input_ids), rope)
        past_layers = [layer.padded() for layer in past.layers]
        past = replace(past, layers=past_layers)
    if supervision_start is None:
        supervision_start = prefix_len
    prefix_positions = _kept_positions(past_len, prefix_len, every=source == "self")
    query_positions = prefix_positions
    if source != "self":
        supervising = torch.arange(supervision_start, num_tokens)
        query_positions = torch.cat([prefix_positions, supervising])
    with frozen(model):
        captured = capture(
            model,
            input_ids[:, past_len:],
            query_positions=query_positions - past_len,
            hidden_start=prefix_len - 1 - past_len,
            past=None if past is None else past.to_transformers(model, any_length=True),
            chunk_tokens=chunk_tokens,
            rope=rope,
        )
    _check_finite(model, captured)
    states = _split(captured, num_tokens - prefix_len, len(prefix_positions))
    return Trace(
        model=model,
        input_ids=input_ids,
        prefix_len=prefix_len,
        supervision=source,
        supervision_start=supervision_start,
        keys=states.keys,
        values=states.values,
        queries=states.prefix_queries if source == "self" else states.later_queries,
        suffix_keys=states.suffix_keys,
        prefix_positions=prefix_positions,
        prefix_queries=states.prefix_queries,
        scales=captured.scales,
        stream=captured.stream,
        hidden=captured.hidden,
        fingerprint=fingerprint(model),
        past_len=past_len,
        log_bias=_log_bias(past_layers, prefix_len - past_len),
        about=about,
        rope=rope,
        room=room,
    )


class _States(NamedTuple):
    """The states of a forward, split at the end of the prefix; one tensor for each layer."""

    keys: list[Tensor]  # of the prefix, as are the values
    values: list[Tensor]
    suffix_keys: list[Tensor]
    prefix_queries: list[Tensor]
    later_queries: list[Tensor]


def _split(captured: Capture, num_later: int, num_prefix_queries: int) -> _States:
    """Copies of the states of prefix and suffix.

    The lists of ``captured`` become empty: each layer's tensors are freed once they are copied.

    Args:
        captured: keys, values and queries of all tokens.
        num_later: tokens after the prefix.
        num_prefix_queries: of the kept queries, those of the prefix, which come first.
    """
    states = _States([], [], [], [], [])
    while captured.keys:
        keys = captured.keys.pop(0)
        values = captured.values.pop(0)
        queries = captured.queries.pop(0)
        num_prefix = keys.shape[2] - num_later
        states.keys.append(keys[:, :, :num_prefix].clone())
        states.values.append(values[:, :, :num_prefix].clone())
        states.suffix_keys.append(keys[:, :, num_prefix:].clone())
        prefix_queries = queries[:, :, :num_prefix_queries]
        states.prefix_queries.append(prefix_queries.clone(memory_format=torch.contiguous_format))
        states.later_queries.append(queries[:, :, num_prefix_queries:].clone())
    return states


def _check_finite(model: PreTrainedModel, captured: Capture) -> None:
    for tensor in (captured.hidden, *captured.keys, *captured.values):
        if not bool(tensor.isfinite().all()):
            raise InputError(
                f"{type(model).__name__} computes numbers that are not finite: "
                "do its weights hold NaN?"
            )


def split_supervision(trace: Trace, fraction: float) -> tuple[Trace, Trace]:
    """Two traces of the same prefix: one to learn from, and one supervised by held-out positions.

    The first ends before the held-out positions.

    Args:
        trace: with predictions after its prefix.
        fraction: held out, in (0, 1): the last ceil(fraction * n) of the n supervising positions.

    Raises:
        InputError: fraction out of range, a trace with supervision "self", or no position left to
            learn from.
    """
    if not 0 < fraction < 1:
        raise InputError(f"held_out must be a fraction in (0, 1), not {fraction}")
    trace.check_supervises()
    num_supervising = trace.input_ids.shape[1] - trace.supervision_start
    # rounded first, so that 0.1 * 30 = 3.0000000000000004 gives 3
    num_held_out = math.ceil(float(f"{fraction * num_supervising:.12g}"))
    num_learned = num_supervising - num_held_out
    if num_learned <= 0:
        raise InputError(
            f"held_out={fraction} leaves none of the {num_supervising} supervising positions to "
            "learn from"
        )
    split = trace.supervision_start + num_learned
    num_suffix = split - trace.prefix_len
    learn = replace(
        trace,
        input_ids=trace.input_ids[:, :split],
        queries=[queries[:, :, :num_learned] for queries in trace.queries],
        suffix_keys=[keys[:, :, :num_suffix] for keys in trace.suffix_keys],
        hidden=trace.hidden[:, : num_suffix + 1],
    )
    held_out_queries = [queries[:, :, num_learned:] for queries in trace.queries]
    return learn, replace(trace, supervision_start=split, queries=held_out_queries)


def sampled_positions(prefix_len: int) -> Int[Tensor, " sampled"]:
    """Evenly spaced positions of a prefix, all of a short one."""
    count = min(prefix_len, SAMPLED_POSITIONS)
    return torch.arange(count) * prefix_len // count


def _kept_positions(known: int, prefix_len: int, *, every: bool) -> Int[Tensor, " sampled"]:
    """Positions of the prefix whose queries a trace keeps."""
    if every:
        return torch.arange(known, prefix_len)
    tail = torch.arange(max(known, prefix_len - _TAIL), prefix_len)
    return tail if known else torch.cat([sampled_positions(prefix_len), tail]).unique()


def _log_bias(past: list[CompactLayer], added: int) -> list[Float[Tensor, "batch _ _"]] | None:
    """The log-bias of all slots, 0 for those of the tokens behind the cache; None where no layer
    has one.
    """
    if all(layer.log_bias is None for layer in past):
        return None
    biases = []
    for layer in past:
        bias = layer.log_bias
        if bias is None:
            bias = layer.keys.new_zeros(layer.keys.shape[:3], dtype=torch.float32)
        biases.append(pad(bias, (0, added)))
    return biases


def _checked_supervision(supervision: str) -> Supervision:
    choices = get_args(Supervision)
    if supervision not in choices:
        raise InputError(f"supervision must be one of {', '.join(choices)}, not {supervision!r}")
    return cast("Supervision", supervision)


def _checked_prefix(num_tokens: int, prefix_len: int | None, supervision: str) -> int:
    if prefix_len is None and supervision != "self":
        raise InputError(
            "prefix_len is missing: without a suffix use supervision='self' or a reconstruction "
            "sequence"
        )
    prefix_len = num_tokens if prefix_len is None else prefix_len
    longest = num_tokens - (supervision != "self")
    if not 1 <= prefix_len <= longest:
        raise InputError(
            f"prefix_len must be in [1, {longest}] for {num_tokens} tokens, not {prefix_len}"
        )
    return prefix_len


def _check_past(
    past: CompactCache, model: PreTrainedModel, prefix_len: int, batch: int, rope: Factors | None
) -> int:
    past.check_model(model)
    if past.rotary_factors(model) != rope:
        raise InputError(
            f"past has the {past.metadata['rope']} rotary factors, and {prefix_len} tokens with "
            f"what follows need the {rope} ones: make it again with room for them (room=)"
        )
    if past.num_tokens >= prefix_len:
        raise InputError(
            f"past holds {past.num_tokens} tokens: the prefix of {prefix_len} adds none to them"
        )
    if past.batch_size != batch:
        raise InputError(f"past holds {past.batch_size} examples, input_ids {batch}")
    return past.num_tokens


def _check_model(
    model: PreTrainedModel, num_tokens: int, prefix_len: int, supervision: Supervision
) -> None:
    """Reject a sequence that is too long for the model's windows or positions."""
    name = type(model).__name__
    windows = [window for window in layer_windows(model.config) if window is not None]
    shortest = min(windows, default=math.inf)
    if shortest < num_tokens:
        raise InputError(
            f"{name}: a sliding window of {shortest} tokens is shorter than the sequence of "
            f"{num_tokens}"
        )
    positions = positions_of(model.config)
    if num_tokens <= positions:
        return
    advice = ""
    if supervision == "reconstruction" and prefix_len < positions:
        advice = (
            f"; supervision self does not repeat the text, whose {prefix_len} tokens alone "
            "would fit"
        )
    raise InputError(f"{num_tokens} tokens exceed the {positions} positions of {name}{advice}")
