"""The function that runs a model over prefix and suffix, and returns a ``Trace``."""

from collections.abc import Sequence
from dataclasses import replace
from types import NoneType
from typing import Any, cast, get_args

import torch
from torch.nn.functional import pad
from transformers import PreTrainedConfig, PreTrainedModel

from kvcat.cache import (
    CompactCache,
    CompactLayer,
    check_batch_of_ids,
    fingerprint,
    layer_windows,
    recurrent_layers,
    rope_factors,
    state_layers,
)
from kvcat.compress.trace import (
    LAST_POSITIONS,
    LayerTrace,
    Past,
    Reconstruction,
    Trace,
    TracedText,
    sampled_positions,
)
from kvcat.errors import InputError, check_in, check_kind, check_least, check_one_of, whole
from kvcat.memory import CHUNK_TOKENS, return_freed_memory
from kvcat.models import Capture, capture, check_supported, frozen, layer_states, positions_of
from kvcat.models.rounded import Rounded
from kvcat.options import Supervision
from kvcat.types import Float, Int, Tensor


def trace(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "batch tokens"] | Reconstruction,
    prefix_len: int | None = None,
    *,
    supervision: str | None = None,
    past: CompactCache | None = None,
    room: int | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Trace:
    """The trace of a forward pass over prefix and suffix, for compression and comparison.

    Args:
        model: a decoder-only transformers model, not sharded; the first one of its configuration
            is tested (``kvcat.models.self_test``).
        input_ids: windows of equal length, or a reconstruction sequence, which determines the
            prefix length.
        prefix_len: number of tokens to compress, in [1, tokens); with "self" it may be all tokens,
            which is then the default.
        supervision: one of ``Supervision``. With "self", compressors use only the queries of the
            prefix. With the others they use the queries after the prefix, and the word names that
            text. None: "reconstruction" for such a sequence, otherwise "suffix".
        past: compact cache of the prefix's first tokens, which are not run again; its slots are
            compressed together with those of the other tokens.
        room: number of tokens in questions and answers that will follow the prefix, at least 0. It
            matters only for models whose rotary factors depend on the length of the text
            (LongRoPE), and for sliding windows: prefix and room decide which factors the trace and
            its caches have, and which windows are kept whole. None: 0 for a reconstruction sequence
            or with "self", otherwise the number of suffix tokens.
        chunk_tokens: largest number of tokens per example that run at once (``capture``).

    Raises:
        InputError: the lengths are not valid; the model is not supported or in a wrapper, has
            weights without data, too few positions, or no layer that can be compressed (all have
            sliding windows shorter than the sequence, or recurrent states); ``past`` is a cache of
            another prefix or model; or the room is negative.
    """
    check_supported(model)
    check_kind((CompactCache, NoneType), "a CompactCache or None", past=past)
    check_least(1, chunk_tokens=chunk_tokens)
    check_least(0, room=0 if room is None else room)
    text = _traced_text(input_ids, prefix_len, supervision)
    num_tokens = text.input_ids.shape[1]
    check_positions(model.config, num_tokens, text.prefix_len, text.supervision)
    is_followed = text.supervision not in ("self", "reconstruction")
    expected_len = num_tokens if is_followed and room is None else text.prefix_len + (room or 0)
    text = replace(text, rope=rope_factors(model.config, expected_len), room=room)
    layers = split_layers(model, max(num_tokens, expected_len), past)
    past_len = 0 if past is None else _check_past(past, model, text)
    kept = kept_positions(past_len, text.prefix_len, every=text.supervision == "self")
    return read(model, text, layers, kept, past=past, chunk_tokens=chunk_tokens)


