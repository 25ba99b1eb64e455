"""A chat template: what it writes around a document and a question, and around turns."""

import hashlib
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from kvcat.errors import InputError, one_line
from kvcat.text.encoder import Piece, TextEncoder, check_text, cut_control_tokens

SEPARATOR = "\n\n"  # between document and question, in the text of the turn
# words that neither templates nor texts contain
_DOCUMENT = "xqvjzk0"
_QUESTION = "zkjvqx1"
# what a template may change: case, markup of HTML and JSON, blanks, line ends, other scripts
_PROBE = "Is <b>\"x\" & 'y'</b> \\n {{ z }}  [1]?\n\n\tf(x) % 2 \u00e9\u6771."
_CUT = "\ufdd0"  # no character: a place in a text that no control token may span
_MOST_LOOKED_FOR = 16  # control tokens in an answer that are tried one by one
_MOST_WRITTEN = 1 << 26  # characters, for a context of about sixteen million tokens
_TRIES = 3  # to render a template that writes the time several times within one

T = TypeVar("T")


class ChatParts(NamedTuple):
    """The template's text before the document, between it and the question, and after both."""

    head: str
    between: str
    tail: str


class ChatTemplate:
    """A tokenizer's chat template, which writes a user's text once and unchanged.

    Templates that want a message's content as a list of parts get a list. A template may write the
    time. Where it passes between two renderings they are repeated, so that all have one time.

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

        def written() -> str:
            head, between, tail = self.parts
            around = (head, f"{between}{_QUESTION}{tail}")
            return self._written(f"{text}{SEPARATOR}{_QUESTION}", text, around)

        return self.at_one_time(written)

    def question(self, text: str) -> str:
        """A question as the template writes it after a document: some templates remove blanks at
        its end.

        Raises:
            InputError: as ``document``.
        """

        def written() -> str:
            head, between, tail = self.parts
            around = (f"{head}{_DOCUMENT}{between}", tail)
            return self._written(f"{_DOCUMENT}{SEPARATOR}{text}", text, around)

        return self.at_one_time(written)

    def conversation(self, turns: Sequence[Mapping[str, Any]], encoder: TextEncoder) -> list[int]:
        """Token ids of ``after_document``."""
        return encoder.joined(pieces(self.after_document(turns, encoder)), behind=True)

    def after_document(
        self, turns: Sequence[Mapping[str, Any]], encoder: TextEncoder, *, is_answered: bool = True
    ) -> str:
        """The text after the document in a conversation that begins with the question.

        Args:
            turns: with "role" and "content", a text; the first is the user's question.
            encoder, is_answered: as in ``rendered``, which says what the text is.

        Raises:
            InputError: as ``rendered``; or the template writes something else before the document
                than in a turn alone, or does not write the question as it is.
        """

        def after_document() -> str:
            written = self.rendered(
                turns, encoder, before=_DOCUMENT + SEPARATOR, is_answered=is_answered
            )
            start = self.parts.head + _DOCUMENT
            if not written.startswith(start) or written.count(_DOCUMENT) > 1:
                raise InputError(
                    "the chat template puts something else before the document than when it was "
                    "compressed, or leaves it out"
                )
            return written.removeprefix(start)

        written = self.at_one_time(after_document)
        between = self.parts.between
        question = without_cuts(written).removeprefix(between).lstrip()
        first = str(turns[0]["content"]).strip()
        if not (without_cuts(written).startswith(between) and question.startswith(first)):
            raise InputError("the chat template changes the first message")
        return written

    def rendered(
        self,
        turns: Sequence[Mapping[str, Any]],
        encoder: TextEncoder,
        *,
        before: str = "",
        is_answered: bool = True,
    ) -> str:
        """The template's text of some turns, with U+FDD0 at places that no control token spans.

        Control tokens that a turn's text spells are text, as are those that its ends would form
        with the text around it, unless the encoder allows them. A template may look for one in the
        text of an answer (``</think>``, to leave the reasoning out): it sees the text as it is.

        Args:
            turns: with "role" and "content", a text.
            encoder: of the same tokenizer.
            before: text before that of the first turn, in the same content.
            is_answered: the text ends with the opening of the assistant's next turn.

        Raises:
            InputError: the template fails; a text that is not Unicode or holds a mark of this
                class; or a control token in another field than the content.
        """
        texts = [str(turn["content"]) for turn in turns]
        for number, turn in enumerate(turns, start=1):
            _check_turn(turn, f"message {number}", encoder)

        def render(contents: Sequence[str]) -> str:
            first, *others = contents
            messages = [
                {**turn, "content": text}
                for turn, text in zip(turns, (before + first, *others), strict=True)
            ]
            return self._render(messages, is_answered=is_answered)

        # with a mark inside every control token that a text spells
        controls = encoder.control_tokens.values()
        cut = [_CUT.join(cut_control_tokens(text, controls)) for text in texts]
        answers = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
        visible = list(cut)  # what the template reads: answers as they are
        for index in answers:
            visible[index] = texts[index]
        wanted = without_cuts(render(visible))
        for contents in (map(_fenced, cut), cut):
            written = render(list(contents))
            # before it or after it: the template may write a time that has changed in between
            if without_cuts(written) in (wanted, without_cuts(render(visible))):
                return written
        # the template looks for control tokens in answers: cut those that it does not look for
        fenced = [text if index in answers else _fenced(text) for index, text in enumerate(visible)]
        if without_cuts(render(fenced)) == wanted:
            visible = fenced
        for index in answers:
            fragments = cut_control_tokens(texts[index], encoder.control_tokens.values())
            if len(fragments) - 1 > _MOST_LOOKED_FOR:
                raise InputError(
                    f"message {index + 1}, an answer, spells {len(fragments) - 1} control tokens, "
                    f"and the chat template looks for some: at most {_MOST_LOOKED_FOR} are possible"
                )
            visible[index], *others = fragments
            for number, fragment in enumerate(others):
                start = visible[index]
                uncut = "".join(others[number:])
                visible[index] = f"{start}{_CUT}{uncut}"
                is_seen = without_cuts(render(visible)) != wanted
                visible[index] = f"{start}{'' if is_seen else _CUT}{fragment}"
        written = render(visible)
        if without_cuts(written) != wanted:
            raise self._rejection("writes the same messages in several ways")
        return written

    def at_one_time(self, render: Callable[[], T]) -> T:
        """What a function renders; again if it failed because the template writes a later time."""
        for _ in range(_TRIES - 1):
            before = self.parts
            try:
                return render()
            except InputError:
                self.parts = self._find_parts()
                if self.parts == before:
                    raise
        return render()

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

    def _written(self, content: str, text: str, around: tuple[str, str]) -> str:
        """A text of a user's turn as the template writes it.

        Args:
            text: the part of it that is wanted.
            around: what the template must write before and after this part.
        """
        before, after = around
        rendered = self._render_turn(content)
        written = rendered[len(before) : len(rendered) - len(after)]
        if rendered == before + written + after and written.strip() == text.strip():
            return written
        raise self._rejection(f"changes the text {text[:20]!r} or what it writes around it")

    def _render_turn(self, text: str) -> str:
        return self._render([{"role": "user", "content": text}])

    def _render(self, turns: Sequence[Mapping[str, Any]], *, is_answered: bool = True) -> str:
        """The conversation as text, up to where the assistant's next turn begins."""
        if self.as_list:
            turns = [
                {**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in turns
            ]
        try:
            template = self.tokenizer.get_chat_template()
            # the function has a cache, so this is the template that the tokenizer renders
            compiled: Any = chat_template_utils._compile_jinja_template(template)
            compiled.environment.concat = _bounded_join
            return str(
                self.tokenizer.apply_chat_template(
                    [dict(turn) for turn in turns],
                    tokenize=False,
                    add_generation_prompt=is_answered,
                )
            )
        except TemplateError as error:
            reason = " ".join(str(error).split())[:200]
            raise self._rejection(f"rejects these messages: {reason}") from error
        except InputError as error:
            raise self._rejection(str(error)) from error
        except Exception as error:  # a template is a program: it raises anything
            raise self._rejection(f"fails: {one_line(error)}") from error

    def _rejection(self, reason: str) -> InputError:
        return InputError(f"the chat template of {_name(self.tokenizer)} {reason}")


def _bounded_join(pieces: Iterable[str]) -> str:
    """The text of what a template writes piece by piece; a template may write for ever."""
    text = io.StringIO()
    for piece in pieces:
        text.write(piece)
        if text.tell() > _MOST_WRITTEN:
            raise InputError(f"writes more than {_MOST_WRITTEN >> 20} million characters")
    return text.getvalue()


def without_cuts(written: str) -> str:
    """A text of ``ChatTemplate.rendered`` without its marks."""
    return written.replace(_CUT, "")


def pieces(written: str) -> list[Piece]:
    """A text of ``ChatTemplate.rendered`` for ``TextEncoder.joined``."""
    return [Piece(piece, is_markup=True) for piece in written.split(_CUT)]


def behind(written: str, length: int) -> str:
    """The text after its first ``length`` characters, among which marks do not count."""
    place = 0
    for _ in range(length):
        while written[place] == _CUT:
            place += 1
        place += 1
    return written[place:]


def _fenced(text: str) -> str:
    """The text with marks around it, within the blanks at its ends, which templates remove."""
    core = text.strip()
    if not core:
        return text
    start = text.index(core)
    stop = start + len(core)
    return f"{text[:start]}{_CUT}{core}{_CUT}{text[stop:]}"


def _check_turn(turn: Mapping[str, Any], name: str, encoder: TextEncoder) -> None:
    """Reject texts of a turn that no encoding can hold, and control tokens outside its content."""
    for field, value in turn.items():
        of_field = name if field == "content" else f"{name}, {field}"
        for text in (field, *_texts(value)):
            check_text(text, of_field)
            if _DOCUMENT in text or _CUT in text:
                raise InputError(f"{of_field} holds {_DOCUMENT!r} or U+FDD0, which mark places")
            if field == "content":
                continue
            fragments = cut_control_tokens(text, encoder.control_tokens.values())
            if len(fragments) > 1:
                raise InputError(f"{of_field} spells a control token: {text[:40]!r}")


def _texts(value: Any) -> list[str]:
    """All texts in a value of JSON, the names in objects included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        return [text for item in value for text in _texts(item)]
    return []


def chat_parts(tokenizer: PreTrainedTokenizerBase) -> ChatParts:
    """The text that the chat template writes before, between and after document and question.

    Raises:
        InputError: as ``ChatTemplate``.
    """
    return ChatTemplate(tokenizer).parts


def _name(tokenizer: PreTrainedTokenizerBase) -> str:
    return f"tokenizer {tokenizer.name_or_path!r}"
