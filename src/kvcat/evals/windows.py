"""Windows of held-out documents: a prefix that is compressed and a suffix that is scored."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcat.errors import InputError


@dataclass(frozen=True)
class Window:
    """Consecutive tokens of a single document.

    Args:
        document: the document's name; windows of one document are resampled together.
        name: the window's name in its document: the position of its first token.
        tokens: token ids of prefix and suffix, in order.
        prefix_len: how many of them are the prefix, at least 1 and at most ``len(tokens) - 2``.
        stratum: group that is reported apart; may be empty.

    Raises:
        InputError: a prefix without tokens, a suffix of fewer than two.
    """

    document: str
    name: str
    tokens: tuple[int, ...]
    prefix_len: int
    stratum: str = ""

    def __post_init__(self) -> None:
        if self.prefix_len < 1 or self.suffix_len < 2:
            raise InputError(
                f"a window needs a prefix of at least 1 token and a suffix of at least 2, "
                f"not {self.prefix_len} and {self.suffix_len}"
            )

    @property
    def suffix_len(self) -> int:
        """Tokens scored."""
        return len(self.tokens) - self.prefix_len


def windows_from_documents(
    documents: Iterable[tuple[str, str]],
    tokenizer: Any,
    *,
    prefix_len: int,
    suffix_len: int,
    limit: int | None = None,
    per_document: int = 1,
    seed: int = 0,
) -> list[Window]:
    """Windows that do not overlap, of documents and places drawn by the seed.

    The first window of every document comes before the second of any, so a shorter list still spans as many documents
    as it can. Documents are tokenised without special tokens, and only as many as the limit asks for.

    Args:
        documents: pairs (name, text); names are unique.
        tokenizer: a transformers tokenizer.
        prefix_len: tokens compressed, at least 1.
        suffix_len: tokens scored, at least 2.
        limit: windows in all, at least 1; None takes all.
        per_document: windows of one document at most, at least 1.
        seed: of the draw.

    Raises:
        InputError: no document is long enough, two documents share a name, a length or count out of range.
    """
    for name, value, least in [
        ("prefix_len", prefix_len, 1),
        ("suffix_len", suffix_len, 2),
        ("limit", 1 if limit is None else limit, 1),
        ("per_document", per_document, 1),
    ]:
        if value < least:
            raise InputError(f"{name} is {value}; it must be at least {least}")
    pairs = list(documents)
    if len({name for name, _ in pairs}) < len(pairs):
        names = [name for name, _ in pairs]
        raise InputError(f"two documents share the name {next(n for n in names if names.count(n) > 1)!r}")
    length = prefix_len + suffix_len
    generator = np.random.default_rng(seed)
    chosen: list[list[Window]] = []
    longest = 0
    for index in generator.permutation(len(pairs)):
        name, text = pairs[index]
        tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        longest = max(longest, len(tokens))
        starts = _starts(len(tokens), length, per_document, generator)
        if starts:
            chosen.append([Window(name, str(s), tuple(tokens[s : s + length]), prefix_len) for s in starts])
        if limit is not None and len(chosen) >= limit:
            break
    if not chosen:
        raise InputError(
            f"no document is long enough for a window of {prefix_len} + {suffix_len} tokens; "
            f"the longest of {len(pairs)} has {longest}"
        )
    ordered = [of[rank] for rank in range(per_document) for of in chosen if rank < len(of)]
    return ordered[:limit]


def _starts(num_tokens: int, length: int, count: int, generator: np.random.Generator) -> list[int]:
    """First positions of at most ``count`` windows: the document is cut at a random offset, blocks are drawn."""
    blocks = num_tokens // length
    if blocks == 0:
        return []
    offset = int(generator.integers(num_tokens - blocks * length + 1))
    drawn = generator.permutation(blocks)[:count]
    return [offset + int(block) * length for block in drawn]