def read(
    model: PreTrainedModel,
    text: TracedText,
    layers: tuple[list[int], list[int]],
    prefix_positions: Int[Tensor, " kept"],
    *,
    past: CompactCache | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    rounded: bool = False,
) -> Trace:
    """The trace of a forward pass; arguments were checked.

    Args:
        model: as in ``trace``.
        text: all tokens with their roles.
        layers: of ``split_layers``.
        prefix_positions: of the prefix, whose queries are kept.
        past, chunk_tokens: as in ``trace``.
        rounded: whether queries are kept in 8 bits; without a suffix alone.
    """
    whole, compressed = layers
    prefix_len = text.prefix_len
    num_tokens = text.input_ids.shape[1]
    past_len = 0
    continued: Past | None = None
    past_bias: list[Float[Tensor, "batch _ _"] | None] = [None] * len(compressed)
    if past is not None:
        past_len = past.num_tokens
        continued = Past(past_len, past.record.protected)
        padded = [layer.padded() for layer in past.layers]
        past_bias = [layer.log_bias for layer in padded]
        past = replace(past, layers=padded)
        if text.chat is None:  # the text begins as the document of the past does
            record = past.record
            text = replace(text, chat=record.chat, chat_template=record.chat_template)
    reads_itself = text.supervision == "self"
    query_positions = prefix_positions
    if not reads_itself:
        supervising = torch.arange(text.supervision_start, num_tokens)
        query_positions = torch.cat([prefix_positions, supervising])
    with frozen(model):
        # in a forward of its own: ``capture`` continues through the suffix, which changes them
        states_after = layer_states(
            model,
            text.input_ids[:, past_len:prefix_len],
            whole,
            past=None if past is None else past.to_transformers(model, any_length=True),
            chunk_tokens=chunk_tokens,
            rope=text.rope,
        )
        captured = capture(
            model,
            text.input_ids[:, past_len:],
            query_positions=query_positions - past_len,
            hidden_start=prefix_len - 1 - past_len,  # which predicts the first token after it
            past=None if past is None else past.to_transformers(model, any_length=True),
            chunk_tokens=chunk_tokens,
            rope=text.rope,
            layers=compressed,
            rounded=rounded,
        )
    _check_finite(model, captured)
    traced_layers = _layer_traces(
        captured,
        compressed,
        past_bias,
        num_later=num_tokens - prefix_len,
        num_prefix_queries=len(prefix_positions),
        reads_itself=reads_itself,
        continues=past is not None,
    )
    return_freed_memory()
    return Trace(
        model=model,
        fingerprint=fingerprint(model),
        text=text,
        layers=traced_layers,
        prefix_positions=prefix_positions,
        hidden=captured.hidden,
        past=continued,
        states=states_after,
    )


def _traced_text(
    input_ids: Int[Tensor, "batch tokens"] | Reconstruction,
    prefix_len: int | None,
    supervision: str | None,
) -> TracedText:
    """The arguments of ``trace``, checked and completed."""
    if isinstance(input_ids, Reconstruction):
        tokens = input_ids.input_ids
        prefix_len = input_ids.prefix_len
        source = _checked_supervision(supervision or "reconstruction")
    else:
        tokens = input_ids
        source = _checked_supervision(supervision or "suffix")
    check_batch_of_ids(tokens)
    prefix_len = _checked_prefix(tokens.shape[1], prefix_len, source)
    if not isinstance(input_ids, Reconstruction):
        return TracedText(tokens, prefix_len, source, prefix_len)
    return TracedText(
        tokens,
        prefix_len,
        source,
        input_ids.supervision_start,
        input_ids.chat,
        input_ids.chat_template,
    )


def _layer_traces(
    captured: Capture,
    numbers: Sequence[int],
    past_bias: Sequence[Float[Tensor, "batch _ _"] | None],
    *,
    num_later: int,
    num_prefix_queries: int,
    reads_itself: bool,
    continues: bool,
) -> list[LayerTrace]:
    """The layers of a forward pass, split at the end of the prefix.

    The lists of ``captured`` become empty: each layer's tensors are freed once they are copied.
    Without a suffix nothing is copied.

    Args:
        captured: keys, values and queries of all tokens; those of the prefix come first.
        numbers: of the layers in the model.
        past_bias: per layer, log-bias of the slots of a compact cache, which come first; None: they
            have none, or there is no cache.
        num_later: number of tokens after the prefix.
        num_prefix_queries: number of kept queries from the prefix.
        reads_itself: the queries of the prefix are those that compressors are fitted to.
        continues: from a compact cache, so that positions of slots are not known.
    """
    layers = []
    for index, number in enumerate(numbers):
        keys = captured.keys.pop(0)
        values = captured.values.pop(0)
        queries: Any = captured.queries.pop(0)
        num_slots = keys.shape[2] - num_later
        bias = past_bias[index]
        if bias is not None:  # 0 after the cache
            bias = pad(bias, (0, num_slots - bias.shape[2]))
        if isinstance(queries, Rounded):  # of a prefix without a suffix
            prefix_queries: Any = queries
            supervising = queries[:, :, :0].numbers()
        else:
            prefix_queries = _first(queries, num_prefix_queries).contiguous()
            supervising = queries[:, :, num_prefix_queries:].clone()
        slots = CompactLayer(_first(keys, num_slots), _first(values, num_slots), bias)
        if not continues:
            positions = torch.arange(num_slots, device=keys.device).expand(*keys.shape[:2], -1)
            slots = replace(slots, positions=positions)
        layer = LayerTrace(
            number=number,
            slots=slots,
            queries=prefix_queries if reads_itself else supervising,
            suffix_keys=keys[:, :, num_slots:].clone(),
            prefix_queries=prefix_queries,
            scale=captured.scales[index],
            stream=captured.stream[index],
        )
        layers.append(layer)
    return layers


def _first(
    states: Float[Tensor, "batch heads tokens channels"], num_tokens: int
) -> Float[Tensor, "batch heads first channels"]:
    """The states of the first tokens, without the memory of the others."""
    if num_tokens == states.shape[2]:
        return states
    return states[:, :, :num_tokens].clone(memory_format=torch.contiguous_format)


