"""Texts with an exact number of tokens: neutral sentences, random draws and padding lines."""

import random
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, TypeVar

from kvcat.errors import InputError
from kvcat.text.encoder import TextEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILLER = tuple(files("kvcat.evals").joinpath("filler.txt").read_text(encoding="utf-8").splitlines())
"""Forty neutral sentences."""

_Item = TypeVar("_Item")


class Pieces:
    """An encoder that turns pieces of text into token ids.

    Each piece is encoded as a text that follows another text, so that its tokens are the same
    everywhere.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._encoder = TextEncoder(tokenizer)
        self._ids: dict[str, tuple[int, ...]] = {}

    def __call__(self, text: str) -> tuple[int, ...]:
        """Token ids of a piece, without special tokens; ``InputError`` if it has no tokens."""
        ids = self._ids.get(text)
        if ids is None:
            ids = tuple(self._encoder.behind(text))
            if not ids:
                name = self._tokenizer.name_or_path
                raise InputError(f"the tokenizer {name!r} has no token for {text!r}")
            self._ids[text] = ids
        return ids

    def count(self, texts: Sequence[str]) -> int:
        """The total number of tokens in the pieces."""
        return sum(len(self(text)) for text in texts)

    def remaining(self, num_tokens: int, texts: Sequence[str]) -> int:
        """The number of tokens left after these pieces; ``InputError`` if they do not fit."""
        needed = self.count(texts)
        if needed > num_tokens:
            raise InputError(f"{num_tokens} tokens are too few: the text needs at least {needed}")
        return num_tokens - needed

    def fitting(self, lines: Iterator[str], num_tokens: int) -> list[str]:
        """The longest sequence of first lines that fits into a number of tokens."""
        fitting_lines = []
        remaining = num_tokens
        for line in lines:
            remaining -= len(self(line))
            if remaining < 0:
                break
            fitting_lines.append(line)
        return fitting_lines

    def filled(
        self, lines: Sequence[str], padding: Iterator[str], num_tokens: int
    ) -> tuple[int, ...]:
        """Token ids of the given lines, preceded by the end of the padding lines.

        Together they have exactly ``num_tokens`` tokens.
        """
        body = [token for line in lines for token in self(line)]
        num_missing = num_tokens - len(body)
        head: list[int] = []
        while len(head) < num_missing:
            head = [*self(next(padding)), *head]
        return (*head[len(head) - num_missing :], *body)


def draws(*key: object) -> random.Random:
    """A random stream that depends only on the key.

    Use only its method ``random``, which gives the same numbers in every version of Python.
    """
    return random.Random(":".join(map(str, key)))


def pick(draw: random.Random, items: Sequence[_Item]) -> _Item:
    """One of the items, drawn uniformly."""
    return items[int(draw.random() * len(items))]


def shuffled(draw: random.Random, items: Sequence[_Item]) -> list[_Item]:
    """The items in a random order."""
    order = sorted((draw.random(), index) for index in range(len(items)))
    return [items[index] for _, index in order]


def number(draw: random.Random, num_digits: int) -> str:
    """A random number as text, with a fixed number of decimal digits; the first may be 0."""
    return f"{int(draw.random() * 10**num_digits):0{num_digits}d}"


def filler_lines(draw: random.Random) -> Iterator[str]:
    """An endless iterator over neutral sentences, drawn with replacement, one per line."""
    while True:
        yield pick(draw, FILLER) + "\n"
