"""Question answering without compression: eight multiple-choice tasks as cloze, zero-shot."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcat.cache import CompactCache
from kvcat.compress import Trace
from kvcat.errors import InputError
from kvcat.evals.qa_rows import QA_SOURCES, QAExample, read_examples, sample_examples
from kvcat.evals.qa_scoring import encode_continuations, log_likelihoods, max_positions
from kvcat.evals.records import Record
from kvcat.evals.running import manifest
from kvcat.evals.task import Baseline, Values

SIX = ("hellaswag", "winogrande", "piqa", "openbookqa", "arc_easy", "arc_challenge")
AVERAGES: dict[str, tuple[str, ...]] = {
    "six": SIX,
    "seven": (*SIX, "social_i_qa"),
    "eight": (*SIX, "social_i_qa", "commonsense_qa"),
}


@dataclass(frozen=True)
class QABatch:
    """Questions on one model; there is nothing to compress.

    Args:
        model: that answers.
        tokenizer: of the model.
        batch: the questions.
        tokens_at_once: see ``log_likelihoods``.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    batch: Sequence[QAExample]
    tokens_at_once: int

    @property
    def trace(self) -> Trace:
        """None: it raises InputError."""
        _refuse()

    def score(self, cache: CompactCache) -> list[Values]:  # noqa: ARG002
        """None: it raises InputError."""
        _refuse()

    def baseline(self, baseline: Baseline) -> list[Values]:
        """Whether each question is answered right, 0 or 1, when the choice of the highest score is the answer.

        The scores are the log-likelihood (``acc``), that per character of the text (``acc_per_char``, the headline) and
        that per token (``acc_per_token``); of equal ones the first choice is taken. Beside them ``nll_per_char`` of the
        right choice, nats, and ``truncated``, 1 where a choice with its context is longer than the model's positions.

        Args:
            baseline: ``dense``.

        Raises:
            InputError: another baseline, or what ``QATask.check`` tells.
        """
        if baseline.name != "dense":
            raise InputError(f"qa has no baseline {baseline.name!r}, only 'dense'")
        pairs = [pair for example in self.batch for pair in zip(example.contexts, example.texts, strict=True)]
        continuations = encode_continuations(self.tokenizer, pairs)
        scores = log_likelihoods(self.model, continuations, tokens_at_once=self.tokens_at_once)
        positions = max_positions(self.model)
        values, start = [], 0
        for example in self.batch:
            stop = start + len(example.texts)
            own = continuations[start:stop]
            tokens = [each.num_scored for each in own]
            truncated = float(positions is not None and any(len(each.tokens) - 1 > positions for each in own))
            values.append({**choice_values(example, scores[start:stop], tokens), "truncated": truncated})
            start = stop
        return values


