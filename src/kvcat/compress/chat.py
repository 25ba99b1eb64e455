"""The text that a chat template writes around a document and a question in one user's turn."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from kvcat.errors import InputError, one_line
from kvcat.tokenization import Piece, TextEncoder, check_text, cut_control_tokens

SEPARATOR = "\n\n"  # between document and question, in the text of the turn
# words that neither templates nor texts contain
_DOCUMENT = "xqvjzk0"
_QUESTION = "zkjvqx1"
# what a template may change: case, markup of HTML and JSON, blanks, line ends, other scripts
_PROBE = "Is <b>\"x\" & 'y'</b> \\n {{ z }}  [1]?\n\n\tf(x) % 2 \u00e9\u6771."
_TRIES = 3  # to render a template that writes the time twice within one
_CUT = "\ufdd0"  # no character: it divides a control token that a text spells


class ChatParts(NamedTuple):
    """The template's text before the document, between it and the question, and after both."""

    head: str
    between: str
    tail: str


class ChatTemplate:
    """A tokenizer's chat template, which writes a user's text once and unchanged.

    A template may write the time. Where two renderings differ they are repeated, so that all of
    them have one time.

    Args:
        tokenizer: of transformers.

    Raises:
        InputError: no template, one that fails, or one that does not write a text once and
            unchanged.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.as_list = False  # whether a turn's content is a list of parts, or a text
        if not tokenizer.chat_template:
            raise InputError(f"{_name(tokenizer)} has no chat template: leave out --chat")
        try:
            self.parts = self._find_parts()
        except InputError as rejection:
            self.as_list = True
            try:
                self.parts = self._find_parts()
            except InputError:
                raise rejection from None

    @property
    def digest(self) -> str:
        """A hash of the template's source."""
        source = self.tokenizer.get_chat_template()
        return hashlib.sha256(source.encode()).hexdigest()[:16]

    def check(self, recorded: str) -> None:
        """Raise an ``InputError`` if a cache was made with another template.

        Args:
            recorded: digest of the cache's template; empty: the cache does not record it.
        """
        if recorded not in ("", self.digest):
            raise InputError(
                f"the cache was made with another chat template than that of "
                f"{_name(self.tokenizer)}"
            )

    def document(self, text: str) -> str:
        """A document as the template writes it: some templates remove blanks at its start.

        Raises:
            InputError: the template changes the text otherwise, or writes something else around it.
        """
        return self._written(text, is_question=False)

    def question(self, text: str) -> str:
        """A question as the template writes it after a document: some templates remove blanks at
        its end.

        Raises:
            InputError: as ``document``.
        """
        return self._written(text, is_question=True)

    def conversation(self, turns: Sequence[Mapping[str, Any]], encoder: TextEncoder) -> list[int]:
        """Token ids of the text after the document in a conversation that begins with the question.

        Args:
            turns: with "role" and "content", a text; the first is the user's question.
            encoder: of the same tokenizer.

        Raises:
            InputError: the template fails, writes something else before the document than in a
                turn alone, or does not write the question as it is.
        """
        texts = [str(turn["content"]) for turn in turns]
        for index, text in enumerate(texts):
            name = f"message {index + 1}"
            check_text(text, name)
            if _DOCUMENT in text or _CUT in text:
                raise InputError(f"{name} holds {_DOCUMENT!r} or U+FDD0, which mark places here")
            # the assistant wrote its control tokens itself, and templates look for them
            if turns[index]["role"] != "assistant":
                fragments = cut_control_tokens(text, encoder.control_tokens.values())
                texts[index] = _CUT.join(fragments)
        contents = [_DOCUMENT + SEPARATOR + texts[0], *texts[1:]]
        messages = [{**turn, "content": text} for turn, text in zip(turns, contents, strict=True)]
        written = self._behind_document(messages)
        between = self.parts.between
        question = written.removeprefix(between).lstrip()
        if not (written.startswith(between) and question.startswith(texts[0].strip())):
            raise InputError("the chat template changes the first message")
        ids = []
        for fragment in written.split(_CUT):
            ids += encoder.joined([Piece(fragment, is_markup=True)], behind=True)
        return ids

    def _behind_document(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text that the template writes after the document of a conversation."""
        for _ in range(_TRIES):
            rendered = self._render(messages)
            start = self.parts.head + _DOCUMENT
            if rendered.startswith(start) and rendered.count(_DOCUMENT) == 1:
                return rendered.removeprefix(start)
            self.parts = self._find_parts()
        raise InputError(
            "the chat template puts something else before the document than when it was "
            "compressed, or leaves it out"
        )

    def _find_parts(self) -> ChatParts:
        """The text that the template writes around two texts of a user's turn."""
        first = f"{_DOCUMENT}{_PROBE}"
        second = f"{_PROBE}{_QUESTION}"
        for _ in range(_TRIES):
            rendered = self._render_turn(_DOCUMENT + SEPARATOR + _QUESTION)
            head, *after_document = rendered.split(_DOCUMENT)
            between, *after_question = "".join(after_document).split(_QUESTION)
            if len(after_document) != 1 or len(after_question) != 1:
                raise self._rejection("does not write a user's text once and unchanged")
            (tail,) = after_question
            wanted = f"{head}{first}{between}{second}{tail}"
            if self._render_turn(first + SEPARATOR + second) == wanted:
                return ChatParts(head, between, tail)
        raise self._rejection("changes a user's text")

    def _written(self, text: str, *, is_question: bool) -> str:
        """The document or the question as the template writes it in a turn; a word replaces the
        other.
        """
        content = (
            f"{_DOCUMENT}{SEPARATOR}{text}" if is_question else f"{text}{SEPARATOR}{_QUESTION}"
        )
        for _ in range(_TRIES):
            head, between, tail = self.parts
            before = f"{head}{_DOCUMENT}{between}" if is_question else head
            after = tail if is_question else f"{between}{_QUESTION}{tail}"
            rendered = self._render_turn(content)
            written = rendered[len(before) : len(rendered) - len(after)]
            if rendered == before + written + after and written.strip() == text.strip():
                return written
            self.parts = self._find_parts()
        raise self._rejection(f"changes the text {text[:20]!r} or what it writes around it")

    def _render_turn(self, text: str) -> str:
        return self._render([{"role": "user", "content": text}])

    def _render(self, turns: Sequence[Mapping[str, Any]]) -> str:
        """The conversation as text, up to where the assistant's next turn begins."""
        if self.as_list:
            turns = [
                {**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in turns
            ]
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    [dict(turn) for turn in turns],
                    tokenize=False,
                    add_generation_prompt=True,
                )
            )
        except TemplateError as error:
            reason = " ".join(str(error).split())[:200]
            raise self._rejection(f"rejects these messages: {reason}") from error
        except Exception as error:  # a template is a program: it raises anything
            raise self._rejection(f"fails: {one_line(error)}") from error

    def _rejection(self, reason: str) -> InputError:
        return InputError(f"the chat template of {_name(self.tokenizer)} {reason}")


def chat_parts(tokenizer: PreTrainedTokenizerBase) -> ChatParts:
    """The text that the chat template writes before, between and after document and question.

    Raises:
        InputError: as ``ChatTemplate``.
    """
    return ChatTemplate(tokenizer).parts


def _name(tokenizer: PreTrainedTokenizerBase) -> str:
    return f"tokenizer {tokenizer.name_or_path!r}"
