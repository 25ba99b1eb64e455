"""Words that options, metadata and records choose from; light to import."""

from typing import Literal

DocumentSupervision = Literal["reconstruction", "self"]
"""What a document's cache is fitted to: the document repeated, or its own queries."""

SuffixSupervision = Literal["suffix", "first-half", "reconstruction"]
"""What a window's cache is fitted to: the text after it, half of that, or its prefix repeated."""

Supervision = Literal[SuffixSupervision, DocumentSupervision]
"""What a cache is fitted to."""

Bos = Literal["auto", "always", "never"]
"""What begins a text: what the tokenizer puts there (auto), at least its BOS token, or nothing."""
