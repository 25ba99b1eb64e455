"""Needle in a haystack: a passkey hidden at a depth of a text full of other codes, asked for after compression."""

import hashlib
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import ClassVar

from transformers import PreTrainedTokenizerBase

from kvcat.compress.documents import INSTRUCTION, opening_ids
from kvcat.errors import InputError
from kvcat.evals.answers import Question, QuestionTask, answer_ids, check_supervision
from kvcat.evals.haystack import FILLER, Pieces, draws, filler_lines, number, pick, read_filler
from kvcat.evals.task import Values, vocabulary

QUERY = "Memory record: special_passkey="
DISTRACTORS = (
    "Ignore the misleading special passkey candidate {}.\n",
    "The code {} is a decoy and not the special passkey.\n",
)
DISTRACTOR_RATE = 0.35
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_DIGITS = 6
_MAX_NEW_TOKENS = _DIGITS + 2
_HASHED_LINES = 32


@dataclass(frozen=True)
class NeedleTask(QuestionTask):
    """Passkeys to be found in haystacks after these were compressed; ``make_task`` makes it.

    Judged are ``exact_match``, the greedy answer is the passkey and no digit follows, and
    ``correct_prefix``, the share of the passkey's digits before the first wrong one. The paper's
    native-success-conditioned accuracy is the mean of ``exact_match`` over the examples whose
    ``dense_exact_match`` is 1.

    References: KV-CAT, appendix "Needle-in-a-haystack retrieval under KV cache compression".
    """

    evaluation: ClassVar[str] = "needle"

    @staticmethod
    def judge(answer: str, references: Sequence[str]) -> Values:
        """``exact_match`` and ``correct_prefix`` of the digits that an answer begins with.

        Args:
            answer: decoded; spaces before its digits do not count, nor does what follows them.
            references: the passkey.
        """
        (passkey,) = references
        digits = re.match(r"\s*([0-9]*)", answer)[1]  # type: ignore[index]
        same = next((i for i in range(len(passkey)) if digits[i : i + 1] != passkey[i]), len(passkey))
        return {"exact_match": float(digits == passkey), "correct_prefix": same / len(passkey)}


def make_task(
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int = 1024,
    per_depth: int = 20,
    filler: Path | None = None,
    seed: int = 0,
    supervision: str = "reconstruction",
) -> NeedleTask:
    """The needle evaluation in the tokens of a tokenizer.

    A haystack is the needle, "Memory record: special_passkey=483920.", between lines of filler, each of
    which is a distractor with probability ``DISTRACTOR_RATE``. Every line is encoded by itself, so that
    the query is the same tokens as the beginning of the needle. Lines stand whole; what is left of the
    exact length before the needle, and behind it, is filled with the end of a neutral line. The draws of
    an example are a function of the seed, the index of its depth and its number alone. Examples go depth
    after depth, so that the first n are spread over the depths for every n.

    Args:
        tokenizer: of the models to evaluate.
        length: tokens of the haystack, all that comes before the query.
        per_depth: examples at each of ``DEPTHS``, at least 1.
        filler: text file whose sentences are the hay; None: ``FILLER``.
        seed: any integer.
        supervision: as in ``QuestionTask``.

    Raises:
        InputError: a value out of its range, a filler without a usable sentence, a haystack too short for the needle
            and the instruction, a tokenizer that cannot spell digits.
    """
    for name, value in {"length": length, "per_depth": per_depth}.items():
        if value < 1:
            raise InputError(f"{name} is {value}; it must be at least 1")
    check_supervision(supervision)
    sentences = FILLER if filler is None else read_filler(filler)
    pieces, digest, examples = Pieces(tokenizer), hashlib.sha256(), []
    for instance in range(per_depth):
        for index, depth in enumerate(DEPTHS):
            lines = _Lines((seed, index, instance), number(draws(seed, index, instance, "passkey"), _DIGITS), sentences)
            question, answer = answer_ids(tokenizer, QUERY, lines.passkey)
            needle = (*question, *answer, *pieces(".\n"))
            context = _haystack(pieces, opening_ids(tokenizer), needle, lines, depth, length)
            name, known = f"{depth:g}-{instance}", (lines.passkey,)
            examples.append(Question(name, "0", f"{depth:g}", context, question, answer, known, _MAX_NEW_TOKENS))
            digest.update(json.dumps([[name, lines.passkey], *lines.first(_HASHED_LINES)]).encode() + b"\n")
    options = {
        "length": length, "depths": DEPTHS, "per_depth": per_depth, "distractor_rate": DISTRACTOR_RATE, "seed": seed,
        "texts": digest.hexdigest(),
    }  # fmt: skip
    dataset = "passkey" if filler is None else f"passkey:{filler.name}"
    return NeedleTask(dataset, tuple(examples), options, supervision, vocabulary(tokenizer))


@dataclass(frozen=True)
class _Lines:
    """The lines of one haystack: of the part before and of the part after the needle."""

    key: tuple[int, int, int]
    passkey: str
    filler: Sequence[str]

    def of(self, part: str) -> Iterator[str]:
        draw = draws(*self.key, part)
        while True:
            if draw.random() < DISTRACTOR_RATE:
                yield pick(draw, DISTRACTORS).format(self._decoy(draw))
            else:
                yield pick(draw, self.filler) + "\n"

    def padding(self, part: str) -> Iterator[str]:
        return filler_lines(draws(*self.key, part, "padding"), self.filler)

    def first(self, count: int) -> list[list[str]]:
        return [list(islice(self.of(part), count)) for part in ("before", "after")]

    def _decoy(self, draw: random.Random) -> str:
        while (code := number(draw, _DIGITS)) == self.passkey:
            pass
        return code


def _haystack(
    pieces: Pieces, opening: Sequence[int], needle: tuple[int, ...], lines: _Lines, depth: float, length: int
) -> tuple[int, ...]:
    """Exactly ``length`` token ids, with those of the needle in a row at the depth."""
    room, least = length - len(opening) - len(needle), len(pieces(INSTRUCTION))
    if room < least:
        raise InputError(
            f"a haystack of {length} tokens is too short: needle and instruction take {length - room + least}"
        )
    before = round(depth * room)
    parts = [
        pieces.filled(pieces.fitting(lines.of(part), count), lines.padding(part), count)
        for part, count in (("before", before), ("after", room - before))
    ]
    return (*opening, *parts[0], *needle, *parts[1])
