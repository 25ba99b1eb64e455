"""Needle in a haystack: a passkey hidden at a depth of a text full of other codes, asked for after compression.

Also what RULER's texts are made of: neutral sentences, and lines that fill an exact number of tokens.
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import product
from typing import ClassVar, TypeVar

from transformers import PreTrainedTokenizerBase

from kvcat.choices import Bos
from kvcat.compress import INSTRUCTION
from kvcat.errors import InputError, check_least
from kvcat.evals.answers import Question, QuestionTask, answer_ids
from kvcat.evals.task import Values, vocabulary
from kvcat.tokenization import TextEncoder, opening_ids

QUERY = "Memory record: special_passkey="
DISTRACTORS = (
    "Ignore the misleading special passkey candidate {}.\n",
    "The code {} is a decoy and not the special passkey.\n",
)
DISTRACTOR_RATE = 0.35
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
FILLER = tuple(files("kvcat.evals").joinpath("filler.txt").read_text(encoding="utf-8").splitlines())
"""Forty neutral sentences."""

_DIGITS = 6
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class NeedleTask(QuestionTask):
    """Passkeys to be found in haystacks after these were compressed; ``make_task`` makes it.

    Judged are ``exact_match``, the greedy answer is the passkey and no digit follows, and
    ``correct_prefix``, the share of the passkey's digits before the first wrong one.

    References: KV-CAT, appendix "Needle-in-a-haystack retrieval under KV cache compression".
    """

    evaluation: ClassVar[str] = "needle"

    @staticmethod
    def judge(answer: str, references: Sequence[str]) -> Values:
        """Values of the digits that an answer begins with; spaces before them and what follows do not count."""
        (passkey,) = references
        digits = re.match(r"\s*([0-9]*)", answer)[1]  # type: ignore[index]
        same = next((i for i in range(len(passkey)) if digits[i : i + 1] != passkey[i]), len(passkey))
        return {"exact_match": float(digits == passkey), "correct_prefix": same / len(passkey)}


def make_task(
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int = 1024,
    per_depth: int = 20,
    seed: int = 0,
    bos: Bos = "auto",
) -> NeedleTask:
    """The needle evaluation in the tokens of a tokenizer: haystacks of ``length`` tokens, all before the query.

    A haystack is the needle, "Memory record: special_passkey=483920.", between lines of filler, each of
    which is a distractor with probability ``DISTRACTOR_RATE``. Every line is encoded by itself, so that
    the query is the same tokens as the beginning of the needle. The draws of an example are a function of
    the seed, the index of its depth and its number alone; the first n examples are spread over the depths.
    ``bos`` says what a haystack begins with (``opening_ids``).

    Raises:
        InputError: a value out of range, a haystack too short, a tokenizer that cannot spell digits.
    """
    check_least(1, per_depth=per_depth)
    pieces, opening, examples = Pieces(tokenizer), tuple(opening_ids(tokenizer, bos)), []
    least = len(pieces(INSTRUCTION))
    for instance, (index, depth) in product(range(per_depth), enumerate(DEPTHS)):
        key = seed, index, instance
        passkey = number(draws(*key, "passkey"), _DIGITS)
        question, answer = answer_ids(tokenizer, QUERY, passkey)
        needle = (*question, *answer, *pieces(".\n"))
        room = length - len(opening) - len(needle)
        if room < least:
            needed = length - room + least
            raise InputError(f"a haystack of {length} tokens is too short: needle and instruction take {needed}")
        first = round(depth * room)
        before, after = (
            pieces.filled(
                pieces.fitting(lines_with_decoys(draws(*key, part), passkey), size),
                filler_lines(draws(*key, part, "padding")),
                size,
            )
            for part, size in (("before", first), ("after", room - first))
        )
        context, name = (*opening, *before, *needle, *after), f"{depth:g}-{instance}"
        examples.append(Question(name, "0", f"{depth:g}", context, question, answer, (passkey,), _DIGITS + 2))
    options = {"length": length, "depths": DEPTHS, "per_depth": per_depth, "distractor_rate": DISTRACTOR_RATE}
    options |= {"seed": seed} if bos == "auto" else {"seed": seed, "bos": bos}
    return NeedleTask("passkey", tuple(examples), options, vocabulary(tokenizer), opening)


def lines_with_decoys(draw: random.Random, passkey: str) -> Iterator[str]:
    """Lines of filler and distractors without end; no distractor holds the passkey."""
    while True:
        if draw.random() >= DISTRACTOR_RATE:
            yield next(filler_lines(draw))
        else:
            line = pick(draw, DISTRACTORS)
            while (code := number(draw, _DIGITS)) == passkey:
                pass
            yield line.format(code)


class Pieces:
    """Token ids of pieces of text, each as behind other text and so the same tokens wherever it stands."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._encoder = TextEncoder(tokenizer)
        self._known = dict[str, tuple[int, ...]]()

    def __call__(self, text: str) -> tuple[int, ...]:
        """Token ids of a piece, without special tokens; a piece that has none is refused."""
        if text not in self._known:
            self._known[text] = tuple(self._encoder.behind(text))
            if not self._known[text]:
                raise InputError(f"the tokenizer {self._tokenizer.name_or_path!r} has no token for {text!r}")
        return self._known[text]

    def left(self, num_tokens: int, parts: Sequence[str]) -> int:
        """Tokens left after these parts, which have to fit."""
        if (left := num_tokens - sum(len(self(part)) for part in parts)) < 0:
            raise InputError(f"{num_tokens} tokens are too few: the text takes at least {num_tokens - left}")
        return left

    def fitting(self, lines: Iterator[str], num_tokens: int) -> list[str]:
        """The first lines of an endless iterator, as many as fit whole into so many tokens."""
        taken = []
        while (num_tokens := num_tokens - len(self(line := next(lines)))) >= 0:
            taken.append(line)
        return taken

    def filled(self, lines: Sequence[str], padding: Iterator[str], num_tokens: int) -> tuple[int, ...]:
        """Token ids of lines that fit, and before them the end of padding lines, exactly ``num_tokens`` in all."""
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


def filler_lines(draw: random.Random) -> Iterator[str]:
    """Neutral sentences in random order with repetition, one a line, without end."""
    while True:
        yield pick(draw, FILLER) + "\n"
