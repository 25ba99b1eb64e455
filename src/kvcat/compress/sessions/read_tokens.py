"""What a session holds after a document if its model cannot be compacted again."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from kvcat.cache import CompactCache, PrefixLayer, cache_argument
from kvcat.models import frozen, hidden_states
from kvcat.types import Float, Int, Tensor


@dataclass(frozen=True, eq=False)
class ReadTokens:
    """The tokens of one conversation after a document; a ``SessionState`` without compactions.

    Layers with a recurrent state or a short sliding window have no keys of every token: what they
    hold after the last token does not say what they held before it. So the cache of transformers
    itself is kept, as it was before the last token. Nothing ever changes it: copies of it are read
    on.

    Args:
        ids: all tokens.
        document: compact cache of the text before them.
        before_last: holds the document and all tokens but the last; None: there are no tokens.
        hidden: input of the output head, of the last token.
    """

    ids: Int[Tensor, " tokens"]
    document: CompactCache
    before_last: Cache | None = None
    hidden: Float[Tensor, "batch exact hidden"] | None = None

    past_len = 0
    compact = None

    @property
    def num_tokens(self) -> int:
        """The number of all tokens."""
        return len(self.ids)

    @property
    def num_exact(self) -> int:
        """The same: all of them are exact."""
        return len(self.ids)

    @property
    def held_slots(self) -> float:
        """Slots per layer and head after those of the document."""
        return float(len(self.ids))

    @property
    def nbytes(self) -> int:
        """Bytes of the document, and of keys and values after it."""
        layers: Any = [] if self.before_last is None else self.before_last.layers
        slots = [layer for layer in layers if isinstance(layer, PrefixLayer)]
        new = [x[:, :, -len(self.ids) :] for layer in slots for x in (layer.keys, layer.values)]
        return self.document.nbytes + sum(states.nbytes for states in new)

    def past_before_last(self, model: PreTrainedModel) -> Cache:
        """As ``SessionState.past_before_last``; of the document alone without tokens."""
        if self.before_last is None:
            return self.document.to_transformers(model)
        return copy.deepcopy(self.before_last)

    @torch.no_grad()
    def run(
        self, model: PreTrainedModel, ids: Int[Tensor, " new"]
    ) -> tuple["ReadTokens", Float[Tensor, "batch new hidden"]]:
        """As ``SessionState.run``."""
        before_last: Any = self.past_before_last(model)
        unread = torch.cat([self.ids[-1:], ids]).unsqueeze(0)

        def read(tokens: Tensor, past: Any) -> Tensor:
            past.tokens = None  # a text may repeat the text before it
            inputs = {"input_ids": tokens, "use_cache": True, **cache_argument(past)}
            return hidden_states(model, **inputs)

        states = []
        with frozen(model):
            if unread.shape[1] > 1:
                states.append(read(unread[:, :-1], before_last))
            states.append(read(unread[:, -1:], copy.deepcopy(before_last)))
        hidden = torch.cat(states, dim=1)[:, -len(ids) :]
        after = replace(
            self,
            ids=torch.cat([self.ids, ids]),
            before_last=before_last,
            hidden=hidden[:, -1:],
        )
        return after, hidden
