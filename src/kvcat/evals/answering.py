"""Questions about a context that is compressed: greedy answers, and how likely the right answer is."""

import hashlib
import json
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from kvcat.cache import CompactCache
from kvcat.compress import Trace, trace
from kvcat.compress.base import wide
from kvcat.compress.compare import replay_hidden
from kvcat.compress.documents import INSTRUCTION, opening_ids, reconstruction_of_tokens
from kvcat.errors import InputError
from kvcat.evals.task import Baseline, Values
from kvcat.models import frozen, hidden_states, logits_from_hidden
from kvcat.types import Float, Tensor

SUPERVISIONS = ("reconstruction", "self")
BASELINES = (Baseline("dense", 1.0), Baseline("no-context", 0.0))

Judge = Callable[[str, Sequence[str]], Values]
"""Values of a decoded answer, given the references: 1 is right, 0 wrong."""


@dataclass(frozen=True)
class Question:
    """A context, a question about it, and its answer, as the tokens of one tokenizer.

    Args:
        document: name of the context.
        name: of the question, unique in the document.
        stratum: group that is reported apart.
        context: token ids of what is compressed, with what the tokenizer puts at the start of a text.
        question: token ids after it, at least one.
        answer: token ids of the right answer, at least one.
        references: texts that the answer is judged by.
        max_new_tokens: most tokens of a greedy answer, at least 1.
    """

    document: str
    name: str
    stratum: str
    context: tuple[int, ...]
    question: tuple[int, ...]
    answer: tuple[int, ...]
    references: tuple[str, ...]
    max_new_tokens: int


