"""Text to hide things in: neutral sentences, and lines of them that fill an exact number of tokens."""

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from kvcat.errors import InputError

_Item = TypeVar("_Item")
_WORDS = range(3, 61)

FILLER = (
    "The river runs slowly past the old mill at the edge of the valley.",
    "Bread smells best in the first hour after it leaves the oven.",
    "Two gardeners argued quietly about the right time to prune the roses.",
    "In winter the harbour is empty except for a few fishing boats.",
    "Her brother repairs clocks in a small shop behind the station.",
    "The lecture began late because the projector would not start.",
    "Clouds gathered over the hills, but the rain never came.",
    "Children drew long lines of chalk along the pavement.",
    "A good map shows the paths that people really use.",
    "The orchestra tuned its instruments while the hall filled up.",
    "Nobody remembered who had planted the walnut tree.",
    "Fresh paint dried on the fence beside the tennis court.",
    "The cat prefers the chair by the window in the afternoon.",
    "Wool shrinks when it is washed in water that is too hot.",
    "They walked along the canal until the lamps were lit.",
    "The bakery closes early on the day before a holiday.",
    "Old letters were kept in a tin box under the stairs.",
    "A light wind moved the flags in front of the town hall.",
    "The recipe asks for patience more than for rare ingredients.",
    "Trains to the coast leave from the platform near the entrance.",
    "Students often study in the library because it is quiet there.",
    "The carpenter measured the shelf again before he cut it.",
    "Bees return to the same meadow as long as clover blooms.",
    "Snow covered the tracks that the fox had left in the field.",
    "The museum lends its paintings to other cities in summer.",
    "He learned to whistle from an uncle who kept pigeons.",
    "Tea tastes different when it is made with water from a spring.",
    "The bridge was closed while workers replaced the wooden planks.",
    "Every morning the postman stops to talk about the weather.",
    "A pile of books held the door of the office open.",
    "The lighthouse can be seen from the far side of the bay.",
    "Sheep graze on the slope where the castle used to stand.",
    "The play ended with a song that the audience knew by heart.",
    "Moss grows thickly on the northern side of the stone wall.",
    "Her notebook is full of sketches of birds and bridges.",
    "The market sells apples, honey, candles and knitted gloves.",
    "Ink was spilled on the desk and left a mark like a leaf.",
    "The doctor cycles to her patients when the roads are dry.",
    "Some roofs in the village are still covered with straw.",
    "The choir practises in a barn because the church is cold.",
)


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
    usable = [s for s in sentences if len(s.split()) in _WORDS and not re.search(r"\d|passkey", s.lower())]
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
        """The first lines, as many as fit whole into so many tokens.

        Args:
            lines: endless.
            num_tokens: at least 0.
        """
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
    """A random stream that is a function of the key alone; only its ``random`` is the same for every Python.

    Args:
        key: whatever tells this stream from others.
    """
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
