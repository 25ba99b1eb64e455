"""What a session holds: a document, a compact cache, exact tokens, and queries to fit to."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from kvcat.cache import (
    CacheRecord,
    CompactCache,
    CompactLayer,
    PrefixLayer,
    document_digests,
    first_ids,
)
from kvcat.cache.ranges import Range
from kvcat.compress.prefix import clipped
from kvcat.compress.query_set import QuerySet
from kvcat.compress.trace import LayerTrace, Past, Trace, TracedText
from kvcat.models import capture, frozen
from kvcat.options import NUM_FIRST
from kvcat.types import Float, Int, Tensor


@dataclass(frozen=True, eq=False)
class SessionState:
    """The tokens of one conversation, as a model reads them. Nothing ever changes it.

    The tokens after the compact cache are exact: their keys, values, queries and hidden states are
    those of the forward in which they were appended. All of them may come after a document, whose
    tokens are not among them.

    Args:
        ids: all tokens.
        document: compact cache of a text before them, unquantised; None: there is none.
        compact: cache of the first tokens, without the document; None before the first compaction.
        keys, values: per layer, of the exact tokens after rotation.
        queries: per layer, likewise.
        hidden: input of the output head, of the exact tokens.
        stream: per layer, as in ``Trace``, the mean over forwards by number of tokens.
        scales: per layer, the factor on q.k.
        past_queries: queries of tokens in the compact cache; None: none were kept.
    """

    ids: Int[Tensor, " tokens"]
    document: CompactCache | None
    compact: CompactCache | None
    keys: Sequence[Float[Tensor, "batch _ exact _"]]
    values: Sequence[Float[Tensor, "batch _ exact _"]]
    queries: Sequence[Float[Tensor, "batch _ exact _"]]
    hidden: Float[Tensor, "batch exact hidden"] | None
    stream: Sequence[Float[Tensor, " batch"]]
    scales: Sequence[float]
    past_queries: QuerySet | None = None

    @classmethod
    def empty(cls, model: PreTrainedModel, document: CompactCache | None = None) -> "SessionState":
        """The state without tokens."""
        no_tokens = torch.zeros(0, dtype=torch.long, device=model.device)
        return cls(no_tokens, document, None, [], [], [], None, [], [])

    @property
    def num_tokens(self) -> int:
        """The number of all tokens."""
        return len(self.ids)

    @property
    def past_len(self) -> int:
        """The number of tokens that the compact cache represents."""
        return 0 if self.compact is None else self.compact.num_tokens

    @property
    def num_exact(self) -> int:
        """The number of tokens after the compact cache."""
        return self.num_tokens - self.past_len

    @property
    def held_slots(self) -> float:
        """Slots per layer and head, on average: those of the compact cache and the exact tokens."""
        return self.num_exact + (0.0 if self.compact is None else self.compact.mean_slots)

    @property
    def nbytes(self) -> int:
        """Bytes of all but the token ids: document, slots, exact tokens, kept queries."""
        tensors = [*self.keys, *self.values, *self.queries]
        if self.hidden is not None:
            tensors.append(self.hidden)
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        for cache in (self.document, self.compact):
            num_bytes += 0 if cache is None else cache.nbytes
        if self.past_queries is not None:
            num_bytes += self.past_queries.nbytes
        return num_bytes

    @property
    def prefix(self) -> CompactCache | None:
        """The document and the compact cache after it, as the model reads them; None without."""
        if self.document is None or self.compact is None:
            return self.document or self.compact
        return self.document.followed_by(self.compact)

    def past(self, model: PreTrainedModel) -> Cache:
        """A fresh transformers cache that holds the document and all tokens."""
        prefix = self.prefix
        if prefix is None:
            dynamic = DynamicCache()
            for index, states in enumerate(zip(self.keys, self.values, strict=True)):
                dynamic.update(*states, index)
            return dynamic
        past = prefix.to_transformers(model)
        # none of the exact ones if there are no tokens
        for layer, keys, values in zip(past.layers, self.keys, self.values, strict=False):
            if isinstance(layer, PrefixLayer):
                layer.hold(keys, values)
        return past

    def past_before_last(self, model: PreTrainedModel) -> Cache:
        """As ``past``, without the last token."""
        past: Any = self.past(model)
        past.crop(-1)
        return past

    @torch.no_grad()
    def run(
        self, model: PreTrainedModel, ids: Int[Tensor, " new"]
    ) -> tuple["SessionState", Float[Tensor, "batch new hidden"]]:
        """The state with further tokens, and the input of the output head for these.

        Args:
            model: of the session.
            ids: at least one token.
        """
        past = self.past(model)
        with frozen(model):
            captured = capture(model, ids.unsqueeze(0), past=past)
        num_exact = self.num_exact + len(ids)
        layers: Any = past.layers
        keys = [layer.keys[:, :, -num_exact:] for layer in layers]
        values = [layer.values[:, :, -num_exact:] for layer in layers]
        queries = list(captured.queries)
        hidden = captured.hidden
        stream = captured.stream
        if self.num_exact:
            pairs = zip(self.queries, captured.queries, strict=True)
            queries = [torch.cat(both, dim=2) for both in pairs]
        if self.hidden is not None:
            hidden = torch.cat([self.hidden, captured.hidden], dim=1)
            share = len(ids) / (self.num_tokens + len(ids))
            pairs = zip(self.stream, captured.stream, strict=True)
            stream = [(1 - share) * before + share * new for before, new in pairs]
        after = replace(
            self,
            ids=torch.cat([self.ids, ids]),
            keys=keys,
            values=values,
            queries=queries,
            hidden=hidden,
            stream=stream,
            scales=captured.scales,
        )
        return after, captured.hidden

    def trace(self, model: PreTrainedModel, fingerprint: str, num_later: int) -> Trace:
        """The trace of all tokens but the last ones, which are the text after its prefix.

        Args:
            model: of the session.
            fingerprint: of the model.
            num_later: number of the last tokens, fewer than are exact.
        """
        if self.hidden is None:
            raise ValueError("a state without tokens has no trace")
        prefix_len = self.num_tokens - num_later
        num_new = self.num_exact - num_later
        layers = [
            LayerTrace(
                number=number,
                slots=slots,
                queries=self.queries[number][:, :, num_new:],
                suffix_keys=self.keys[number][:, :, num_new:],
                prefix_queries=self.queries[number][:, :, :num_new],
                scale=self.scales[number],
                stream=self.stream[number],
            )
            for number, slots in enumerate(self._slots(num_new))
        ]
        past = None
        if self.document is not None or self.compact is not None:
            past = Past(self.past_len, self.protected, self.past_queries, self.document)
        return Trace(
            model=model,
            fingerprint=fingerprint,
            text=TracedText(self.ids.unsqueeze(0), prefix_len, "suffix", prefix_len),
            layers=layers,
            prefix_positions=torch.arange(self.past_len, prefix_len),
            hidden=self.hidden[:, num_new - 1 :],
            past=past,
        )

    def _slots(self, num_exact: int) -> list[CompactLayer]:
        """Per layer, the slots of the compact cache, and those of the first exact tokens."""
        layers = []
        for number, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            keys = keys[:, :, :num_exact]
            values = values[:, :, :num_exact]
            if self.compact is not None:
                layers.append(self.compact.layers[number].padded().extended(keys, values))
                continue
            positions = torch.arange(num_exact, device=keys.device).expand(*keys.shape[:2], -1)
            layers.append(CompactLayer(keys, values, None, positions))
        return layers

    @property
    def protected(self) -> tuple[Range, ...]:
        """The ranges of protected tokens in the compact cache."""
        return () if self.compact is None else self.compact.record.protected

    def compacted(self, compact: CompactCache, past_queries: QuerySet | None) -> "SessionState":
        """The state whose first tokens are in another compact cache; the others stay exact."""
        num_later = self.num_tokens - compact.num_tokens
        first = self.num_exact - num_later
        hidden = self.hidden
        return replace(
            self,
            compact=compact,
            keys=[states[:, :, first:].clone() for states in self.keys],
            values=[states[:, :, first:].clone() for states in self.values],
            queries=[states[:, :, first:].clone() for states in self.queries],
            hidden=None if hidden is None else hidden[:, first:].clone(),
            past_queries=past_queries,
        )

    def cropped(self, num_tokens: int) -> "SessionState":
        """The state with the first tokens alone, at least one of which is exact."""
        num_exact = num_tokens - self.past_len
        hidden = self.hidden
        return replace(
            self,
            ids=self.ids[:num_tokens],
            keys=[states[:, :, :num_exact] for states in self.keys],
            values=[states[:, :, :num_exact] for states in self.values],
            queries=[states[:, :, :num_exact] for states in self.queries],
            hidden=None if hidden is None else hidden[:, :num_exact],
        )

    def cache(self, fingerprint: str, protect: Sequence[Range]) -> CompactCache:
        """Document and tokens as a compact cache: the slots so far, and one for every exact token.

        Args:
            fingerprint: of the model's weights.
            protect: ranges of tokens whose slots stay exact.
        """
        # a slot for each token in their order needs no positions
        layers = [
            replace(slots, positions=None).without_absent() for slots in self._slots(self.num_exact)
        ]
        ids = self.ids.unsqueeze(0)
        record = CacheRecord(method="dense") if self.compact is None else self.compact.record
        record = replace(
            record,
            document=document_digests(ids),
            first_ids=first_ids(ids),
            # not known if some of the first tokens are exact
            first_slots=record.first_slots if self.past_len >= NUM_FIRST else (),
            # the protected slots of the compact cache are the first ones, those of exact tokens
            # are not
            protected_later=tuple(clipped(protect, self.past_len, self.num_tokens)),
        )
        tokens = CompactCache(layers, self.num_tokens, fingerprint, record)
        return tokens if self.document is None else self.document.followed_by(tokens)
