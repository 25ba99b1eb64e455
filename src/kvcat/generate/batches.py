"""Answers to one question, or to several on one document in one batch, each as if it were alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from kvcat.cache import CompactCache
from kvcat.errors import InputError
from kvcat.generate.answers import Answer, AnswerStream, TakeText
from kvcat.generate.loop import Row, generate
from kvcat.generate.settings import end_tokens
from kvcat.models import positions_of
from kvcat.settings import Sampling
from kvcat.types import Float, Int, Tensor

BATCH_ROWS = 8
"""Most questions in a batch."""


@dataclass(frozen=True)
class BatchQuestion:
    """A question in a batch.

    Args:
        ids: its tokens, after the document.
        sampling: how to decode; ``max_new_tokens`` must fit the model (``answer_length``).
        on_text: called with each new piece of text.
        on_answer: called once, when the answer is complete.
        is_cancelled: ends the answer when it becomes true.
    """

    ids: Sequence[int]
    sampling: Sampling
    on_text: TakeText
    on_answer: Callable[[Answer], None]
    is_cancelled: Callable[[], bool]


def batch_size(
    model: PreTrainedModel, cache: CompactCache, questions: Sequence[BatchQuestion]
) -> int:
    """How many of the first questions fit in one batch, at least 1.

    Until the longest answer ends, all rows move on together, and none may pass the model's last
    position, or the sliding window of a compacted layer. Layers with a state, and rotary factors
    that depend on the length, have batches of 1.
    """
    if cache.states or cache.rotary_factors(model) is not None:
        return 1
    longest_text = cache.longest_text(model)  # of a row with its padding
    num_positions = positions_of(model.config)
    if longest_text is not None:
        num_positions = min(num_positions, longest_text)
    num_left = num_positions - cache.num_tokens
    longest_question = 0
    longest_answer = 0
    for number, question in enumerate(questions[:BATCH_ROWS]):
        longest_question = max(longest_question, len(question.ids))
        longest_answer = max(longest_answer, question.sampling.max_new_tokens)
        if number > 0 and longest_question + longest_answer > num_left:
            return number
    return min(BATCH_ROWS, len(questions))


def answer_batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: CompactCache,
    questions: Sequence[BatchQuestion],
) -> None:
    """Answer all questions; ``on_answer`` of each is called as soon as its answer is complete.

    Questions are padded on the left to the longest. Every row has its own sampling: its draws
    depend on its seed and its logits alone. Of the model's generation settings only the end-of-text
    tokens count.

    Args:
        cache: of the document, of one example.
        questions: at most ``batch_size`` of them.
    """
    device = model.device
    longest = max(len(question.ids) for question in questions)
    ids = torch.zeros(len(questions), longest, dtype=torch.long, device=device)
    mask = torch.zeros_like(ids)
    for row, question in enumerate(questions):
        start = longest - len(question.ids)
        ids[row, start:] = torch.tensor(question.ids, device=device)
        mask[row, start:] = 1
    rows = [
        AnswerRow(
            model,
            AnswerStream(tokenizer, question.sampling.stop, question.on_text),
            question.sampling,
            question.is_cancelled,
            question.on_answer,
        )
        for question in questions
    ]
    generate(model, cache.inputs(model, ids, mask), rows)


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: Mapping[str, Any],
    sampling: Sampling,
    *,
    on_text: TakeText | None = None,
) -> Answer:
    """The answer to one question after a compact cache.

    Args:
        inputs: keyword arguments of ``model.generate``, as from ``CompactCache.inputs``; one row.
        sampling: how to decode; ``max_new_tokens`` must fit the model (``answer_length``).
        on_text: called with each new piece of text; joined they are the answer's text.

    Raises:
        InputError: as ``stop_tokens``.
    """
    answers: list[Answer] = []
    stream = AnswerStream(tokenizer, sampling.stop, on_text)
    row = AnswerRow(model, stream, sampling, lambda: False, answers.append)
    generate(model, inputs, [row])
    return answers[0]


def answer_length(
    model: PreTrainedModel,
    cache: CompactCache,
    question: Int[Tensor, "batch tokens"],
    max_new_tokens: int,
) -> int:
    """The largest number of tokens in an answer: ``max_new_tokens``, or the positions left.

    Args:
        model: model of the cache.
        question: token ids after the document, of shape (1, tokens).
        max_new_tokens: largest number of tokens that the user wants.

    Raises:
        InputError: no position is left, or the text would be longer than the cache allows.
    """
    num_positions = positions_of(model.config)
    question_len = question.shape[1]
    num_read = cache.num_tokens + question_len
    if num_read >= num_positions:
        raise InputError(
            f"no position is left for an answer: the document's {cache.num_tokens} tokens and the "
            f"prompt's {question_len} fill the model's {num_positions}"
        )
    cache.check_tokens(model, question)
    longest_text = cache.longest_text(model)
    length = num_read + max_new_tokens
    if longest_text is not None and length > longest_text:
        raise InputError(
            f"document, prompt and answer of {length} tokens exceed the {longest_text} for which "
            "the cache was made (its rotary factors, or a sliding window): compress with --room "
            f"{length - cache.num_tokens}, or give a smaller --max-new-tokens"
        )
    return min(max_new_tokens, num_positions - num_read)


class AnswerRow(Row):
    """The answer to one question while it grows; its draws depend on its seed alone.

    Args:
        model: of the answer.
        stream: takes its tokens.
        sampling: how to decode; ``max_new_tokens`` must fit the model (``answer_length``).
        is_cancelled: ends the answer when it becomes true.
        on_answer: called once, when the answer is complete.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stream: AnswerStream,
        sampling: Sampling,
        is_cancelled: Callable[[], bool],
        on_answer: Callable[[Answer], None],
    ) -> None:
        super().__init__(end_tokens(model), sampling.max_new_tokens)
        self._stream = stream
        self._sampling = sampling
        self._is_cancelled = is_cancelled
        self._on_answer = on_answer
        self._generator = torch.Generator(model.device).manual_seed(int(sampling.seed))

    def chosen(self, logits: Float[Tensor, " vocab"]) -> Float[Tensor, " vocab"]:
        """Logits whose largest is that of the token drawn; greedy rows keep theirs."""
        sampling = self._sampling
        if self.is_done or sampling.temperature == 0:
            return logits
        scores: Any = logits.float().unsqueeze(0)
        no_ids: Any = None  # the warpers do not read them
        scores = TemperatureLogitsWarper(float(sampling.temperature))(no_ids, scores)
        scores = TopPLogitsWarper(float(sampling.top_p))(no_ids, scores)
        token = torch.multinomial(scores.softmax(-1)[0], 1, generator=self._generator)
        only = torch.full_like(logits, -torch.inf)
        only[token] = 0.0
        return only

    def take(self, token: int) -> None:
        """Take the next token, and complete the answer if it ends here."""
        super().take(token)
        if token not in self._ends:  # which are no text, special tokens of the tokenizer or not
            self._stream.take(token)
        is_cancelled = self._is_cancelled()
        self.is_done = self.is_done or self._stream.is_stopped or is_cancelled
        if not self.is_done:
            return
        self._stream.close()
        is_complete = self._stream.is_stopped or token in self._ends
        reason = "cancelled" if is_cancelled else "stop" if is_complete else "length"
        self._on_answer(Answer(self._stream.text, self.ids, reason))
