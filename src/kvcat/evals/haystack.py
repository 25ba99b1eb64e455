"""Text to hide things in: neutral sentences, and lines of them that fill an exact number of tokens."""

import random
import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from kvcat.errors import InputError

_Item = TypeVar("_Item")
FILLER = tuple(files("kvcat.evals").joinpath("filler.txt").read_text(encoding="utf-8").splitlines())
"""Forty neutral sentences."""


def read_filler(path: Path) -> tuple[str, ...]:
    """Sentences of a text file that hide nothing by themselves, each once, in the order of the file.

    A sentence ends with a full stop, a question or an exclamation mark. Those with a digit, with the word passkey, or
    of fewer than 3 or more than 60 words are left out.

    Args:
        path: UTF-8 text.

    Raises:
        InputError: the file cannot be read, is not UTF-8, or has no such sentence.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    sentences = [" ".join(part.split()) for part in re.split(r"(?<=[.!?])\s+", text)]
    usable = [s for s in sentences if 3 <= len(s.split()) <= 60 and not re.search(r"\d|passkey", s.lower())]
    if not usable:
        raise InputError(
            f"{path} has no usable sentence: one of 3 to 60 words without a digit and without the word passkey"
        )
    return tuple(dict.fromkeys(usable))


class Pieces:
    """Token ids of pieces of text, each encoded by itself and so the same tokens wherever it stands.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, self._known = tokenizer, dict[str, tuple[int, ...]]()

    def __call__(self, text: str) -> tuple[int, ...]:
        """Token ids of a piece, without special tokens.

        Raises:
            InputError: it has none.
        """
        if text not in self._known:
            self._known[text] = tuple(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))
            if not self._known[text]:
                raise InputError(f"the tokenizer {self._tokenizer.name_or_path!r} has no token for {text!r}")
        return self._known[text]

    def fitting(self, lines: Iterator[str], num_tokens: int) -> list[str]:
        """The first lines of an endless iterator, as many as fit whole into so many tokens."""
        taken = []
        for line in lines:
            num_tokens -= len(self(line))
            if num_tokens < 0:
                break
            taken.append(line)
        return taken

    def filled(self, lines: Sequence[str], padding: Iterator[str], num_tokens: int) -> tuple[int, ...]:
        """Token ids of the lines, and before them the end of padding lines, exactly ``num_tokens`` in all.

        Args:
            lines: that fit.
            padding: endless; the first of them is cut at its start.
            num_tokens: at least as many as the lines have.
        """
        body = [token for line in lines for token in self(line)]
        missing, head = num_tokens - len(body), list[int]()
        while len(head) < missing:
            head = [*self(next(padding)), *head]
        return (*head[len(head) - missing :], *body)


def draws(*key: object) -> random.Random:
    """A random stream that is a function of the key alone; only its ``random`` is the same for every Python."""
    return random.Random(":".join(map(str, key)))


def pick(draw: random.Random, items: Sequence[_Item]) -> _Item:
    """One of the items, each as likely as another."""
    return items[int(draw.random() * len(items))]


def shuffled(draw: random.Random, items: Sequence[_Item]) -> list[_Item]:
    """The items in a random order."""
    return [items[index] for _, index in sorted((draw.random(), index) for index in range(len(items)))]


def number(draw: random.Random, num_digits: int) -> str:
    """So many decimal digits, any of which may be 0."""
    return f"{int(draw.random() * 10**num_digits):0{num_digits}d}"


def filler_lines(draw: random.Random, filler: Sequence[str]) -> Iterator[str]:
    """Sentences in random order with repetition, one a line, without end."""
    while True:
        yield pick(draw, filler) + "\n"