class QuestionTask:
    """What tasks of questions on contexts have in common; a task is a dataclass with the attributes below.

    Attributes:
        examples: the questions.
        options: hold ``supervision``, one of ``SUPERVISIONS``.
        words: ``vocabulary`` of the tokenizer that made the examples.
    """

    examples: tuple[Question, ...]
    options: Any
    words: str

    @property
    def tokenized(self) -> bool:
        """Contexts are token ids."""
        return True

    @property
    def baselines(self) -> tuple[Baseline, ...]:
        """Dense, and without the context."""
        return BASELINES

    def judge(self, answer: str, references: Sequence[str]) -> Values:
        """Values of a decoded answer."""
        raise NotImplementedError

    def batch_key(self, example: Question) -> Hashable:
        """Contexts of equal length may share a batch."""
        return len(example.context)

    def check(self, label: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Raises InputError where the model has other tokens, or too few positions."""
        check_questions(label, model, tokenizer, self.examples, self.options.supervision, self.words)

    def prepare(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: Sequence[Question]
    ) -> "PreparedQuestions":
        """The batch on a model."""
        return PreparedQuestions(model, tokenizer, batch, self.options.supervision, self.judge)


@dataclass(frozen=True)
class PreparedQuestions:
    """Questions with contexts of equal length, on a model.

    Every value of the judge comes twice: on the compact cache, and with the prefix ``dense_`` on the whole cache.
    Beside them, nats per token of the right answer under teacher forcing: ``nll``, ``nll_dense``, ``delta_nll`` =
    nll - nll_dense, ``nll_none`` without the context, ``context_gain`` = nll_none - nll_dense.

    Args:
        model: that answers.
        tokenizer: its tokenizer.
        batch: the questions.
        supervision: "reconstruction": compressors are fitted to <context><instruction><context>; "self": to the
            queries of the context itself, which takes half the positions.
        judge: of the greedy answers.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    batch: Sequence[Question]
    supervision: str
    judge: Judge

    @property
    def trace(self) -> Trace:
        """What compressors are fitted to, one row per question."""
        return self._traced

    @cached_property
    def _traced(self) -> Trace:
        contexts = torch.tensor([example.context for example in self.batch], device=self.model.device)
        if self.supervision == "self":
            return trace(self.model, contexts, supervision="self")
        return trace(self.model, reconstruction_of_tokens(self.tokenizer, contexts))

    def score(self, cache: CompactCache) -> list[Values]:
        """Values per question when the compact cache stands for the contexts.

        Args:
            cache: of this trace.
        """
        return self._beside_dense(self._judged(cache), self._nll(cache))

    def baseline(self, baseline: Baseline) -> list[Values]:
        """Values per question on the whole cache ("dense") or without the context ("no-context").

        Args:
            baseline: one of ``BASELINES``.
        """
        judged, nll = self._dense if baseline.name == "dense" else (self._judged(None), self._nll_none)
        return self._beside_dense(judged, nll)

    @cached_property
    def _dense(self) -> tuple[list[Values], list[float]]:
        cache = self.trace.dense_cache()
        return self._judged(cache), self._nll(cache)

    @cached_property
    def _nll_none(self) -> list[float]:
        return self._nll(None)

    def _judged(self, cache: CompactCache | None) -> list[Values]:
        longest = max(example.max_new_tokens for example in self.batch)
        found = greedy_answers(self.model, cache, self._questions(cache), longest)
        texts = [
            self.tokenizer.decode(tokens[: example.max_new_tokens], skip_special_tokens=True)
            for tokens, example in zip(found, self.batch, strict=True)
        ]
        return [self.judge(str(text), example.references) for text, example in zip(texts, self.batch, strict=True)]

    def _nll(self, cache: CompactCache | None) -> list[float]:
        answers = [example.answer for example in self.batch]
        return answer_nll(self.model, cache, self._questions(cache), answers).double().tolist()

    def _questions(self, cache: CompactCache | None) -> list[tuple[int, ...]]:
        """Without a context the question is the start of the text."""
        opening = opening_ids(self.tokenizer) if cache is None else ()
        return [(*opening, *example.question) for example in self.batch]

    def _beside_dense(self, judged: Sequence[Values], nll: Sequence[float]) -> list[Values]:
        dense, nll_dense = self._dense
        return [
            {
                **judged[row],
                **{f"dense_{name}": value for name, value in dense[row].items()},
                "nll": nll[row],
                "nll_dense": nll_dense[row],
                "delta_nll": nll[row] - nll_dense[row],
                "nll_none": self._nll_none[row],
                "context_gain": self._nll_none[row] - nll_dense[row],
            }
            for row in range(len(self.batch))
        ]


def greedy_answers(
    model: PreTrainedModel, cache: CompactCache | None, questions: Sequence[Sequence[int]], max_new_tokens: int
) -> list[list[int]]:
    """The most likely next tokens after each question, one at a time, before an end-of-text token.

    Shorter questions are padded on the left, so that each is answered as it would be alone. Penalties, sampling and
    the like of the model's own generation settings are not used.

    Args:
        model: that answers.
        cache: stands for the contexts; None: there are none.
        questions: token ids, at least one each.
        max_new_tokens: most tokens of an answer, at least 1.
    """
    width = max(map(len, questions))
    ids = torch.tensor([[0] * (width - len(q)) + list(q) for q in questions], device=model.device)
    mask = torch.tensor([[0] * (width - len(q)) + [1] * len(q) for q in questions], device=model.device)
    inputs = {"input_ids": ids, "attention_mask": mask} if cache is None else cache.inputs(model, ids, mask)
    with frozen(model), _plain_generation(model) as ends:
        found = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)  # type: ignore[operator]
    return [_before(row, ends) for row in found[:, width:].tolist()]


@torch.no_grad()
def answer_nll(
    model: PreTrainedModel,
    cache: CompactCache | None,
    questions: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
) -> Float[Tensor, " batch"]:
    """-(1/n) sum_t log p(a_t | context, question, a_<t) of each answer a of n tokens, nats per token.

    Args:
        model: that answers.
        cache: stands for the contexts; None: there are none.
        questions: token ids, at least one each.
        answers: token ids, at least one each.
    """
    rows = [[*question, *answer] for question, answer in zip(questions, answers, strict=True)]
    width = max(map(len, rows))
    ids = torch.tensor(
        [row + [0] * (width - len(row)) for row in rows], device=model.device
    )  # later ones change nothing
    if cache is None:
        with frozen(model):
            hidden = hidden_states(model, input_ids=ids, use_cache=False)
    else:
        hidden = replay_hidden(model, cache, ids)
    losses = []
    for row, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        asked = slice(len(question) - 1, len(question) - 1 + len(answer))
        log_probs = wide(logits_from_hidden(model, hidden[row, asked])).log_softmax(-1)
        losses.append(-log_probs.gather(-1, torch.tensor(answer, device=ids.device)[:, None]).mean())
    return torch.stack(losses)


