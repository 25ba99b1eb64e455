"""Questions about a compressed context: greedy answers, and the likelihood of reference answers."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any, ClassVar

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcat.cache import CompactCache, check_token_ids
from kvcat.compress import Trace, trace
from kvcat.compress.compare import replay_hidden
from kvcat.compress.documents import INSTRUCTION, reconstruction_of_tokens
from kvcat.errors import InputError
from kvcat.evals.task import Baseline, Prepared, Task, Values, check_fits, check_vocabulary
from kvcat.losses import score_positions
from kvcat.models import end_tokens, frozen, hidden_states, output_head, plain_generation
from kvcat.tokenization import TextEncoder, opening_ids
from kvcat.types import Float, Tensor


@dataclass(frozen=True)
class Question:
    """A context, a question about it, and its answer, as the tokens of one tokenizer."""

    document: str  # name of the context
    name: str  # of the question, unique in the document
    stratum: str  # group that is reported apart
    context: tuple[int, ...]  # to be compressed, with the tokens that begin a text
    question: tuple[int, ...]  # at least one
    answer: tuple[int, ...]  # the right one, at least one
    references: tuple[str, ...]  # texts that the answer is judged by
    max_new_tokens: int  # of a greedy answer, at least 1


@dataclass(frozen=True)
class PreparedContexts(Prepared):
    """Contexts of equal length on a model; they are compressed before the text behind them is read.

    A subclass has ``values``.
    """

    @cached_property
    def trace(self) -> Trace:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The dense forward over <context><instruction><context>, one row per example."""
        contexts = torch.tensor(
            [example.context for example in self.batch], device=self.model.device
        )
        opening = self.task.opening_ids(self.tokenizer)
        sequence = reconstruction_of_tokens(self.tokenizer, contexts, opening)
        return trace(self.model, sequence, room=self.room)

    @property
    def room(self) -> int:
        """Tokens that follow the contexts at most."""
        raise NotImplementedError

    def values(self, cache: CompactCache | None) -> list[Values]:
        """Values per example with the cache in place of the contexts; None: no contexts."""
        raise NotImplementedError

    def score(self, cache: CompactCache) -> list[Values]:
        """``values``, and with the prefix ``dense_`` those on the whole cache."""
        return self.with_dense(self.values(cache))

    def baseline(self, baseline: Baseline) -> list[Values]:
        """The same with the whole context or without any."""
        values = self._dense if baseline.name == "dense" else self._without_context
        return self.with_dense(values)

    def with_dense(self, values: list[Values]) -> list[Values]:
        """The values of each example, and the same on the whole cache, named ``dense_...``."""
        joined = []
        for example_values, dense_values in zip(values, self._dense, strict=True):
            row = dict(example_values)
            for name, value in dense_values.items():
                row[f"dense_{name}"] = value
            joined.append(row)
        return joined

    @cached_property
    def _dense(self) -> list[Values]:
        """Values on the whole cache."""
        return self.values(self.trace.dense_cache())

    @cached_property
    def _without_context(self) -> list[Values]:
        """Values without the contexts."""
        return self.values(None)


@dataclass(frozen=True)
class PreparedQuestions(PreparedContexts):
    """Questions, answered greedily and under teacher forcing."""

    @property
    def room(self) -> int:
        """Tokens of the longest question with its answer."""
        return max(len(q.question) + max(len(q.answer), q.max_new_tokens) for q in self.batch)

    def values(self, cache: CompactCache | None) -> list[Values]:
        """``judge`` of the greedy answer, and ``nll`` of the right one, nats per token."""
        opening: Sequence[int] = ()
        if cache is None:  # then the question starts the text
            opening = self.task.opening_ids(self.tokenizer)
        questions = [(*opening, *example.question) for example in self.batch]
        max_new_tokens = max(example.max_new_tokens for example in self.batch)
        answers = greedy_answers(self.model, cache, questions, max_new_tokens)
        right_answers = [example.answer for example in self.batch]
        nll = token_nll(self.model, cache, questions, right_answers)
        values = []
        for example, tokens, answer_nll in zip(self.batch, answers, nll, strict=True):
            tokens = tokens[: example.max_new_tokens]
            text = str(self.tokenizer.decode(tokens, skip_special_tokens=True))
            judged = self.task.judge(text, example.references)
            values.append({**judged, "nll": float(answer_nll.mean())})
        return values

    def with_dense(self, values: list[Values]) -> list[Values]:
        """Values with the dense ones, and the gain of the context."""
        rows = super().with_dense(values)
        for row, without in zip(rows, self._without_context, strict=True):
            row["nll_dense"] = row.pop("dense_nll")
            row["nll_none"] = without["nll"]
            row["delta_nll"] = row["nll"] - row["nll_dense"]
            row["context_gain"] = row["nll_none"] - row["nll_dense"]
        return rows


