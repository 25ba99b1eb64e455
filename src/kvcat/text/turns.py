"""The turns of a session in a chat template, each as the tokens that it adds to those before."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kvcat.errors import InputError
from kvcat.text.encoder import TextEncoder
from kvcat.text.template import ChatTemplate, behind, pieces, without_cuts


class AddedTurn(NamedTuple):
    """Token ids of a turn, and the turns with it."""

    ids: list[int]
    turns: "Turns"


@dataclass(frozen=True)
class Turns:
    """The turns so far, all of which are in the session.

    The template's text of them is not kept: a template that writes the date writes another one the
    next day, and only the text after the earlier turns is needed.

    Args:
        encoder: with a tokenizer that has a chat template.
        turns: role and content of each, without an answer that follows.
        is_answered: whether the opening of the assistant's turn follows them.
        answer: the assistant's answer to them, as it was generated; None: there is none.
        end: the control token that ended it; empty if it was cut off.
        template: digest of the chat template; empty: there are no turns.
    """

    encoder: TextEncoder
    turns: tuple[tuple[str, str], ...] = ()
    is_answered: bool = False
    answer: str | None = None
    end: str = ""
    template: str = ""

    def added(self, role: str, text: str, *, is_answered: bool) -> AddedTurn:
        """The turn's tokens after those before, and the turns with it.

        Args:
            is_answered: the tokens that open the assistant's turn are added as well.

        Raises:
            InputError: no template, one that fails or changes earlier turns or this one; a text
                that is not Unicode.
        """
        tokenizer = self.encoder.tokenizer
        if not tokenizer.chat_template:
            raise InputError("the tokenizer has no chat template: use append and generate")
        template = ChatTemplate(tokenizer)
        if self.template not in ("", template.digest):
            raise InputError("the session's turns are in another chat template")
        before = self.turns
        if self.answer is not None:
            before = (*before, ("assistant", self.answer))
        turns = (*before, (role, text))

        def render(turns: Sequence[tuple[str, str]], *, is_answered: bool) -> str:
            messages = [{"role": each, "content": content} for each, content in turns]
            return template.rendered(messages, self.encoder, is_answered=is_answered)

        def new_text() -> str:
            earlier = ""
            if self.turns:
                earlier = without_cuts(render(self.turns, is_answered=self.is_answered))
            rendered = render(turns, is_answered=is_answered)
            return behind(rendered, self._num_appended(without_cuts(rendered), earlier))

        added = template.at_one_time(new_text)
        if text.strip() not in without_cuts(added):
            raise InputError(f"the chat template changes the text {text[:20]!r}, or leaves it out")
        ids = self.encoder.joined(pieces(added), behind=bool(self.turns))
        after = Turns(self.encoder, turns, is_answered, template=template.digest)
        return AddedTurn(ids, after)

    def answered(self, answer: str, end: str) -> "Turns":
        """The turns with the assistant's answer, whose tokens are appended already.

        Args:
            end: the control token that ended it; empty if it was cut off.
        """
        return replace(self, answer=answer, end=end)

    def _num_appended(self, written: str, earlier: str) -> int:
        """How many characters of the template's text are in the session already.

        Args:
            earlier: its text of the turns before the last answer.
        """
        if not written.startswith(earlier):
            raise InputError("the chat template changes what it wrote for earlier turns")
        place = len(earlier)
        if self.answer is None:
            return place
        # a template may write an answer without blanks around it
        for answer in (self.answer, self.answer.strip()):
            if written.startswith(answer + self.end, place):
                return place + len(answer + self.end)
        raise InputError("the chat template does not write the last answer as it was generated")

    def as_json(self) -> dict[str, Any]:
        """The turns, for a file."""
        return {name: getattr(self, name) for name in _SAVED}

    def restored(self, content: dict[str, Any]) -> "Turns":
        """The turns of a file."""
        turns = tuple((str(role), str(text)) for role, text in content["turns"])
        saved = {name: content[name] for name in _SAVED}
        return replace(self, **{**saved, "turns": turns})


_SAVED = ("turns", "is_answered", "answer", "end", "template")
