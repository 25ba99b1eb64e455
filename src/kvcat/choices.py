"""The words that options, metadata and records choose from; cheap to import."""

from typing import Literal

DocumentSupervision = Literal["reconstruction", "self"]
"""What a document's cache is fitted to: a copy of the document, or the document's queries."""

SuffixSupervision = Literal["suffix", "first-half", "reconstruction"]
"""What a window's cache is fitted to: the text after it, half of that, or its prefix repeated."""

Supervision = Literal[SuffixSupervision, DocumentSupervision]
"""What a cache is fitted to."""

Bos = Literal["auto", "always", "never"]
"""How a text begins: as the tokenizer begins it (auto), always with BOS, or with nothing added."""