def _check_finite(model: PreTrainedModel, captured: Capture) -> None:
    for tensor in (captured.hidden, *captured.keys, *captured.values):
        if not bool(tensor.isfinite().all()):
            raise InputError(
                f"{type(model).__name__} computes numbers that are not finite: "
                "do its weights hold NaN?"
            )


def kept_positions(known: int, prefix_len: int, *, every: bool) -> Int[Tensor, " sampled"]:
    """The positions of the prefix whose queries a trace keeps."""
    if every:
        return torch.arange(known, prefix_len)
    tail = torch.arange(max(known, prefix_len - LAST_POSITIONS), prefix_len)
    # after a compact cache the prefix's own queries are not fitted to, except kept ones (``Past``)
    return tail if known else torch.cat([sampled_positions(prefix_len), tail]).unique()


def _checked_supervision(supervision: str) -> Supervision:
    check_one_of("supervision", supervision, get_args(Supervision))
    return cast("Supervision", supervision)


def _checked_prefix(num_tokens: int, prefix_len: int | None, supervision: str) -> int:
    if prefix_len is None and supervision != "self":
        raise InputError(
            "prefix_len is missing: without a suffix use supervision='self' or a reconstruction "
            "sequence"
        )
    prefix_len = num_tokens if prefix_len is None else whole("prefix_len", prefix_len)
    longest = num_tokens - (supervision != "self")
    check_in(f"[1, {longest}]", prefix_len=prefix_len)
    return prefix_len


def _check_past(past: CompactCache, model: PreTrainedModel, text: TracedText) -> int:
    """The tokens in a compact cache, which must be the first ones of the text."""
    if past.record.protected_later:
        raise InputError(
            "past has protected slots behind others, of a later document or of a session's "
            "last tokens, which compression would not keep"
        )
    prefix_len = text.prefix_len
    past.check_model(model)
    if past.rotary_factors(model) != text.rope:
        raise InputError(
            f"past has the {past.record.rope} rotary factors, and {prefix_len} tokens with "
            f"the text after them need the {text.rope} ones: trace it again with room= for that "
            "text"
        )
    if past.num_tokens >= prefix_len:
        raise InputError(
            f"past holds {past.num_tokens} tokens: the prefix of {prefix_len} adds none to them"
        )
    num_rows = len(text.input_ids)
    if past.batch_size != num_rows:
        raise InputError(f"past holds {past.batch_size} examples, input_ids {num_rows}")
    past.check_document(text.input_ids[:, : past.num_tokens], "past")
    return past.num_tokens


def split_layers(
    model: PreTrainedModel, num_tokens: int, past: CompactCache | None
) -> tuple[list[int], list[int]]:
    """The layers whose state is kept whole, and those that are compressed.

    Args:
        model: a causal LM.
        num_tokens: tokens of the text.
        past: cache of the first tokens, which has made this choice; None: there is none.

    Raises:
        InputError: no layer can be compressed; or a window that ``past`` compressed is shorter than
            the text.
    """
    name = type(model).__name__
    whole = state_layers(model.config, num_tokens)
    if past is not None and sorted(past.states) != whole:
        raise InputError(
            f"{name}: a sliding window is shorter than {num_tokens} tokens, and past compressed "
            "its layer: trace it again with room= for the text after it"
        )
    num_layers = len(layer_windows(model.config))
    compressed = [layer for layer in range(num_layers) if layer not in whole]
    if not compressed:
        windows = {window for window in layer_windows(model.config) if window is not None}
        reasons = [f"a sliding window of {window} tokens" for window in sorted(windows)]
        if recurrent_layers(model.config):
            reasons.append("a recurrent state")
        raise InputError(
            f"{name}: every layer has {' or '.join(reasons)}, and the sequence has {num_tokens} "
            "tokens: there is no cache that grows with it, and nothing to compress"
        )
    return whole, compressed


def check_positions(
    config: PreTrainedConfig, num_tokens: int, prefix_len: int, supervision: str
) -> None:
    """Raise an ``InputError`` if a sequence exceeds the model's positions.

    Args:
        config: of the model.
        num_tokens: of the whole sequence.
        prefix_len: tokens to compress.
        supervision: as in ``trace``.
    """
    positions = positions_of(config)
    if num_tokens <= positions:
        return
    text = f"the text has {prefix_len} tokens"
    if supervision == "reconstruction" and prefix_len <= positions:
        raise InputError(
            f"{text}, and the model {positions} positions, too few for it and the copy of it that "
            "supervision reconstruction appends: supervision self appends none"
        )
    if supervision not in ("reconstruction", "self"):
        text = f"prefix and suffix have {num_tokens} tokens"
    raise InputError(
        f"{text}, and the model {positions} positions: shorten the text, or split it into several"
    )
