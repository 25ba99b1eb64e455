"""Questions about a compressed context: greedy answers and the likelihood of right answers.

An evaluation's file imports this module, so it does without torch until a batch is scored.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from kvcat.errors import InputError
from kvcat.evals.task import Baseline, Prepared, Task, Values, check_fits, check_vocabulary
from kvcat.text.encoder import TextEncoder, opening_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvcat.cache import CompactCache
    from kvcat.compress import Trace


@dataclass(frozen=True)
class Question:
    """A context, a question about it, and its answer, as the tokens of one tokenizer."""

    document: str  # name of the context
    name: str  # name of the question, unique in the document
    stratum: str  # group that is also reported separately
    context: tuple[int, ...]  # compressed; begins with the tokens that start a text
    question: tuple[int, ...]  # at least one token
    answer: tuple[int, ...]  # the right answer, at least one token
    references: tuple[str, ...]  # right answers, to which the model's answer is compared
    max_new_tokens: int  # largest length of a greedy answer, at least 1


@dataclass(frozen=True)
class PreparedContexts(Prepared):
    """Contexts of equal length on a model, compressed before the model reads the text after them.

    A subclass defines ``values``.
    """

    @cached_property
    def trace(self) -> "Trace":  # pyright: ignore[reportIncompatibleVariableOverride]
        """The dense forward over <context><instruction><context>, one row per example."""
        import torch

        from kvcat.compress import trace
        from kvcat.compress.documents import reconstruction_of_tokens

        contexts = torch.tensor(
            [example.context for example in self.batch], device=self.model.device
        )
        opening = self.task.opening_ids(self.tokenizer)
        sequence = reconstruction_of_tokens(self.tokenizer, contexts, opening)
        return trace(self.model, sequence, room=self.room)

    @property
    def room(self) -> int:
        """The largest number of tokens that follow a context."""
        raise NotImplementedError

    def values(self, cache: "CompactCache | None") -> list[Values]:
        """Values for each example, with the cache in place of the contexts; None: no context."""
        raise NotImplementedError

    def score(self, cache: "CompactCache") -> list[Values]:
        """``values`` on the compact cache and, with the prefix ``dense_``, on the whole cache."""
        return self.with_dense(self.values(cache))

    def baseline(self, baseline: Baseline) -> list[Values]:
        """Values for each example with the whole context, or with none."""
        values = self._dense if baseline.name == "dense" else self._without_context
        return self.with_dense(values)

    def with_dense(self, values: list[Values]) -> list[Values]:
        """The given values and, with the prefix ``dense_``, the values on the whole cache."""
        joined = []
        for example_values, dense_values in zip(values, self._dense, strict=True):
            row = dict(example_values)
            for name, value in dense_values.items():
                row[f"dense_{name}"] = value
            joined.append(row)
        return joined

    @cached_property
    def _dense(self) -> list[Values]:
        """Values for each example on the whole cache."""
        return self.values(self.trace.dense_cache())

    @cached_property
    def _without_context(self) -> list[Values]:
        """Values for each example without its context."""
        return self.values(None)


@dataclass(frozen=True)
class PreparedQuestions(PreparedContexts):
    """Questions that are answered greedily and scored under teacher forcing."""

    @property
    def room(self) -> int:
        """The number of tokens in the longest question with its answer."""
        return max(len(q.question) + max(len(q.answer), q.max_new_tokens) for q in self.batch)

    def values(self, cache: "CompactCache | None") -> list[Values]:
        """``judge`` on the greedy answer, and ``nll`` of the right answer, in nats per token."""
        from kvcat.evals.answers import greedy_answers, token_nll

        opening: Sequence[int] = ()
        if cache is None:  # the question starts the text
            opening = self.task.opening_ids(self.tokenizer)
        questions = [(*opening, *example.question) for example in self.batch]
        limits = [example.max_new_tokens for example in self.batch]
        answers = greedy_answers(self.model, cache, questions, limits)
        right_answers = [example.answer for example in self.batch]
        nll = token_nll(self.model, cache, questions, right_answers)
        values = []
        for example, tokens, answer_nll in zip(self.batch, answers, nll, strict=True):
            text = str(self.tokenizer.decode(tokens, skip_special_tokens=True))
            judged = self.task.judge(text, example.references)
            values.append({**judged, "nll": float(answer_nll.mean())})
        return values

    def with_dense(self, values: list[Values]) -> list[Values]:
        """The given values, the dense ones, and the gain from the context."""
        rows = super().with_dense(values)
        for row, without in zip(rows, self._without_context, strict=True):
            row["nll_dense"] = row.pop("dense_nll")
            row["nll_none"] = without["nll"]
            row["delta_nll"] = row["nll"] - row["nll_dense"]
            row["context_gain"] = row["nll_none"] - row["nll_dense"]
        return rows


@dataclass(frozen=True)
class QuestionTask(Task):
    """Questions about compressed contexts; a subclass defines ``judge``, which scores answers.

    Compressors are fitted to <context><instruction><context>.

    The values are those of ``judge`` on the compact cache and, with the prefix ``dense_``, on the
    whole cache. Under teacher forcing, in nats per token of the right answer, there are also
    ``nll`` on the compact cache, ``nll_dense`` on the whole cache, ``delta_nll`` = nll - nll_dense,
    ``nll_none`` without the context, and ``context_gain`` = nll_none - nll_dense.
    """

    dataset: str
    examples: tuple[Question, ...]
    options: Mapping[str, Any]  # with which the examples were made
    vocabulary: str  # hash of the tokenizer's vocabulary
    # token ids at the start of every context; None: those that the tokenizer adds
    opening: tuple[int, ...] | None = None
    prepared: ClassVar[type[Prepared]] = PreparedQuestions

    @staticmethod
    def judge(answer: str, references: Sequence[str]) -> Values:
        """Scores of a decoded answer: 1 if it is right, 0 if it is wrong."""
        raise NotImplementedError

    def describe(self) -> Mapping[str, Any]:
        """The options with which the examples were made."""
        return self.options

    def opening_ids(self, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
        """The token ids at the start of every text."""
        return opening_ids(tokenizer) if self.opening is None else list(self.opening)

    def batch_key(self, example: Question) -> Hashable:
        """The length of the context: contexts of equal length may share a batch."""
        return len(example.context)

    def check(self, label: str, model: "PreTrainedModel", tokenizer: Any) -> None:
        """Raise an ``InputError`` if a model has another vocabulary or too few positions."""
        from kvcat.compress import INSTRUCTION

        check_vocabulary(label, tokenizer, self.vocabulary)
        num_instruction = len(TextEncoder(tokenizer).behind(INSTRUCTION))
        num_opening = len(self.opening_ids(tokenizer))
        for example in self.examples:
            num_answer = max(len(example.answer), example.max_new_tokens)
            check_fits(
                label,
                model,
                num_tokens=len(example.context) + len(example.question) + num_answer,
                largest=max(*example.context, *example.question, *example.answer),
                what="context, question and answer",
            )
            num_repeated = len(example.context) - num_opening  # the copy has no opening
            check_fits(
                label,
                model,
                num_tokens=len(example.context) + num_instruction + num_repeated,
                largest=0,
                what="reconstruction sequences",
            )


def answer_ids(
    tokenizer: "PreTrainedTokenizerBase", question: str, answer: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids of a question that follows a text, and of the answer that follows the question.

    If a token would span the question and the answer, the answer is encoded separately, as a text
    that follows another text.

    Raises:
        InputError: decoding the answer's tokens does not restore its text.
    """
    encoder = TextEncoder(tokenizer)
    question_ids = encoder.behind(question)
    both = encoder.behind(question + answer)
    is_between_tokens = both[: len(question_ids)] == question_ids
    ids = both[len(question_ids) :] if is_between_tokens else encoder.behind(answer)
    if str(tokenizer.decode(ids)).strip() != answer.strip():
        raise InputError(
            f"the tokenizer {tokenizer.name_or_path!r} cannot spell the answer {answer.strip()!r}"
        )
    return tuple(question_ids), tuple(ids)
