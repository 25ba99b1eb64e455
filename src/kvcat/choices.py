"""The allowed words of options, metadata and records; cheap to import."""

from typing import Literal

DocumentSupervision = Literal["reconstruction", "self"]
"""The text to which a document's cache is fitted: a copy of it, or the document itself."""

SuffixSupervision = Literal["suffix", "first-half", "reconstruction"]
"""The text to which a window's cache is fitted: its suffix, half of it, or its prefix repeated."""

Supervision = Literal[SuffixSupervision, DocumentSupervision]
"""The text to which a cache is fitted."""

Bos = Literal["auto", "always", "never"]
"""The tokens at the start of a text: the tokenizer's (auto), at least BOS, or none."""

NUM_FIRST = 16
"""First tokens of a document whose ids a compact cache records."""
SEAM_TOKENS = 8
"""First tokens of every later document that ``kvcat.compose`` encodes again, by default."""
