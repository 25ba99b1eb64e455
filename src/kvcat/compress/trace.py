"""Traces: the keys, values and queries of one forward pass, to which compressors are fitted."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from kvcat.cache import (
    CacheRecord,
    CompactCache,
    CompactLayer,
    Factors,
    LayerState,
    document_digests,
    first_ids,
)
from kvcat.cache.ranges import Range, num_positions, slot_positions
from kvcat.compress.query_set import QuerySet
from kvcat.errors import InputError, check_in
from kvcat.models import attention_sinks, capture, frozen, logits_from_hidden, model_name
from kvcat.models.rotation import KeyRotation
from kvcat.options import Supervision
from kvcat.types import Float, Int, Tensor

SAMPLED_POSITIONS = 4096
LAST_POSITIONS = 32
"""Last positions of a prefix whose queries are always kept: those that eviction asks for."""
OWN_PART_TOKENS = 256
"""Most tokens of a part of the prefix whose own queries are moved after it."""
_LEAST_PARTS = 3


@dataclass(frozen=True)
class Reconstruction:
    """A sequence ``<text><instruction><text>`` whose second copy supervises the first.

    The second copy begins at ``supervision_start``.

    ``chat`` and ``chat_template`` are what caches record of the tokenisation (``CacheRecord``).
    """

    input_ids: Int[Tensor, "batch tokens"]
    prefix_len: int
    supervision_start: int
    chat: bool | None = None
    chat_template: str = ""


@dataclass(frozen=True)
class TracedText:
    """The tokens of a forward pass and their roles.

    Args:
        input_ids: all tokens; the prefix comes first.
        prefix_len: number of tokens to compress.
        supervision: queries to which compressors are fitted: with "self" those of the prefix,
            otherwise those of tokens after the prefix.
        supervision_start: first position whose query and teacher logits are used for supervision.
        chat, chat_template: how the document was tokenised, as in ``CacheRecord``.
        rope: the rotary factors of all keys and queries, "short" or "long"; None if they do not
            depend on the length of the text.
        room: number of tokens that were planned to follow the prefix; None: those of the suffix.
        protected: ranges of tokens whose slots every compressor keeps (``protecting``), ascending.
    """

    input_ids: Int[Tensor, "batch tokens"]
    prefix_len: int
    supervision: Supervision
    supervision_start: int
    chat: bool | None = None
    chat_template: str = ""
    rope: Factors | None = None
    room: int | None = None
    protected: tuple[Range, ...] = ()


@dataclass(frozen=True)
class LayerTrace:
    """One compressed layer in a forward pass.

    Args:
        number: of the layer in the model.
        slots: of the prefix, after rotation: one for each token, except that a compact cache, whose
            slots come first, has fewer. Heads with fewer slots are padded with slots of log-bias
            -inf. Without a compact cache the slots know their positions.
        queries: those to which compressors are fitted, after rotation: from ``supervision_start``
            on, or with "self" those of the prefix.
        suffix_keys: of the tokens after the prefix.
        prefix_queries: after rotation, at ``Trace.prefix_positions``; in 8 bits while a trace in
            parts is made.
        scale: the factor on q.k.
        stream: the squared norm of the residual stream at the layer's input, as the median over
            tokens, comparable with the output of the attention (``Capture``).
    """

    number: int
    slots: CompactLayer
    queries: Float[Tensor, "batch heads queries head_dim"]
    suffix_keys: Float[Tensor, "batch kv_heads suffix head_dim"]
    prefix_queries: Any  # Float[Tensor, "batch heads sampled head_dim"], or Rounded
    scale: float
    stream: Float[Tensor, " batch"]

    @property
    def query_heads(self) -> int:
        """The number of query heads that read one KV head."""
        return self.prefix_queries.shape[1] // self.slots.keys.shape[1]


@dataclass(frozen=True)
class Past:
    """What a forward pass continued from: a compact cache of its first tokens, or a document.

    Args:
        num_tokens: that the compact cache represents; 0: there is none.
        protected: ranges of its protected tokens, whose slots are its first ones.
        queries: kept of its tokens, with their attention to them as it was when each was exact, so
            that a compression does not change what the next one is fitted to; None: none were kept,
            and queries of the prefix are not fitted to.
        document: compact cache of a text before the first token, which is no part of the prefix.
            Every query sees its slots, and no compression changes them.
    """

    num_tokens: int
    protected: tuple[Range, ...] = ()
    queries: QuerySet | None = None
    document: CompactCache | None = None


@dataclass(frozen=True)
class Trace:
    """Keys, values and queries of one forward pass, split at the end of the prefix.

    The pass is dense, or continues from a compact cache. What a compressor compresses of it is its
    ``Prefix``.

    Args:
        model: the model that ran.
        fingerprint: identifies the model's weights.
        text: all tokens with their roles.
        layers: the layers that are compressed, in order.
        prefix_positions: positions of the prefix whose queries are kept: at most 4096 evenly spaced
            ones and the last 32, or all with "self". Positions in a compact cache have no queries.
        hidden: input of the output head, from the last position of the prefix on.
        past: the compact cache of the first tokens, or of a document before them; None: the pass is
            dense.
        states: of the layers that are not compressed, after the prefix, by number of the layer
            (``CompactCache``).
        sources: queries of the parts of a long prefix, repeated after it, and the prefix's own
            (``trace_in_parts``); (): all queries are those of ``layers``.
    """

    model: PreTrainedModel
    fingerprint: str
    text: TracedText
    layers: Sequence[LayerTrace]
    prefix_positions: Int[Tensor, " sampled"]
    hidden: Float[Tensor, "batch positions hidden"]
    past: Past | None = None
    states: Mapping[int, LayerState] = field(default_factory=dict)
    sources: Sequence[QuerySet] = ()

    @property
    def input_ids(self) -> Int[Tensor, "batch tokens"]:
        """All tokens; the prefix comes first."""
        return self.text.input_ids

    @property
    def prefix_len(self) -> int:
        """The number of tokens to compress."""
        return self.text.prefix_len

    @property
    def protected(self) -> tuple[Range, ...]:
        """Ranges of the tokens whose slots every compressor keeps."""
        return self.text.protected

    @property
    def num_protected(self) -> int:
        """The number of protected tokens, and of protected slots in every head."""
        return num_positions(self.protected)

    @property
    def suffix_ids(self) -> Int[Tensor, "batch suffix"]:
        """The tokens after the prefix."""
        return self.input_ids[:, self.prefix_len :]

    @property
    def batch_size(self) -> int:
        """The number of examples."""
        return self.input_ids.shape[0]

    @property
    def past_len(self) -> int:
        """The number of tokens that the compact cache represents; 0: there is no such cache."""
        return 0 if self.past is None else self.past.num_tokens

    @property
    def document(self) -> CompactCache | None:
        """The compact cache of a text before the first token; None: there is none."""
        return None if self.past is None else self.past.document

    @property
    def is_repeated(self) -> bool:
        """Whether the supervising queries are those of a repetition of the prefix."""
        is_of_sources = any(each.repeated is not None for each in self.sources)
        return is_of_sources or self.text.supervision == "reconstruction"

    def after_document(self, cache: CompactCache) -> CompactCache:
        """A cache of the prefix as the model reads it: after the document, if there is one."""
        return cache if self.document is None else self.document.followed_by(cache)

    @property
    def keys(self) -> list[Float[Tensor, "batch _ _ _"]]:
        """Per layer, the keys of the prefix's slots."""
        return [layer.slots.keys for layer in self.layers]

    @property
    def values(self) -> list[Float[Tensor, "batch _ _ _"]]:
        """Per layer, the values of the prefix's slots."""
        return [layer.slots.values for layer in self.layers]

    @property
    def queries(self) -> list[Float[Tensor, "batch _ queries _"]]:
        """Per layer, the queries to which compressors are fitted."""
        return [layer.queries for layer in self.layers]

    @property
    def scales(self) -> list[float]:
        """Per layer, the factor on q.k."""
        return [layer.scale for layer in self.layers]

    @property
    def layer_numbers(self) -> list[int]:
        """The number in the model of each layer that is compressed."""
        return [layer.number for layer in self.layers]

    @property
    def sinks(self) -> list[Float[Tensor, " heads"] | None]:
        """Per layer, the logits of the query heads' attention sinks in nats; None: it has none."""
        of_model = attention_sinks(self.model)
        return [of_model[number] for number in self.layer_numbers]

    @property
    def own_positions(self) -> Int[Tensor, " sampled"]:
        """Positions of the queries that represent those of all tokens after the compact cache."""
        return self.past_len + sampled_positions(self.prefix_len - self.past_len)

    @property
    def own_part_len(self) -> int:
        """Tokens of the parts of the prefix whose own queries are moved after it: a third at most.

        The closer to their tokens queries are moved, the less they differ from those that the
        model would have there.
        """
        return min(-(-self.prefix_len // _LEAST_PARTS), OWN_PART_TOKENS)

    @property
    def rotation(self) -> KeyRotation | None:
        """Moves queries of the prefix to positions after it; None if the model's cannot be moved.

        A small copy of the model has shown that its keys turn when they move by that far.
        """
        try:
            return KeyRotation(self.model, self.own_part_len)
        except InputError:
            return None

    @property
    def max_slots(self) -> int:
        """The slots of the prefix in its fullest head: the most that a compressor can keep."""
        return max(int(layer.slots.present_counts().max()) for layer in self.layers)

    @property
    def logits(self) -> Float[Tensor, "batch suffix vocab"]:
        """The dense logits at the suffix positions, computed again at every call."""
        with torch.no_grad():
            return logits_from_hidden(self.model, self.hidden[:, 1:])

    def dense_cache(self) -> CompactCache:
        """The uncompressed prefix, except for parts that were already compact.

        Protected slots come first. If those of the compact cache are not protected again, and it
        has a slot for every token, the slots return to the order of their tokens.
        """
        layers = []
        for layer in self.layers:
            slots = layer.slots
            protected = self.protected_slots(layer)
            if len(protected):
                slots = slots.at(torch.cat([protected, self.other_slots(layer)]))
            elif self.past is not None and slots.max_slots == self.prefix_len:
                order = slot_positions(self.past.protected, self.prefix_len).argsort()
                slots = slots.at(order)
            else:  # a slot for each token in their order needs no positions
                slots = replace(slots, positions=None)
            layers.append(slots.without_absent())
        record = self.record("dense")
        return CompactCache(layers, self.prefix_len, self.fingerprint, record, self.states)

    def record(self, method: str) -> CacheRecord:
        """What a cache of the prefix records, with the name of its method."""
        text = self.text
        prefix = self.input_ids[:, : self.prefix_len]
        return CacheRecord(
            method=method,
            model=model_name(self.model),
            architecture=type(self.model).__name__,
            supervision=text.supervision,
            chat=text.chat,
            chat_template=text.chat_template,
            document=document_digests(prefix),
            first_ids=first_ids(prefix),
            rope=text.rope,
            room=None if text.rope is None else text.room,
            protected=self.protected,
        )

    def protected_slots(self, layer: LayerTrace) -> Int[Tensor, " protected"]:
        """The protected slots of a layer, the same in every head, in the order of positions."""
        num_slots = layer.slots.max_slots
        shift = num_slots - self.prefix_len  # slots of tokens after the compact cache are the last
        slots = torch.zeros(num_slots, dtype=torch.bool)
        if self.protected and self.past is not None:
            slots[: sum(stop - start for start, stop in self.past.protected)] = True
        for start, stop in self.protected:
            if stop > self.past_len:
                slots[max(start, self.past_len) + shift : stop + shift] = True
        return slots.nonzero().squeeze(1).to(layer.slots.keys.device)

    def other_slots(self, layer: LayerTrace) -> Int[Tensor, " others"]:
        """The slots of a layer that are not protected, padding included."""
        slots = torch.arange(layer.slots.max_slots, device=layer.slots.keys.device)
        return slots[~torch.isin(slots, self.protected_slots(layer))]

    def prefix_queries_from(self, start: int) -> list[Float[Tensor, "batch _ queries _"]]:
        """The queries of all prefix positions from ``start`` on, per layer.

        A second forward pass computes them if some were not kept.

        Raises:
            InputError: a compact cache represents part of the prefix, whose queries are lost.
        """
        if self.past is not None:
            raise InputError(
                "eviction by attention needs all queries of the prefix, part of which is already "
                "compact"
            )
        num_kept = int((self.prefix_positions >= start).sum())
        if num_kept == self.prefix_len - start:
            kept = [layer.prefix_queries for layer in self.layers]
            return [queries[:, :, queries.shape[2] - num_kept :] for queries in kept]
        with frozen(self.model):
            captured = capture(
                self.model,
                self.input_ids[:, : self.prefix_len],
                query_positions=torch.arange(start, self.prefix_len),
                hidden_start=self.prefix_len - 1,
                rope=self.text.rope,
                layers=self.layer_numbers,
            )
        return list(captured.queries)

    def check_supervises(self) -> None:
        """Raise an ``InputError`` for a trace without predictions after its prefix."""
        if self.text.supervision == "self":
            raise InputError(
                "a trace with supervision='self' has no predictions after its prefix: trace a "
                "suffix or a reconstruction sequence, or use AttentionMatching"
            )
        if self.sources:
            raise InputError(
                f"the {self.prefix_len} tokens were repeated in parts, without predictions of one "
                "repetition: trace them with in_parts=False, or use AttentionMatching"
            )


def split_supervision(trace: Trace, fraction: float) -> tuple[Trace, Trace]:
    """Two traces of the same prefix: one for fitting, and one supervised by held-out positions.

    The first ends before the held-out positions.

    Args:
        trace: trace with predictions after its prefix.
        fraction: fraction to hold out, in (0, 1): the last ceil(fraction * n) of the n supervising
            positions.

    Raises:
        InputError: the fraction is out of range, the trace has supervision "self", or no position
            is left for fitting.
    """
    check_in("(0, 1)", held_out=fraction)
    trace.check_supervises()
    text = trace.text
    num_supervising = text.input_ids.shape[1] - text.supervision_start
    # rounded first, so that 0.1 * 30 = 3.0000000000000004 gives 3
    num_held_out = math.ceil(float(f"{fraction * num_supervising:.12g}"))
    num_learned = num_supervising - num_held_out
    if num_learned <= 0:
        raise InputError(
            f"held_out={fraction} leaves none of the {num_supervising} supervising positions to "
            "learn from"
        )
    split = text.supervision_start + num_learned
    num_suffix = split - text.prefix_len
    learn_layers = [
        replace(
            layer,
            queries=layer.queries[:, :, :num_learned],
            suffix_keys=layer.suffix_keys[:, :, :num_suffix],
        )
        for layer in trace.layers
    ]
    learn = replace(
        trace,
        text=replace(text, input_ids=text.input_ids[:, :split]),
        layers=learn_layers,
        hidden=trace.hidden[:, : num_suffix + 1],
    )
    held_out_layers = [
        replace(layer, queries=layer.queries[:, :, num_learned:]) for layer in trace.layers
    ]
    held_out = replace(trace, text=replace(text, supervision_start=split), layers=held_out_layers)
    return learn, held_out


def sampled_positions(prefix_len: int) -> Int[Tensor, " sampled"]:
    """Evenly spaced positions of a prefix; all positions of a short one."""
    count = min(prefix_len, SAMPLED_POSITIONS)
    return torch.arange(count) * prefix_len // count
