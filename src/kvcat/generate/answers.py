"""Answers: how they are decoded, their text piece by piece, and the texts that stop them."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

from kvcat.errors import InputError
from kvcat.text.encoder import control_tokens

_REPLACEMENT = "\ufffd"  # what a tokenizer writes for a character whose bytes are not complete
_CONTEXT_TOKENS = 8  # decoded before new tokens, so that these become the same text as in the whole

TakeText = Callable[[str], None]


@dataclass(frozen=True)
class Answer:
    """A complete answer.

    Args:
        text: the text, without a stop text or end-of-text token.
        ids: its tokens, with an end-of-text token if there is one.
        finish_reason: "stop" at an end-of-text token or a stop text, "length" at the largest number
            of tokens, "cancelled" if nobody waits for the answer any more.
    """

    text: str
    ids: list[int]
    finish_reason: Literal["stop", "length", "cancelled"]


def stop_tokens(tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> set[int]:
    """The ids of those stop texts that are control tokens, which the text of an answer leaves out.

    Raises:
        InputError: a stop text holds such a token and other text, so that no answer's text holds
            it.
    """
    tokens = set()
    for token, name in control_tokens(tokenizer).items():
        holding = [text for text in stop if name in text]
        if not holding or tokenizer.decode([token], skip_special_tokens=True):
            continue
        tokens.add(token)
        for text in holding:
            if text != name:
                raise InputError(
                    f"the stop text {text[:40]!r} holds the control token {name!r} and other text: "
                    "give one of them alone"
                )
    return tokens


class AnswerStream:
    """Tokens of an answer as they come, their text, and the place of a stop text in it.

    Text that may still change is held back: incomplete characters, and beginnings of stop texts.

    Raises:
        InputError: as ``stop_tokens``.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...], on_text: TakeText | None
    ) -> None:
        self.ids: list[int] = []
        self.text = ""
        self.is_stopped = False
        self._tokenizer = tokenizer
        self._stop = stop
        self._stop_tokens = stop_tokens(tokenizer, stop)
        self._on_text = on_text
        # numbers of tokens with complete text: the last one, and earlier ones to decode from
        self._complete = deque([0])
        self._waiting = ""  # complete text that a stop text may begin

    def take(self, token: int) -> None:
        """Take the next token of the answer."""
        self.ids.append(token)
        if self.is_stopped:
            return
        if token in self._stop_tokens:
            self.close()
            self.is_stopped = True
            return
        new_text = self._new_text()
        if new_text and not new_text.endswith(_REPLACEMENT):
            self._complete.append(len(self.ids))
            self._add(new_text, is_last=False)

    def close(self) -> None:
        """Take the text that was held back: no token follows."""
        if not self.is_stopped:
            self._add(self._new_text(), is_last=True)

    def _new_text(self) -> str:
        """The text of the tokens that are not decoded yet.

        The tokens before them are decoded from the start of a character: tokenizers that have
        tokens for bytes decode all bytes in a row together, and none if one character is cut.
        """
        num_decoded = self._complete[-1]
        while len(self._complete) > 1 and self._complete[1] <= num_decoded - _CONTEXT_TOKENS:
            self._complete.popleft()
        start = self._complete[0]
        before = self._decode(self.ids[start:num_decoded])
        both = self._decode(self.ids[start:])
        if not both.startswith(before):  # a character that is not complete
            return self._decode(self.ids[num_decoded:])
        return both[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return str(
            self._tokenizer.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def _add(self, new_text: str, *, is_last: bool) -> None:
        """Add complete text, up to a stop text."""
        waiting = self._waiting + new_text
        places = [waiting.find(stop) for stop in self._stop if stop in waiting]
        if places:
            self.is_stopped = True
            num_safe = min(places)
        else:
            num_safe = len(waiting) - (0 if is_last else self._num_held(waiting))
        self._waiting = waiting[num_safe:]
        safe = waiting[:num_safe]
        self.text += safe
        if safe and self._on_text is not None:
            self._on_text(safe)

    def _num_held(self, text: str) -> int:
        """The length of the longest end of a text that a stop text begins with."""
        longest = max(map(len, self._stop), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0