def answer_ids(
    tokenizer: PreTrainedTokenizerBase, question: str, answer: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids of a question and of the answer that goes on from it.

    The answer's are those it has behind the question, or where a token would span the two, those it has alone.

    Args:
        tokenizer: of the model.
        question: text with a token.
        answer: text with a token.

    Raises:
        InputError: the tokenizer does not give the answer's text back.
    """
    asked = tokenizer.encode(question, add_special_tokens=False, verbose=False)
    both = tokenizer.encode(question + answer, add_special_tokens=False, verbose=False)
    told = both[len(asked) :] if both[: len(asked)] == asked else tokenizer.encode(answer, add_special_tokens=False)
    if str(tokenizer.decode(told)).strip() != answer.strip():
        raise InputError(f"the tokenizer {tokenizer.name_or_path!r} cannot spell the answer {answer.strip()!r}")
    return tuple(asked), tuple(told)


def vocabulary(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of the tokenizer's tokens and their ids."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def check_supervision(supervision: str) -> None:
    """Refuses what is not one of ``SUPERVISIONS``.

    Raises:
        InputError: with the word.
    """
    if supervision not in SUPERVISIONS:
        raise InputError(f"supervision must be {' or '.join(map(repr, SUPERVISIONS))}, not {supervision!r}")


def check_questions(
    label: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    questions: Sequence[Question],
    supervision: str,
    words: str,
) -> None:
    """Refuses a model that cannot run these questions.

    Args:
        label: name of the model.
        model: the model.
        tokenizer: its tokenizer.
        questions: at least one.
        supervision: one of ``SUPERVISIONS``.
        words: ``vocabulary`` of the tokenizer that the questions were made with.

    Raises:
        InputError: no tokenizer or another one, a token outside the vocabulary, more tokens than positions.
    """
    if tokenizer is None or vocabulary(tokenizer) != words:
        told = "none" if tokenizer is None else "another one"
        raise InputError(f"the examples were made with a tokenizer, model {label!r} has {told}: their tokens differ")
    text = model.config.get_text_config(decoder=True)
    largest = max(max(*q.context, *q.question, *q.answer) for q in questions)
    if largest >= text.vocab_size:
        raise InputError(f"token {largest} is outside the vocabulary of model {label!r}, {text.vocab_size} tokens")
    positions = getattr(text, "max_position_embeddings", None)
    length = max(len(q.context) for q in questions)
    asked = max(len(q.context) + len(q.question) + max(len(q.answer), q.max_new_tokens) for q in questions)
    if positions is not None and asked > positions:
        raise InputError(
            f"{length} tokens with question and answer are {asked}, more than the {positions} positions of model "
            f"{label!r}"
        )
    middle = len(tokenizer.encode(INSTRUCTION, add_special_tokens=False))
    total = 2 * length - len(opening_ids(tokenizer)) + middle
    if supervision == "reconstruction" and positions is not None and total > positions:
        raise InputError(
            f"{length} tokens make a reconstruction sequence of {total}, more than the {positions} positions of model "
            f"{label!r}: supervision 'self' needs only the first copy"
        )


@contextmanager
def _plain_generation(model: PreTrainedModel) -> Iterator[list[int]]:
    """No settings of generation but the end-of-text tokens, which are given out."""
    own = model.generation_config
    told = own.eos_token_id  # type: ignore[union-attr]
    ends = [] if told is None else [told] if isinstance(told, int) else list(told)
    try:
        model.generation_config = GenerationConfig(eos_token_id=ends or None, pad_token_id=ends[0] if ends else 0)
        yield ends
    finally:
        model.generation_config = own


def _before(tokens: Sequence[int], ends: Sequence[int]) -> list[int]:
    return list(tokens[: next((i for i, token in enumerate(tokens) if token in ends), len(tokens))])