@dataclass(frozen=True)
class QuestionTask(Task):
    """Questions about compressed contexts; a subclass has ``judge``, which gives values of answers.

    Compressors are fitted to <context><instruction><context>.

    Values are those of ``judge`` on the compact cache and, named ``dense_...``, on the whole one.
    Further, in nats per token of the right answer under teacher forcing: ``nll``, ``nll_dense``,
    ``delta_nll`` = nll - nll_dense, ``nll_none`` without the context, and ``context_gain`` =
    nll_none - nll_dense.
    """

    dataset: str
    examples: tuple[Question, ...]
    options: Mapping[str, Any]  # that the examples were made with, for the configuration
    vocabulary: str  # hash of the vocabulary of the tokenizer that made the examples
    # token ids that contexts begin with; None: those that the tokenizer puts there
    opening: tuple[int, ...] | None = None
    prepared: ClassVar[type[Prepared]] = PreparedQuestions

    @staticmethod
    def judge(answer: str, references: Sequence[str]) -> Values:
        """Values of a decoded answer; 1 is right, 0 is wrong."""
        raise NotImplementedError

    def describe(self) -> Mapping[str, Any]:
        """The options."""
        return self.options

    def opening_ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Token ids that a text begins with."""
        return opening_ids(tokenizer) if self.opening is None else list(self.opening)

    def batch_key(self, example: Question) -> Hashable:
        """Contexts of equal length may share a batch."""
        return len(example.context)

    def check(self, label: str, model: PreTrainedModel, tokenizer: Any) -> None:
        """Raise an ``InputError`` for a model with another vocabulary or too few positions."""
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


def greedy_answers(
    model: PreTrainedModel,
    cache: CompactCache | None,
    questions: Sequence[Sequence[int]],
    max_new_tokens: int,
) -> list[list[int]]:
    """The most likely next tokens after each question, one at a time, before an end-of-text token.

    Shorter questions are padded on the left; padding does not change an answer. Of the model's
    generation settings only the end-of-text tokens are used.

    Args:
        model: that answers.
        cache: in place of the contexts; None: there are none.
        questions: token ids.
        max_new_tokens: of an answer.
    """
    width = max(len(question) for question in questions)
    padded = []
    is_token = []
    for question in questions:
        num_padding = width - len(question)
        padded.append([0] * num_padding + list(question))
        is_token.append([0] * num_padding + [1] * len(question))
    ids = torch.tensor(padded, device=model.device)
    mask = torch.tensor(is_token, device=model.device)
    check_token_ids(model, ids)
    ends = end_tokens(model)
    with frozen(model), plain_generation(model, max_new_tokens=max_new_tokens) as settings:
        inputs: Any = {"input_ids": ids, "attention_mask": mask}
        if cache is not None:
            inputs = cache.inputs(model, ids, mask)
        generated = model.generate(**inputs, generation_config=settings)  # type: ignore[operator]
    answers = generated[:, width:].tolist()
    return [list(takewhile(lambda token: token not in ends, answer)) for answer in answers]


@torch.no_grad()
def token_nll(
    model: PreTrainedModel,
    cache: CompactCache | None,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
) -> list[Float[Tensor, " tokens"]]:
    """-log p(a_t | context, prompt, a_<t) of every token of each answer, nats.

    Prompt and answer, at least a token each, are joined as token ids: in one text an answer could
    merge with the end of the prompt ("(" and "A)" give "(A").

    Args:
        model: that scores.
        cache: in place of the contexts, one for each row or one for all; None: there are none.
        prompts: token ids.
        answers: token ids.
    """
    rows = []
    for prompt, answer in zip(prompts, answers, strict=True):
        rows.append(torch.tensor([*prompt, *answer]))
    # padding is behind everything that is scored in its row
    ids = pad_sequence(rows, batch_first=True).to(model.device)
    check_token_ids(model, ids)
    if cache is None:
        with frozen(model):
            hidden = hidden_states(model, input_ids=ids, use_cache=False)
    else:
        hidden = replay_hidden(model, cache, ids)
    before = []  # hidden states at the positions that predict the answers
    targets = []
    for row, (prompt, tokens) in enumerate(zip(prompts, rows, strict=True)):
        start = len(prompt)
        stop = len(tokens)
        before.append(hidden[row, start - 1 : stop - 1])
        targets.append(ids[row, start:stop])
    scores = score_positions(output_head(model), torch.cat(before), torch.cat(targets))
    nll = scores.nll.double().cpu()
    return list(nll.split([len(answer) for answer in answers]))


def answer_ids(
    tokenizer: PreTrainedTokenizerBase, question: str, answer: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids of a question behind a text, and of the answer behind the question.

    If a token would span question and answer, the answer is encoded as behind other text.

    Raises:
        InputError: the tokenizer does not give the answer's text back.
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
