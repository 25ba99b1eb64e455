"""The turns of a session, each as the tokens that it adds to those before."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from kvcat.errors import InputError
from kvcat.text.encoder import TextEncoder, check_text
from kvcat.text.template import ChatTemplate, behind, pieces, without_cuts

_BETWEEN_LINES = "\n"  # of turns without a chat template


class RewrittenError(InputError):
    """The chat template now writes earlier turns in another way than it did."""


class AddedTurn(NamedTuple):
    """A turn as tokens.

    Args:
        ids: of the turn, after the tokens of those before.
        turns: with it.
        rewritten: None; or why the ids are those of all turns, in place of those before.
    """

    ids: list[int]
    turns: "Turns"
    rewritten: RewrittenError | None = None


@dataclass(frozen=True)
class Turns:
    """The turns so far, all of which are in the session.

    The template's text of them is not kept: a template that writes the date writes another one the
    next day, and only the text after the earlier turns is needed. A template may write the answers
    before the last question in another way, to leave their reasoning out: then all is new.

    Args:
        encoder: with a tokenizer that has a chat template, or after a document without one.
        document: whether the turns follow a document, and whether this is in the chat template,
            where it opens the first turn, the user's. After one that is "plain", turns have no
            roles: each begins on a new line.
        turns: role and content of each, without an answer that follows.
        is_answered: whether the opening of the assistant's turn follows them.
        answer: the assistant's answer to them, as it was generated; None: there is none.
        end: the control token that ended it; empty if it was cut off.
        template: digest of the chat template; empty: not known, as there are no turns.
        num_tokens: of the session with the last of them.
    """

    encoder: TextEncoder
    document: Literal["none", "plain", "chat"] = "none"
    turns: tuple[tuple[str, str], ...] = ()
    is_answered: bool = False
    answer: str | None = None
    end: str = ""
    template: str = ""
    num_tokens: int = 0

    def added(self, role: str, text: str, *, is_answered: bool) -> AddedTurn:
        """The turn's tokens after those before, and the turns with it.

        Args:
            is_answered: the tokens that open the assistant's turn are added as well.

        Raises:
            InputError: no template, one that fails or changes this turn; a role that cannot be; a
                text that is not Unicode.
        """
        if self.document != "none" and not self.turns and role != "user":
            raise InputError(f"the first turn after a document is the user's, not the {role}'s")
        if self.document == "plain":
            return self._added_line(role, text)
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
            write = template.after_document if self.document == "chat" else template.rendered
            return write(messages, self.encoder, is_answered=is_answered)

        def new_text() -> str:
            earlier = ""
            if self.turns:
                earlier = without_cuts(render(self.turns, is_answered=self.is_answered))
            rendered = render(turns, is_answered=is_answered)
            return behind(rendered, self._num_appended(without_cuts(rendered), earlier))

        rewritten = None
        try:
            added = template.at_one_time(new_text)
        except RewrittenError as reason:
            rewritten = reason
            added = template.at_one_time(lambda: render(turns, is_answered=is_answered))
        if text.strip() not in without_cuts(added):
            raise InputError(f"the chat template changes the text {text[:20]!r}, or leaves it out")
        follows = self.document == "chat" or (bool(self.turns) and rewritten is None)
        ids = self.encoder.joined(pieces(added), behind=follows)
        after = Turns(self.encoder, self.document, turns, is_answered, template=template.digest)
        return AddedTurn(ids, after, rewritten)

    def _added_line(self, role: str, text: str) -> AddedTurn:
        """A turn after a document without a chat template."""
        check_text(text, "the turn")
        start = _BETWEEN_LINES if self.turns else ""
        after = replace(self, turns=(*self.turns, (role, text)))
        return AddedTurn(self.encoder.behind(start + text), after)

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
            raise RewrittenError("the chat template changes what it wrote for earlier turns")
        place = len(earlier)
        if self.answer is None:
            return place
        # a template may write an answer without blanks around it
        for answer in (self.answer, self.answer.strip()):
            if written.startswith(answer + self.end, place):
                return place + len(answer + self.end)
        raise RewrittenError("the chat template does not write the last answer as it was generated")

    def as_json(self) -> dict[str, Any]:
        """The turns, for a file."""
        return {name: getattr(self, name) for name in _SAVED}

    def restored(self, content: dict[str, Any]) -> "Turns":
        """The turns of a file."""
        turns = tuple((str(role), str(text)) for role, text in content["turns"])
        saved = {name: content[name] for name in _SAVED}
        return replace(self, **{**saved, "turns": turns})


_SAVED = ("turns", "is_answered", "answer", "end", "template", "num_tokens")