@dataclass(frozen=True)
class QATask:
    """Multiple-choice questions, scored on the dense model only.

    Args:
        examples: of any tasks, in the order of evaluation.
        dataset: name of the data set in the records.
        tokens_at_once: bounds the memory, see ``log_likelihoods``; results do not depend on it.
    """

    examples: tuple[QAExample, ...]
    dataset: str = "cloze"
    tokens_at_once: int = 8192
    evaluation: str = "qa"
    tokenized: bool = False
    baselines: tuple[Baseline, ...] = (Baseline("dense", 1.0),)

    def describe(self) -> Mapping[str, Any]:
        """Number of questions per task, and a hash of everything that is asked."""
        counts = Counter(example.stratum for example in self.examples)
        return {"tasks": dict(sorted(counts.items())), "manifest": manifest(self.examples)}

    def batch_key(self, example: QAExample) -> Hashable:  # noqa: ARG002
        """Any two questions may share a batch."""
        return ""

    def check(self, label: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Raises InputError: no tokenizer, tokens beyond the vocabulary, a choice without a token."""
        if tokenizer is None:
            raise InputError(f"qa needs the tokenizer of model {label!r}")
        vocabulary = model.config.get_text_config().vocab_size
        for example in self.examples:
            try:
                pairs = list(zip(example.contexts, example.texts, strict=True))
                encoded = encode_continuations(tokenizer, pairs)
            except InputError as error:
                raise InputError(f"model {label!r}, {example.stratum} {example.name}: {error}") from None
            largest = max(max(continuation.tokens) for continuation in encoded)
            if largest >= vocabulary:
                raise InputError(f"token {largest} is outside the vocabulary of model {label!r}, {vocabulary} tokens")

    def prepare(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, batch: Sequence[QAExample]
    ) -> QABatch:
        """The questions on a model.

        Raises:
            InputError: no tokenizer.
        """
        if tokenizer is None:
            raise InputError("qa needs the model's tokenizer")
        return QABatch(model, tokenizer, batch, self.tokens_at_once)


def qa_task(
    files: Mapping[str, Path | None] | None = None,
    *,
    num_examples: int = 1000,
    seed: int = 0,
    winogrande: str = "partial",
    dataset: str = "cloze",
) -> QATask:
    """The same sample of every task for everybody, a function of the seed and the rows' names only.

    The tasks take turns, so that the first n questions are a fair sample of them for every n.

    Args:
        files: task to JSON lines file, or to None for the Hub; None takes all tasks from the Hub.
        num_examples: of each task, at least 1; a task with fewer (OpenBookQA has 500) gives all.
        seed: of the draw.
        winogrande: see ``kvcat.evals.qa_rows``.
        dataset: name of the data set in the records.

    Raises:
        InputError: as ``read_examples``; no task at all.
    """
    files = dict.fromkeys(QA_SOURCES) if files is None else files
    if not files:
        raise InputError("no QA task given")
    order = [*(task for task in QA_SOURCES if task in files), *(task for task in files if task not in QA_SOURCES)]
    drawn = [
        sample_examples(read_examples(task, files[task], winogrande=winogrande), num_examples, seed) for task in order
    ]
    turns = [of_task[turn] for turn in range(max(map(len, drawn))) for of_task in drawn if turn < len(of_task)]
    return QATask(tuple(turns), dataset)


def choice_values(example: QAExample, scores: Sequence[float], num_tokens: Sequence[int]) -> Values:
    """What a question's log-likelihoods make of it, see ``QABatch.baseline``.

    Args:
        example: the question.
        scores: log-likelihood of each choice, nats.
        num_tokens: tokens of each choice.
    """
    total = np.array(scores)
    per_char = total / [len(text) for text in example.texts]
    rankings = {"acc": total, "acc_per_char": per_char, "acc_per_token": total / np.array(num_tokens)}
    right = {name: float(ranking.argmax() == example.gold) for name, ranking in rankings.items()}
    return {**right, "nll_per_char": -float(per_char[example.gold])}


def task_accuracies(records: Iterable[Record], value: str = "acc_per_char") -> dict[str, float]:
    """Mean of a value over each task's questions.

    Args:
        records: of one model.
        value: key of the records' values.

    Raises:
        InputError: records of two models.
    """
    found: dict[str, list[float]] = defaultdict(list)
    models: set[tuple[str, str, str]] = set()
    for record in records:
        models.add((record.model, record.fingerprint, record.dtype))
        found[record.stratum].append(record.values[value])
    if len(models) > 1:
        raise InputError(f"records of two models: {', '.join(sorted(model for model, _, _ in models))}")
    return {task: float(np.mean(values)) for task, values in found.items()}


def averages(accuracies: Mapping[str, float]) -> dict[str, float]:
    """Unweighted means over the tasks of ``AVERAGES``; those without all their tasks are left out.

    ``six`` is the paper's table, ``seven`` adds Social IQa, ``eight`` CommonsenseQA.

    Args:
        accuracies: task to accuracy.
    """
    return {
        name: float(np.mean([accuracies[task] for task in tasks]))
        for name, tasks in AVERAGES.items()
        if all(task in accuracies for task in tasks)
    }


def _refuse() -> NoReturn:
    raise InputError("qa is evaluated without compression")
