"""RULER's synthetic tasks that need no data, at any length, with the question asked after compression."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvcat.compress.documents import opening_ids
from kvcat.errors import InputError
from kvcat.evals.answering import (
    Question,
    QuestionTask,
    answer_ids,
    check_supervision,
    vocabulary,
)
from kvcat.evals.haystack import FILLER, Pieces, draws, filler_lines
from kvcat.evals.ruler_texts import RULER_TASKS, Room, RulerSizes
from kvcat.evals.running import manifest
from kvcat.evals.task import Values


@dataclass(frozen=True)
class RulerOptions:
    """What the examples of a RULER evaluation are.

    Args:
        length: tokens of what is compressed: the task's introduction and its text.
        tasks: names of ``RULER_TASKS``.
        per_task: examples per task, at least 1.
        sizes: how much is hidden in a text.
        seed: any integer.
        supervision: "reconstruction" fits compressors to <text><instruction><text>, which takes twice the positions;
            "self" to the queries of the text itself.

    Raises:
        InputError: an option out of its range, an unknown task.
    """

    length: int = 4096
    tasks: tuple[str, ...] = tuple(RULER_TASKS)
    per_task: int = 20
    sizes: RulerSizes = field(default_factory=RulerSizes)
    seed: int = 0
    supervision: str = "reconstruction"

    def __post_init__(self) -> None:
        for name in ("length", "per_task"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least 1")
        unknown = [task for task in self.tasks if task not in RULER_TASKS]
        if unknown:
            raise InputError(f"no RULER task {unknown[0]!r}; there are {', '.join(RULER_TASKS)}")
        if not self.tasks or len(set(self.tasks)) < len(self.tasks):
            raise InputError(f"tasks are {list(self.tasks)}; give at least one, and each once")
        check_supervision(self.supervision)


@dataclass(frozen=True)
class RulerTask(QuestionTask):
    """Questions on long synthetic texts that are compressed before they are asked; ``ruler_task`` makes it.

    Per example: ``string_match``, the share of the reference answers that the greedy answer contains, whatever their
    case (RULER's string_match_all); ``exact_match``, whether it contains them all; both also on the dense cache, with
    the prefix ``dense_``; and the NLL of all reference answers in a row (``PreparedQuestions``).

    Unlike RULER's own prompts, texts come without a solved example before them, words are invented, and an answer may
    have 16 tokens more than twice those of the right one.

    Args:
        dataset: name with the length.
        examples: task after task, so that the first n are spread over the tasks for every n.
        options: what they were made from.
        words: ``vocabulary`` of the tokenizer.

    References: Hsieh et al. 2024, arXiv:2404.06654.
    """

    dataset: str
    examples: tuple[Question, ...]
    options: RulerOptions
    words: str
    evaluation: str = "ruler"

    def describe(self) -> Mapping[str, Any]:
        """The options, and the hash of all examples with their tokens."""
        return {**asdict(self.options), "manifest": manifest(self.examples)}

    def judge(self, answer: str, references: Sequence[str]) -> Values:
        """``judge_strings``."""
        return judge_strings(answer, references)


def ruler_task(tokenizer: PreTrainedTokenizerBase, options: RulerOptions | None = None) -> RulerTask:
    """The examples of the options, in the tokens of a tokenizer.

    Every text is exactly ``length`` tokens: its lines stand whole, and what is left is filled with the end of a neutral
    line before them. An example's draws are a function of the seed, its task, the length and its number alone.

    Args:
        tokenizer: of the models to evaluate.
        options: None: all tasks at 4096 tokens.

    Raises:
        InputError: a text too short for what is to be hidden in it, a tokenizer that cannot spell the answers.
    """
    options = RulerOptions() if options is None else options
    pieces, opening = Pieces(tokenizer), tuple(opening_ids(tokenizer))
    examples = []
    for instance in range(options.per_task):
        for task in options.tasks:
            draw = draws(options.seed, task, options.length, instance)
            examples.append(_example(tokenizer, pieces, opening, draw, task, instance, options))
    return RulerTask(f"ruler-{options.length}", tuple(examples), options, vocabulary(tokenizer))


def _example(
    tokenizer: PreTrainedTokenizerBase,
    pieces: Pieces,
    opening: tuple[int, ...],
    draw: random.Random,
    task: str,
    instance: int,
    options: RulerOptions,
) -> Question:
    room = options.length - len(opening)
    told = RULER_TASKS[task](draw, Room(pieces, room, task), options.sizes)
    context = (*opening, *pieces.filled(told.lines, filler_lines(draw, FILLER), room))
    question, answer = answer_ids(tokenizer, told.question, " " + ", ".join(told.answers))
    return Question(f"{task}-{instance}", "0", task, context, question, answer, told.answers, 2 * len(answer) + 16)


def judge_strings(answer: str, references: Sequence[str]) -> Values:
    """``string_match`` and ``exact_match`` of an answer.

    Args:
        answer: decoded.
        references: the answers that it should contain.
    """
    found = sum(reference.lower() in answer.lower() for reference in references) / len(references)
    return {"string_match": found, "exact_match": float(found == 1.0)}
