"""A conversation about a document: history after its compact cache, turn by turn."""

from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcat.cache import CACHE_NAME, CompactCache, cache_argument
from kvcat.compress import question_ids
from kvcat.generate import Answer, Sampling, TakeText, answer, answer_length, end_tokens
from kvcat.models import positions_of
from kvcat.text.encoder import TextEncoder, check_text
from kvcat.text.template import ChatTemplate

_BETWEEN_TURNS = "\n"  # of a document without a chat template


class Conversation:
    """Questions about a document and their answers, each of which sees all earlier ones.

    The compact cache never changes. Earlier turns are exact slots after it; they are read once,
    unless a turn's tokens differ from those that were generated.

    With a document in a chat template the turns are messages of that template. Otherwise a question
    follows the last answer after a line break.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cache: CompactCache
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.cache = cache
        self.messages: list[dict[str, str]] = []
        self._past: Any = None
        self._held: list[int] = []  # tokens after the document in the past
        self._ids: list[int] = []  # all tokens after a document without a chat template

    def ask(self, text: str, sampling: Sampling, *, on_text: TakeText | None = None) -> Answer:
        """The answer to a question; both become part of the conversation.

        Raises:
            InputError: an empty question, or one for which no position is left; the conversation
                does not change.
        """
        ids = self._next_ids(text)
        question = torch.tensor([ids], device=self.model.device)
        length = answer_length(self.model, self.cache, question, sampling.max_new_tokens)
        fitting = replace(sampling, max_new_tokens=length)
        inputs = self._inputs(ids)
        past = inputs[CACHE_NAME]
        self._past = None  # until the answer is complete
        result = answer(self.model, self.tokenizer, inputs, fitting, on_text=on_text)
        self.messages += [
            {"role": "user", "content": text},
            {"role": "assistant", "content": result.text},
        ]
        self._ids = [*ids, *self._answer_ids(result)]
        num_held = int(past.get_seq_length()) - self.cache.num_tokens
        self._held = [*ids, *result.ids][:num_held]
        self._past = past
        return result

    def reset(self) -> None:
        """Forget all turns; the document stays."""
        self.messages = []
        self._past = None
        self._held = []
        self._ids = []

    def _answer_ids(self, result: Answer) -> list[int]:
        """The tokens of an answer that later turns see: without a stop text or end-of-text."""
        if result.ids[-1] in end_tokens(self.model):
            return result.ids[:-1]
        if result.finish_reason == "stop":
            return TextEncoder(self.tokenizer).behind(result.text)
        return result.ids

    def _next_ids(self, text: str) -> list[int]:
        """All tokens after the document when the question is asked."""
        first = question_ids(
            self.tokenizer, text, cache=self.cache, positions=positions_of(self.model.config)
        )[0].tolist()
        if not self.messages:
            return first
        check_text(text, "the question")
        encoder = TextEncoder(self.tokenizer)
        if self.cache.record.chat:
            turns = [*self.messages, {"role": "user", "content": text}]
            return ChatTemplate(self.tokenizer).conversation(turns, encoder)
        return [*self._ids, *encoder.behind(_BETWEEN_TURNS + text)]

    def _inputs(self, ids: list[int]) -> dict[str, Any]:
        """Arguments of ``model.generate``: the new tokens alone where the past holds the others."""
        num_held = len(self._held)
        device = self.model.device
        continues = ids[:num_held] == self._held and num_held < len(ids)
        if self._past is None or not continues:
            return self.cache.inputs(self.model, torch.tensor([ids], device=device))
        num_tokens = self.cache.num_tokens + len(ids)
        return {
            "input_ids": torch.tensor([ids[num_held:]], device=device),
            "attention_mask": torch.ones(1, num_tokens, dtype=torch.long, device=device),
            **cache_argument(self._past),
        }
