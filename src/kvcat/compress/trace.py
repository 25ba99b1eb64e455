"""Traces: the keys, values and queries of one forward pass, to which compressors are fitted."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from transformers import PreTrainedModel

from kvcat.cache import (
    FIRST_IDS,
    CompactCache,
    CompactLayer,
    Factors,
    Head,
    LayerState,
    document_digest,
    first_ids,
    slot_facts,
)
from kvcat.choices import Supervision
from kvcat.compress.ranges import Range, num_positions, range_text, slot_positions
from kvcat.compress.rows import Rows
from kvcat.errors import InputError, finite
from kvcat.models import attention_sinks, capture, frozen, logits_from_hidden
from kvcat.types import Float, Int, Tensor

SAMPLED_POSITIONS = 4096


@dataclass(frozen=True)
class Reconstruction:
    """A sequence ``<text><instruction><text>`` whose second copy supervises the first.

    The second copy begins at ``supervision_start``.

    ``about`` is metadata for caches on how the text was tokenised: "chat" is yes or no, and
    "chat_template" is a hash of the chat template's source, if one was used.
    """

    input_ids: Int[Tensor, "batch tokens"]
    prefix_len: int
    supervision_start: int
    about: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PastQueries:
    """Queries of tokens that a compact cache represents, kept since these tokens ran.

    They are kept with their attention to the text behind the cache, as it was when each token of
    that text was exact: a compression does not change what the next one is fitted to. Protected
    tokens are not part of this attention.

    Args:
        positions: of the tokens, ascending.
        starts: position at which the part of each query begins (``queries.MovedQueries``).
        states: per layer, the queries after rotation at their positions, (batch, heads, kept,
            head_dim).
        log_later_mass: per layer, the log of each query's attention mass on the keys of its part.
        place: position to which the parts are moved for ``log_mass`` and ``outputs``; no token of
            the cache is behind it.
        log_mass: per layer, the log of each query's attention mass on the tokens of the cache.
        outputs: per layer, each query's attention over these tokens, (batch, heads, kept,
            value_dim).
    """

    positions: Int[Tensor, " kept"]
    starts: Int[Tensor, " kept"]
    states: Sequence[Rows]
    log_later_mass: Sequence[Float[Tensor, "batch _ kept"]]
    place: int
    log_mass: Sequence[Float[Tensor, "batch _ kept"]]
    outputs: Sequence[Rows]

    @property
    def nbytes(self) -> int:
        """Bytes of the queries, their masses and their outputs."""
        of_rows = sum(rows.nbytes for rows in [*self.states, *self.outputs])
        return of_rows + sum(mass.nbytes for mass in [*self.log_later_mass, *self.log_mass])


@dataclass(frozen=True)
class Trace:
    """Keys, values and queries of one forward pass, split at the end of the prefix.

    The forward pass is dense, or continues from a compact cache. In the second case, the slots of
    the prefix are those of the cache and of the tokens after it. Heads with fewer slots are padded
    with slots of log-bias -inf, which ``head`` leaves out.

    Args:
        model: the model that ran.
        input_ids: all tokens; the prefix comes first.
        prefix_len: number of tokens to compress.
        supervision: queries to which compressors are fitted: with "self" those of the prefix,
            otherwise those of tokens after the prefix.
        supervision_start: first position whose query and teacher logits are used for supervision.
        keys, values: per layer, those of the prefix's slots after rotation; one slot per token,
            except that a compact cache has fewer.
        queries: per layer, queries after rotation: those from ``supervision_start`` on, or with
            "self" those of the prefix.
        suffix_keys: per layer, keys of the tokens after the prefix.
        prefix_positions: positions of the prefix whose queries are kept: at most 4096 evenly spaced
            ones and the last 32, or all with "self". Positions in a compact cache have no queries.
        prefix_queries: per layer, queries after rotation at these positions.
        scales: per layer, the factor on q.k.
        stream: per layer, the squared norm of the residual stream at its input, as the median over
            tokens, comparable with the output of the attention (``Capture``).
        hidden: input of the output head, from the last position of the prefix on.
        fingerprint: identifies the model's weights.
        past_len: number of tokens that the compact cache represents; 0: there is no such cache.
        log_bias: per layer, nats added to the scores of the prefix's slots, -inf for padding; None:
            there is no log-bias.
        about: how the document was tokenised (``Reconstruction``), for the metadata of caches.
        rope: the rotary factors of all keys and queries, "short" or "long"; None if they do not
            depend on the length of the text.
        room: number of tokens that were planned to follow the prefix; None: those of the suffix.
        past_queries: queries of the tokens in the compact cache, to which the fit returns; None:
            none were kept, and those of the prefix after the cache are not fitted to either.
        protected: ranges of tokens whose slots every compressor keeps (``protection``), ascending.
        past_protected: those of them in the compact cache, which are its first slots.
        states: of the layers that are not compressed, after the prefix, by number of the layer
            (``CompactCache``). "Per layer" means the other layers, in their order.
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
    past_queries: PastQueries | None = None
    protected: tuple[Range, ...] = ()
    past_protected: tuple[Range, ...] = ()
    states: Mapping[int, LayerState] = field(default_factory=dict)

    @property
    def layer_numbers(self) -> list[int]:
        """The number in the model of each layer that is compressed."""
        total = len(self.keys) + len(self.states)
        return [number for number in range(total) if number not in self.states]

    @cached_property
    def sinks(self) -> list[Float[Tensor, " heads"] | None]:
        """Per layer, the logits of the query heads' attention sinks in nats; None: it has none."""
        of_model = attention_sinks(self.model)
        return [of_model[number] for number in self.layer_numbers]

    @property
    def max_slots(self) -> int:
        """The slots of the prefix in its fullest head: the most that a compressor can keep."""
        return max(int(self.counts(layer).max()) for layer in range(len(self.keys)))

    @property
    def batch_size(self) -> int:
        """The number of examples."""
        return self.input_ids.shape[0]

    @property
    def suffix_ids(self) -> Int[Tensor, "batch suffix"]:
        """The tokens after the prefix."""
        return self.input_ids[:, self.prefix_len :]

    @property
    def logits(self) -> Float[Tensor, "batch suffix vocab"]:
        """The dense logits at the suffix positions, computed again at every call."""
        with torch.no_grad():
            return logits_from_hidden(self.model, self.hidden[:, 1:])

    def dense_cache(self) -> CompactCache:
        """The uncompressed prefix, except for parts that were already compact."""
        biases = self.log_bias or [None] * len(self.keys)
        layers = []
        for index, layer in enumerate(zip(self.keys, self.values, biases, strict=True)):
            keys, values, bias = layer
            positions = None
            order = self._dense_order(index)
            if order is not None:
                keys = keys.index_select(2, order)
                values = values.index_select(2, order)
                bias = None if bias is None else bias.index_select(2, order)
                if not self.past_len:  # a slot for each token, but not in their order
                    positions = order.expand(*keys.shape[:2], -1)
            layers.append(CompactLayer(keys, values, bias, positions).without_absent())
        cache = CompactCache(layers, self.prefix_len, self.fingerprint, states=self.states)
        facts = {"method": "dense", **slot_facts(cache), **self.facts()}
        return replace(cache, metadata=facts)

    def _dense_order(self, layer: int) -> Int[Tensor, " slots"] | None:
        """The slots of a layer in the order of the dense cache; None: as they are.

        Protected slots come first. If those of the compact cache are not protected again, and it
        has a slot for every token, the slots return to the order of their tokens.
        """
        if self.protected:
            return torch.cat([self.protected_slots(layer), self.other_slots(layer)])
        if self.past_protected and self.keys[layer].shape[2] == self.prefix_len:
            order = slot_positions(self.past_protected, self.prefix_len).argsort()
            return order.to(self.keys[layer].device)
        return None

    def facts(self) -> dict[str, str]:
        """Metadata for caches about the prefix, such as a hash of its tokens."""
        document = document_digest(self.input_ids[:, : self.prefix_len])
        facts = {"supervision": self.supervision, **self.about, "document": document}
        facts[FIRST_IDS] = first_ids(self.input_ids[:, : self.prefix_len])
        if self.rope is not None:
            facts["rope"] = self.rope
            if self.room is not None:
                facts["room"] = str(self.room)
        if self.protected:
            facts["protected"] = range_text(self.protected)
        return facts

    @property
    def num_protected(self) -> int:
        """The number of protected tokens, each of which is a slot of every head."""
        return num_positions(self.protected)

    @property
    def num_new(self) -> int:
        """The number of tokens after the compact cache that are not protected.

        Their slots are the last ones of every head.
        """
        protected = [(max(start, self.past_len), stop) for start, stop in self.protected]
        num_protected = num_positions([each for each in protected if each[0] < each[1]])
        return self.prefix_len - self.past_len - num_protected

    def protected_slots(self, layer: int) -> Int[Tensor, " protected"]:
        """The protected slots of a layer, the same in every head, in the order of positions."""
        keys = self.keys[layer]
        past = (
            torch.arange(num_positions(self.past_protected)) if self.protected else torch.empty(0)
        )
        # slots of tokens after the compact cache are the last ones
        shift = keys.shape[2] - self.prefix_len
        new = [
            torch.arange(max(start, self.past_len), stop) + shift
            for start, stop in self.protected
            if stop > self.past_len
        ]
        return torch.cat([past, *new]).long().to(keys.device)

    def other_slots(self, layer: int) -> Int[Tensor, " others"]:
        """The slots of a layer that are not protected, padding included."""
        keys = self.keys[layer]
        is_other = torch.ones(keys.shape[2], dtype=torch.bool, device=keys.device)
        is_other[self.protected_slots(layer)] = False
        return is_other.nonzero().squeeze(1)

    @cached_property
    def unprotected(self) -> "Trace":
        """The trace without its protected slots; itself if there are none.

        Raises:
            InputError: a head has no other slots.
        """
        if not self.protected:
            return self
        others = [self.other_slots(layer) for layer in range(len(self.keys))]

        def without(states: Sequence[Tensor]) -> list[Tensor]:
            return [x.index_select(2, slots) for x, slots in zip(states, others, strict=True)]

        bias = None if self.log_bias is None else without(self.log_bias)
        keys = without(self.keys)
        unprotected = replace(
            self, keys=keys, values=without(self.values), log_bias=bias, protected=()
        )
        fewest = min(int(unprotected.counts(layer).min()) for layer in range(len(keys)))
        if fewest < 1:
            raise InputError("every slot of a head is protected: nothing is left to compress")
        return unprotected

    def counts(self, layer: int) -> Int[Tensor, "batch kv_heads"]:
        """The number of prefix slots in every head of a layer; on the CPU."""
        return (self.ranks(layer) >= 0).sum(-1).cpu()

    def ranks(self, layer: int) -> Int[Tensor, "batch kv_heads slots"]:
        """The index of each slot within its head; -1 for padding."""
        keys = self.keys[layer]
        if self.log_bias is None:
            return torch.arange(keys.shape[2], device=keys.device).expand(keys.shape[:3])
        exists = self.log_bias[layer] > -torch.inf
        return (exists.cumsum(-1) - 1).masked_fill(~exists, -1)

    def head(self, layer: int, example: int, head: int) -> Head:
        """The keys, values and log-bias of a head's prefix slots, without padding."""
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
        """The queries of all prefix positions from ``start`` on, per layer.

        A second forward pass computes them if some were not kept.

        Raises:
            InputError: a compact cache represents part of the prefix, whose queries are lost.
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
                layers=self.layer_numbers,
            )
        return captured.queries

    def check_supervises(self) -> None:
        """Raise an ``InputError`` for a trace without predictions after its prefix."""
        if self.supervision == "self":
            raise InputError(
                "a trace with supervision='self' has no predictions after its prefix: trace a "
                "suffix or a reconstruction sequence, or use AttentionMatching"
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
    if not 0 < finite("held_out", fraction) < 1:
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
    """Evenly spaced positions of a prefix; all positions of a short one."""
    count = min(prefix_len, SAMPLED_POSITIONS)
    return torch.arange(count) * prefix_len // count
