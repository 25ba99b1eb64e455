"""Needle in a haystack: a passkey hidden at a depth of a text full of other codes, asked for after compression."""

import hashlib
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvcat.compress.documents import INSTRUCTION, opening_ids
from kvcat.errors import InputError
from kvcat.evals.answering import (
    Question,
    QuestionTask,
    answer_ids,
    check_supervision,
    vocabulary,
)
from kvcat.evals.haystack import FILLER, Pieces, draws, filler_lines, number, pick
from kvcat.evals.running import manifest
from kvcat.evals.task import Values

QUERY = "Memory record: special_passkey="
DISTRACTORS = (
    "Ignore the misleading special passkey candidate {}.\n",
    "The code {} is a decoy and not the special passkey.\n",
)
_DIGITS = 6
_MAX_NEW_TOKENS = _DIGITS + 2
_HASHED_LINES = 32


@dataclass(frozen=True)
class NeedleOptions:
    """What the examples of a needle evaluation are.

    Args:
        length: tokens of the haystack, all that comes before the query.
        depths: where the needle stands: 0 is the beginning, 1 the end of the haystack.
        per_depth: examples per depth, at least 1.
        distractor_rate: probability of a distractor at every draw of a sentence, in [0, 1].
        seed: any integer.
        supervision: "reconstruction" fits compressors to <haystack><instruction><haystack>, "self" to the queries of
            the haystack itself.

    Raises:
        InputError: an option out of its range.
    """

    length: int = 1024
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    per_depth: int = 20
    distractor_rate: float = 0.35
    seed: int = 0
    supervision: str = "reconstruction"

    def __post_init__(self) -> None:
        for name in ("length", "per_depth"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least 1")
        wrong = [depth for depth in self.depths if not 0 <= depth <= 1]
        if wrong or not self.depths or len(set(self.depths)) < len(self.depths):
            raise InputError(f"depths are {list(self.depths)}; give at least one in [0, 1], and each once")
        if not 0 <= self.distractor_rate <= 1:
            raise InputError(f"distractor_rate is {self.distractor_rate}; it must be in [0, 1]")
        check_supervision(self.supervision)


@dataclass(frozen=True)
class NeedleTask(QuestionTask):
    """Passkeys to be found in haystacks after these were compressed; ``needle_task`` makes it.

    Per example: ``exact_match``, the greedy answer is the passkey and no digit follows; ``correct_prefix``, the share
    of the passkey's digits before the first wrong one; both also on the dense cache, with the prefix ``dense_``; and
    the passkey's NLL (``PreparedQuestions``). The paper's native-success-conditioned accuracy is the mean of
    ``exact_match`` over the examples whose ``dense_exact_match`` is 1.

    Args:
        dataset: name of the filler.
        examples: depth after depth, so that the first n are spread over the depths for every n.
        options: what they were made from.
        texts: hash of the drawn sentences, the same for every tokenizer and length.
        words: ``vocabulary`` of the tokenizer.

    References: KV-CAT, appendix "Needle-in-a-haystack retrieval under KV cache compression".
    """

    dataset: str
    examples: tuple[Question, ...]
    options: NeedleOptions
    texts: str
    words: str
    evaluation: str = "needle"

    def describe(self) -> Mapping[str, Any]:
        """The options, the hash of the texts drawn, and the hash of all examples with their tokens."""
        return {**asdict(self.options), "texts": self.texts, "manifest": manifest(self.examples)}

    def judge(self, answer: str, references: Sequence[str]) -> Values:
        """``judge_passkey``."""
        return judge_passkey(answer, references)


def needle_task(
    tokenizer: PreTrainedTokenizerBase,
    options: NeedleOptions | None = None,
    *,
    filler: Sequence[str] = FILLER,
    dataset: str = "passkey",
) -> NeedleTask:
    """The examples of the options, in the tokens of a tokenizer.

    A haystack is the needle, "Memory record: special_passkey=483920.", between lines of filler, each of which is a
    distractor with probability ``distractor_rate``. Every line is encoded by itself, so that the query is the same
    tokens as the beginning of the needle. Lines stand whole; what is left of the exact length before the needle, and
    behind it, is filled with the end of a neutral line. The draws of an example are a function of the seed, the index
    of its depth and its number alone.

    Args:
        tokenizer: of the models to evaluate.
        options: None: the paper's.
        filler: neutral sentences, at least one.
        dataset: name of the filler.

    Raises:
        InputError: no filler, a haystack too short for the needle and the instruction, a tokenizer that cannot spell
            digits.
    """
    options = NeedleOptions() if options is None else options
    if not filler:
        raise InputError("there is no filler sentence to hide the needle in")
    pieces, digest = Pieces(tokenizer), hashlib.sha256()
    examples = []
    for instance in range(options.per_depth):
        for index, depth in enumerate(options.depths):
            key = (options.seed, index, instance)
            passkey = number(draws(*key, "passkey"), _DIGITS)
            question, answer = answer_ids(tokenizer, QUERY, passkey)
            needle = (*question, *answer, *pieces(".\n"))
            context = _haystack(pieces, tokenizer, needle, _Lines(key, passkey, filler, options), depth)
            document = f"{depth:g}-{instance}"
            examples.append(
                Question(document, "0", f"{depth:g}", context, question, answer, (passkey,), _MAX_NEW_TOKENS)
            )
            told = [[document, passkey], *_Lines(key, passkey, filler, options).first(_HASHED_LINES)]
            digest.update(json.dumps(told).encode() + b"\n")
    return NeedleTask(dataset, tuple(examples), options, digest.hexdigest(), vocabulary(tokenizer))


@dataclass(frozen=True)
class _Lines:
    """The lines of one haystack: of the part before and of the part after the needle."""

    key: tuple[int, int, int]
    passkey: str
    filler: Sequence[str]
    options: NeedleOptions

    def of(self, part: str) -> Iterator[str]:
        draw = draws(*self.key, part)
        while True:
            if draw.random() < self.options.distractor_rate:
                yield pick(draw, DISTRACTORS).format(self._decoy(draw))
            else:
                yield pick(draw, self.filler) + "\n"

    def padding(self, part: str) -> Iterator[str]:
        return filler_lines(draws(*self.key, part, "padding"), self.filler)

    def first(self, count: int) -> list[list[str]]:
        return [list(islice(self.of(part), count)) for part in ("before", "after")]

    def _decoy(self, draw: random.Random) -> str:
        while True:
            code = number(draw, _DIGITS)
            if code != self.passkey:
                return code


def _haystack(
    pieces: Pieces, tokenizer: PreTrainedTokenizerBase, needle: tuple[int, ...], lines: _Lines, depth: float
) -> tuple[int, ...]:
    """Exactly ``length`` token ids, with those of the needle in a row at the depth."""
    length, opening = lines.options.length, opening_ids(tokenizer)
    room = length - len(opening) - len(needle)
    least = len(pieces(INSTRUCTION))
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


def judge_passkey(answer: str, references: Sequence[str]) -> Values:
    """``exact_match`` and ``correct_prefix`` of the digits that an answer begins with.

    Args:
        answer: decoded; spaces before its digits do not count, nor does what follows them.
        references: the passkey.
    """
    (passkey,) = references
    digits = re.match(r"\s*([0-9]*)", answer)[1]  # type: ignore[index]
    same = next((i for i in range(len(passkey)) if digits[i : i + 1] != passkey[i]), len(passkey))
    return {"exact_match": float(digits == passkey), "correct_prefix": same / len(passkey)}
