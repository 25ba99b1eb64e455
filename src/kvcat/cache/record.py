"""What a compact cache knows about itself, as one typed record.

The record is text only where a file is written or read (JSON) and where people read it (``texts``).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_type_hints

from kvcat.cache.first_tokens import FirstIds, FirstSlots, document_digests
from kvcat.cache.ranges import Range, range_text
from kvcat.cache.rope import Factors
from kvcat.errors import InputError
from kvcat.options import NUM_FIRST, typed_value
from kvcat.types import Int, Tensor


@dataclass(frozen=True)
class CacheRecord:
    """How a cache was made, and of which tokens.

    An entry with its default is not known, or does not apply. Sizes and bits are not recorded: the
    layers have them.

    Args:
        method: name of the compressor.
        options: of the method, and other facts that only people read.
        model: its name.
        architecture: class of the model.
        supervision: the queries to which the cache was fitted.
        chat: whether the document opens a user's turn in the chat template.
        chat_template: hash of that template's source.
        document: per example, a hash of all tokens.
        first_ids: ids of the first tokens (``first_tokens``).
        first_slots: which of these have a slot, for layers that do not know their positions.
        rope: the rotary factors of the keys, for models whose factors depend on the length.
        room: number of tokens that were planned to follow, for such models.
        protected: ranges of the tokens whose slots are exact and come first in every head.
        protected_later: ranges of the tokens whose exact slots come after others.
        documents: number of tokens of each document of a composed cache.
        seam_tokens: number of first tokens of its later documents that were encoded again.
        appended: number of tokens that were appended to the documents.
        refit: queries to which log-bias and values of the composed cache were fitted again.
        held_out_kl: KL that was measured on held-out positions, in nats per token.
        id: of the document in a store.
        text_checksum: of the document's text in a store.
    """

    method: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    model: str = ""
    architecture: str = ""
    supervision: str = ""
    chat: bool | None = None
    chat_template: str = ""
    document: tuple[str, ...] = ()
    first_ids: FirstIds = ()
    first_slots: FirstSlots = ()
    rope: Factors | None = None
    room: int | None = None
    protected: tuple[Range, ...] = ()
    protected_later: tuple[Range, ...] = ()
    documents: tuple[int, ...] = ()
    seam_tokens: int | None = None
    appended: int = 0
    refit: str = ""
    held_out_kl: float | None = None
    id: str = ""
    text_checksum: str = ""

    @classmethod
    def from_json(cls, text: str, name: object) -> "CacheRecord":
        """The record that ``to_json`` wrote.

        Args:
            text: from a file.
            name: of the file, for the message.

        Raises:
            InputError: no such record.
        """
        try:
            entries = json.loads(text)
            typed = {key: typed_value(value, _HINTS[key]) for key, value in entries.items()}
        except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
            raise InputError(f"{name}: its record is not that of a compact cache") from None
        return cls(**typed)

    def to_json(self) -> str:
        """The record as text for a file, with the entries that are known."""
        return json.dumps(self._known(), sort_keys=True)

    def _known(self) -> dict[str, Any]:
        """The entries that do not have their default."""
        unknown = CacheRecord()
        entries = {each.name: getattr(self, each.name) for each in fields(self)}
        return {key: value for key, value in entries.items() if value != getattr(unknown, key)}

    def texts(self) -> dict[str, str]:
        """What people read of the record, by name."""
        shown = self._known()
        for name in ("first_ids", "first_slots"):
            shown.pop(name, None)
        for name in {"protected", "protected_later"} & set(shown):
            shown[name] = range_text(shown[name])
        if "chat" in shown:
            shown["chat"] = "yes" if self.chat else "no"
        if "document" in shown:
            shown["document"] = ";".join(self.document)
        if "documents" in shown:
            shown["documents"] = " ".join(map(str, self.documents))
        if "held_out_kl" in shown:
            shown["held_out_kl"] = f"{self.held_out_kl:.6g}"
        # an option of a plug-in may have the name of an entry
        shown |= shown.pop("options", {})
        return {key: str(value) for key, value in shown.items()}

    @property
    def has_protected(self) -> bool:
        """Whether any slots are protected."""
        return bool(self.protected or self.protected_later)

    def of_examples(self, chosen: Sequence[int]) -> "CacheRecord":
        """The record of the chosen examples of a batch."""
        of_each = {
            name: tuple(getattr(self, name)[example] for example in chosen)
            for name in ("document", "first_ids", "first_slots")
            if getattr(self, name)
        }
        return replace(self, **of_each)

    def same_documents(self, tokens: Int[Tensor, "batch prefix"]) -> list[bool] | None:
        """Per row, whether tokens are those of the example that the row continues.

        None if that is not recorded: of a composed cache.

        Args:
            tokens: a multiple of the number of examples; consecutive rows continue the same one.
        """
        if not self.document:
            return None
        rows_of_each = len(tokens) // len(self.document)
        wanted = [digest for digest in self.document for _ in range(rows_of_each)]
        return [one == other for one, other in zip(document_digests(tokens), wanted, strict=True)]

    def longer(self, num_tokens: int, later: FirstIds) -> "CacheRecord":
        """The record of the prefix with tokens after it, without what is true of it alone.

        Args:
            later: the first ids of the tokens after it.
        """
        ids = self.first_ids
        # a long prefix has them all, and one that does not record all of its own gets no others
        if ids and later and len(ids[0]) >= num_tokens:
            pairs = zip(ids, later, strict=True)
            ids = tuple((*first, *second)[:NUM_FIRST] for first, second in pairs)
        return replace(self, document=(), held_out_kl=None, first_ids=ids, first_slots=())


_HINTS: dict[str, Any] = {**get_type_hints(CacheRecord), "options": dict[str, str]}
