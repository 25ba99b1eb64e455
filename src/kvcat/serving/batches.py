"""Answers to several questions on one document in one batch, each as if it were alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

from kvcat.cache import CompactCache
from kvcat.models import end_tokens, plain_generation, positions_of
from kvcat.serving.answers import Answer, AnswerStream, Sampling, TakeText
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
        model, tokenizer: those of the cache.
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
    rows = [_Row(question, tokenizer, model) for question in questions]
    most = max(question.sampling.max_new_tokens for question in questions)
    with plain_generation(model, max_new_tokens=most) as config:
        model.generate(  # type: ignore[operator]
            **cache.inputs(model, ids, mask),
            generation_config=config,
            streamer=_BatchStream(rows),
            logits_processor=LogitsProcessorList([_Draws(rows)]),
            stopping_criteria=StoppingCriteriaList([_Endings(rows)]),
        )


class _Row:
    """One question of a batch while its answer grows."""

    def __init__(
        self, question: BatchQuestion, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
    ) -> None:
        self.is_done = False
        self._question = question
        self._ends = end_tokens(model)
        self._stream = AnswerStream(tokenizer, question.sampling.stop, question.on_text)
        self._generator = torch.Generator(model.device).manual_seed(question.sampling.seed)

    def chosen(self, logits: Float[Tensor, " vocab"]) -> Float[Tensor, " vocab"]:
        """Logits whose largest is that of the token drawn; greedy rows keep theirs."""
        sampling = self._question.sampling
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
        self._stream.take(token)
        is_complete = self._stream.is_stopped or token in self._ends
        is_full = len(self._stream.ids) >= self._question.sampling.max_new_tokens
        is_cancelled = self._question.is_cancelled()
        if not (is_complete or is_full or is_cancelled):
            return
        self.is_done = True
        self._stream.close()
        is_complete = is_complete or self._stream.is_stopped
        reason = "cancelled" if is_cancelled else "stop" if is_complete else "length"
        self._question.on_answer(Answer(self._stream.text, self._stream.ids, reason))


class _BatchStream(BaseStreamer):
    """Passes each row its tokens."""

    def __init__(self, rows: list[_Row]) -> None:
        self._rows = rows
        self._has_prompt = False

    def put(self, value: Tensor) -> None:
        """Take one token per row; the first call brings the questions, which are left out."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        for row, token in zip(self._rows, value.flatten().tolist(), strict=True):
            if not row.is_done:
                row.take(token)

    def end(self) -> None:
        """Nothing: a row ends by itself."""


class _Draws(LogitsProcessor):
    """Lets every row draw its token with its own sampling and seed."""

    def __init__(self, rows: list[_Row]) -> None:
        self._rows = rows

    def __call__(
        self,
        input_ids: Int[Tensor, "batch tokens"],  # noqa: ARG002
        scores: Float[Tensor, "batch vocab"],
    ) -> Float[Tensor, "batch vocab"]:
        """The logits of ``_Row.chosen`` of every row."""
        chosen = [row.chosen(logits) for row, logits in zip(self._rows, scores, strict=True)]
        return torch.stack(chosen)


class _Endings(StoppingCriteria):
    """Ends every row when its answer is complete."""

    def __init__(self, rows: list[_Row]) -> None:
        self._rows = rows

    def __call__(
        self,
        input_ids: Int[Tensor, "batch tokens"],
        scores: Any,  # noqa: ARG002
        **_: Any,
    ) -> Any:
        """Per row, whether it ends."""
        return torch.tensor([row.is_done for row in self._rows], device=input_ids.device)
