"""The turns of a session in a chat template, each as the tokens that it adds to those before."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from kvcat.errors import InputError, one_line
from kvcat.tokenization import Piece, TextEncoder, check_text, cut_control_tokens

_CUT = "\ufdd0"  # no character: it divides a control token that a text spells


class AddedTurn(NamedTuple):
    """Token ids of a turn, and the conversation with it."""

    ids: list[int]
    conversation: "Conversation"


@dataclass(frozen=True)
class Conversation:
    """The turns so far and the text that the template wrote for them.

    Args:
        tokenizer: with a chat template.
        encoder: of the same tokenizer.
        turns: role and content of each.
        written: text of the template for them, without cuts and without the answer that follows.
        answer: the assistant's last answer, if it was generated.
        end: the control token that ended it; empty if it was cut off.
    """

    tokenizer: PreTrainedTokenizerBase
    encoder: TextEncoder
    turns: tuple[tuple[str, str], ...] = ()
    written: str = ""
    answer: str = ""
    end: str = ""

    def added(self, role: str, text: str, *, is_answered: bool) -> AddedTurn:
        """The turn's tokens after those before, and the conversation with it.

        Args:
            role: of the turn.
            text: its content.
            is_answered: the tokens that open the assistant's turn are added as well.

        Raises:
            InputError: no template, one that fails or changes earlier turns; a text that is not
                Unicode.
        """
        check_text(text, "the turn")
        if _CUT in text:
            raise InputError("the turn holds U+FDD0, which marks places here")
        if not self.tokenizer.chat_template:
            raise InputError("the tokenizer has no chat template: use append and generate")
        turns = (*self.turns, (role, text))
        fragments = [text]
        if role != "assistant":
            fragments = cut_control_tokens(text, self.encoder.control_tokens.values())
        rendered = self._render(turns[:-1], (role, _CUT.join(fragments)), is_answered=is_answered)
        written = rendered.replace(_CUT, "")
        new_text = _behind(rendered, self._num_appended(written))
        ids: list[int] = []
        for number, fragment in enumerate(new_text.split(_CUT)):
            is_first = not self.written and number == 0
            ids += self.encoder.joined([Piece(fragment, is_markup=True)], behind=not is_first)
        return AddedTurn(ids, replace(self, turns=turns, written=written, answer="", end=""))

    def answered(self, answer: str, end: str) -> "Conversation":
        """The conversation with the assistant's answer, whose tokens are appended already.

        Args:
            answer: its text.
            end: the control token that ended it; empty if it was cut off.
        """
        turns = (*self.turns, ("assistant", answer))
        return replace(self, turns=turns, answer=answer, end=end)

    def _num_appended(self, written: str) -> int:
        """How many characters of the template's text are in the session already."""
        if not written.startswith(self.written):
            raise InputError("the chat template changes what it wrote for earlier turns")
        place = len(self.written)
        # a template may write an answer without blanks around it
        for answer in (self.answer, self.answer.strip()):
            if written.startswith(answer + self.end, place):
                return place + len(answer + self.end)
        raise InputError("the chat template does not write the last answer as it was generated")

    def as_json(self) -> dict[str, Any]:
        """The turns and the text, for a file."""
        texts = {"written": self.written, "answer": self.answer, "end": self.end}
        return {"turns": [list(turn) for turn in self.turns], **texts}

    def restored(self, content: dict[str, Any]) -> "Conversation":
        """The conversation of a file."""
        turns = tuple((str(role), str(text)) for role, text in content["turns"])
        texts = {name: str(content[name]) for name in ("written", "answer", "end")}
        return replace(self, turns=turns, **texts)

    def _render(
        self, turns: Sequence[tuple[str, str]], last: tuple[str, str], *, is_answered: bool
    ) -> str:
        """All turns as the template writes them."""
        messages = [{"role": role, "content": content} for role, content in (*turns, last)]
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=is_answered
                )
            )
        except TemplateError as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"the chat template rejects this turn: {reason}") from error
        except Exception as error:  # a template is a program: it raises anything
            raise InputError(f"the chat template fails: {one_line(error)}") from error


def _behind(rendered: str, length: int) -> str:
    """The text after the first ``length`` characters, which do not count the cuts."""
    place = 0
    for _ in range(length):
        while rendered[place] == _CUT:
            place += 1
        place += 1
    return rendered[place:]
