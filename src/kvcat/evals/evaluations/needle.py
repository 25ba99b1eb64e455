"""Find a passkey in a compressed haystack.

The passkey is retrieved after the text that contains it was compressed. The text also contains
other codes. The depth of the passkey in the text varies.
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kvcat.errors import InputError, check_least
from kvcat.evals.evaluation import CompressingEvaluation, PaperFigures, ReportFacts
from kvcat.evals.haystacks import Pieces, draws, filler_lines, number, pick
from kvcat.evals.questions import Question, QuestionTask, answer_ids
from kvcat.evals.task import Values, vocabulary
from kvcat.option_types import Bos, Count
from kvcat.stats.metrics import share_of_examples
from kvcat.text.encoder import opening_ids


@dataclass(frozen=True, kw_only=True)
class Needle(CompressingEvaluation):
    """Compress a haystack with a six-digit passkey, then ask for it: greedy answer, exact match.

    The paper's method: --method gradient,init=random. Default keep ratios: 0.05 to 0.4 in steps of
    0.05, and 0.5.

    Example: kvcat eval needle base=./base kvcat=./export --keep 0.1 0.2 --out needle
    """

    default_keeps = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5)
    facts = ReportFacts(
        title="Needle in a haystack",
        metrics=(
            "exact_match",
            "nll",
            "dense_exact_match",
            "nll_dense",
            "native_exact_match",
            "correct_prefix",
        ),
        stratum_name="depth",
        sizes="{length} tokens each",
    )
    new_metrics: ClassVar = {
        "native_exact_match": share_of_examples(
            label="exact match, native",
            description="Exact match over the examples that the model answers rightly on its whole "
            "cache, as in the paper. It favours a model that is right on a small number of them.",
            comparable=False,
            columns=("native_match", "dense_exact_match"),
            products={"native_match": ("exact_match", "dense_exact_match")},
            function=np.divide,
        ),
        "correct_prefix": share_of_examples(
            label="digits",
            description="Share of the passkey's digits before the first wrong one.",
        ),
    }
    paper = PaperFigures(metrics={"native_exact_match": "exact_match"})

    length: Count = 1024
    """Exact number of tokens in the haystack."""
    per_depth: Count = 20
    """Examples at each of five depths: the paper has 20; use 100 for results you publish."""
    bos: Bos = "auto"

    def make_task(self, tokenizer: Any, value: Any) -> "NeedleTask":  # noqa: ARG002
        """The examples in the tokens of a tokenizer.

        A haystack is the needle, "Memory record: special_passkey=483920.", between lines of filler,
        each of which is a distractor with probability ``DISTRACTOR_RATE``. Every line is encoded
        separately, so that the query has the same tokens as the beginning of the needle. The random
        draws of an example depend only on the seed, the index of its depth and its number. The
        first n examples are distributed evenly over the depths.

        Raises:
            InputError: the haystack is too short, or the tokenizer cannot encode digits.
        """
        from kvcat.compress import INSTRUCTION

        check_least(1, per_depth=self.per_depth)
        pieces = Pieces(tokenizer)
        opening = tuple(opening_ids(tokenizer, self.bos))
        examples = []
        for instance in range(self.per_depth):
            for depth_index, depth in enumerate(DEPTHS):
                key = (self.data_seed, depth_index, instance)
                passkey = number(draws(*key, "passkey"), _DIGITS)
                question, answer = answer_ids(tokenizer, QUERY, passkey)
                needle = (*question, *answer, *pieces(".\n"))
                room = self.length - len(opening) - len(needle)
                missing = len(pieces(INSTRUCTION)) - room
                if missing > 0:
                    raise InputError(
                        f"a haystack of {self.length} tokens is too short: needle and instruction "
                        f"need {self.length + missing}"
                    )
                num_before = round(depth * room)
                before = _haystack(pieces, (*key, "before"), passkey, num_before)
                after = _haystack(pieces, (*key, "after"), passkey, room - num_before)
                example = Question(
                    document=f"{depth:g}-{instance}",
                    name="0",
                    stratum=f"{depth:g}",
                    context=(*opening, *before, *needle, *after),
                    question=question,
                    answer=answer,
                    references=(passkey,),
                    max_new_tokens=_DIGITS + 2,
                )
                examples.append(example)
        options: dict[str, Any] = {
            "length": self.length,
            "depths": DEPTHS,
            "per_depth": self.per_depth,
            "distractor_rate": DISTRACTOR_RATE,
            "seed": self.data_seed,
        }
        if self.bos != "auto":
            options["bos"] = self.bos
        return NeedleTask("passkey", tuple(examples), options, vocabulary(tokenizer), opening)


QUERY = "Memory record: special_passkey="
DISTRACTORS = (
    "Ignore the misleading special passkey candidate {}.\n",
    "The code {} is a decoy and not the special passkey.\n",
)
DISTRACTOR_RATE = 0.35
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)

_DIGITS = 6


@dataclass(frozen=True)
class NeedleTask(QuestionTask):
    """A task to retrieve passkeys from compressed haystacks.

    An answer has two values. ``exact_match`` is 1 if the greedy answer is the passkey and no digit
    follows, else 0. ``correct_prefix`` is the share of the passkey's digits before the first wrong
    digit.

    References: KV-CAT, appendix "Needle-in-a-haystack retrieval under KV cache compression".
    """

    evaluation: ClassVar[str] = "needle"

    @staticmethod
    def judge(answer: str, references: Sequence[str]) -> Values:
        """The two values of an answer, from the digits with which it begins (after spaces)."""
        (passkey,) = references
        digits = re.match(r"\s*([0-9]*)", answer)[1]  # type: ignore[index]
        num_correct = 0
        for digit, expected in zip(digits, passkey, strict=False):
            if digit != expected:
                break
            num_correct += 1
        return {
            "exact_match": float(digits == passkey),
            "correct_prefix": num_correct / len(passkey),
        }


def _haystack(
    pieces: Pieces, key: tuple[object, ...], passkey: str, num_tokens: int
) -> tuple[int, ...]:
    """Token ids of filler lines and distractors of an exact length; the first line is cut."""
    lines = pieces.fitting(lines_with_decoys(draws(*key), passkey), num_tokens)
    padding = filler_lines(draws(*key, "padding"))
    return pieces.filled(lines, padding, num_tokens)


def lines_with_decoys(draw: random.Random, passkey: str) -> Iterator[str]:
    """An endless iterator over filler lines and distractors; no distractor contains the passkey."""
    while True:
        if draw.random() >= DISTRACTOR_RATE:
            yield next(filler_lines(draw))
        else:
            line = pick(draw, DISTRACTORS)
            code = number(draw, _DIGITS)
            while code == passkey:
                code = number(draw, _DIGITS)
            yield line.format(code)
