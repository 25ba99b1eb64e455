"""Text to token ids: tokens that begin a text, control tokens in a text, text after other text.

If a text spells a control token, such as ``<|im_end|>``, the result is the tokens of its characters
and not the control token. Control tokens are those that the tokenizer marks as special, and added
tokens that its chat template writes.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from kvcat.choices import Bos
from kvcat.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SURROGATE = re.compile("[\ud800-\udfff]")
# how Python represents bytes of a command line that are not UTF-8
_ESCAPED_BYTES = range(0xDC80, 0xDD00)
# a text is encoded after one of these; there is nearly always one that shares no token with it
_STAND_INS = ("\n", "a", ".", "1")

Encode = Callable[[str], list[int]]


class Piece(NamedTuple):
    """A piece of a longer text; markup, which a chat template wrote, may hold control tokens."""

    text: str
    is_markup: bool = False


class TextEncoder:
    """Token ids of texts, with nothing added at the start or the end.

    Args:
        tokenizer: a tokenizer of transformers, fast or slow.
        allow_special: a control token that a text spells becomes that token.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", *, allow_special: bool = False):
        self.tokenizer = tokenizer
        self.allow_special = allow_special

    def __call__(self, text: str) -> list[int]:
        """Token ids of a whole text."""
        return self.joined([Piece(text)])

    def behind(self, text: str) -> list[int]:
        """Token ids of a text that follows another one, the same as in one text of both.

        A tokenizer that puts a space before a text does not put it here.
        """
        return self.joined([Piece(text)], behind=True)

    def joined(self, pieces: Sequence[Piece], *, behind: bool = False) -> list[int]:
        """Token ids of one text that consists of several pieces; ``behind`` as in the method of
        that name.
        """
        text = "".join(piece.text for piece in pieces)
        encode = self._whole
        fragments = [text]
        if not self.allow_special:
            if any(piece.is_markup for piece in pieces):
                fragments = self._fragments(pieces)
            else:
                encode = self._as_text
        first, *others = fragments
        ids = encode_behind(encode, first, self._unknown) if behind else encode(first)
        for fragment in others:
            ids += encode_behind(encode, fragment, self._unknown)
        return ids

    @cached_property
    def control_tokens(self) -> dict[int, str]:
        """The control tokens by id."""
        return control_tokens(self.tokenizer)

    def _whole(self, text: str) -> list[int]:
        """Token ids of a text, control tokens among them."""
        return self.tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=False, verbose=False
        )

    def _as_text(self, text: str) -> list[int]:
        """Token ids of a text without any control token."""
        ids = self.tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=True, verbose=False
        )
        return as_text(ids, text, self._whole, self.control_tokens, self._unknown)

    @property
    def _unknown(self) -> int | None:
        return unknown_id(self.tokenizer)

    def _fragments(self, pieces: Sequence[Piece]) -> list[str]:
        """The text of all pieces, cut inside every control token outside of markup."""
        fragments = [""]
        for piece in pieces:
            cut = [piece.text]
            if not piece.is_markup:
                cut = cut_control_tokens(piece.text, self.control_tokens.values())
            fragments[-1] += cut[0]
            fragments += cut[1:]
        return fragments


def as_text(
    ids: list[int],
    text: str,
    encode: Encode,
    control: Mapping[int, str],
    unknown: int | None,
) -> list[int]:
    """Token ids of a text without control tokens: ``ids`` if they contain none, or else new ones.

    Tokenizers have an option not to look for special tokens. They still look for added tokens that
    are not marked as special, and some models of tokens have control tokens among theirs. Then the
    text is cut inside each control token, and the fragments are encoded one by one.

    Raises:
        InputError: a control token remains however the text is cut.
    """
    unwanted = control.keys() - {unknown}
    if unwanted.isdisjoint(ids):
        return ids
    first, *others = cut_control_tokens(text, control.values())
    ids = encode(first)
    for fragment in others:
        ids += encode_behind(encode, fragment, unknown)
    remaining = unwanted.intersection(ids)
    if remaining:
        name = control[min(remaining)]
        raise InputError(f"the tokenizer has no tokens for the text {name!r} but the control token")
    return ids


def control_tokens(tokenizer: "PreTrainedTokenizerBase") -> dict[int, str]:
    """The control tokens by id: special tokens, and added tokens that the template writes."""
    template = tokenizer.chat_template or ""
    written = "\n".join(template.values()) if isinstance(template, dict) else str(template)
    tokens = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    for token_id, token in tokenizer.added_tokens_decoder.items():
        is_markup = token.content in written and not token.content.isspace()
        if token.special or is_markup:
            tokens[token_id] = token.content
    # a single character cannot be cut: it stays what the tokenizer makes of it
    return {token_id: content for token_id, content in tokens.items() if len(content) > 1}


def unknown_id(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """The token for characters that the tokenizer does not know; None if there is none."""
    return cast("int | None", tokenizer.unk_token_id)


def cut_control_tokens(text: str, contents: Iterable[str]) -> list[str]:
    """A text in consecutive fragments, none of which spells a control token."""
    longest_first = sorted(contents, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")  # (?!) never matches
    fragments = []
    start = 0
    while True:
        match = pattern.search(text, start)
        if match is None:
            break
        end = match.start() + 1
        fragments.append(text[start:end])
        start = end
    return [*fragments, text[start:]]


def encode_behind(encode: Encode, text: str, unknown: int | None = None) -> list[int]:
    """Token ids of a text that follows another one.

    The text is encoded after a stand-in, whose tokens are then removed. If the border lies inside a
    token, another stand-in is tried. If it does for every stand-in, the text is encoded alone.
    """
    if not text:
        return []
    for before in _STAND_INS:
        first = encode(before)
        both = encode(before + text)
        is_known = bool(first) and unknown not in first
        if is_known and len(both) > len(first) and both[: len(first)] == first:
            return both[len(first) :]
    return encode(text)


def opening_ids(tokenizer: "PreTrainedTokenizerBase", bos: Bos = "auto") -> list[int]:
    """The token ids that begin a text: a BOS token for many tokenizers, nothing for others.

    Args:
        tokenizer: a tokenizer of transformers.
        bos: "auto": what the tokenizer puts there; "always": the BOS token if the tokenizer puts
            nothing there; "never": nothing.

    Raises:
        InputError: "always" without a BOS token, or a tokenizer that changes a text beyond that.
    """
    if bos == "never":
        return []
    whole = tokenizer.encode("a")
    body = tokenizer.encode("a", add_special_tokens=False)
    starts = [i for i in range(len(whole)) if whole[i : i + len(body)] == body]
    if not starts:
        raise InputError(
            f"tokenizer {tokenizer.name_or_path!r} has other tokens for a text with special tokens "
            "than for one without"
        )
    opening = whole[: starts[0]]
    if opening or bos == "auto":
        return opening
    if tokenizer.bos_token_id is None:
        raise InputError(
            f"bos is 'always', and tokenizer {tokenizer.name_or_path!r} has no BOS token"
        )
    return [cast("int", tokenizer.bos_token_id)]


def closing_ids(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """The token ids that the tokenizer puts after a text, such as EOS; for most tokenizers none."""
    whole = tokenizer.encode("a")
    body = tokenizer.encode("a", add_special_tokens=False)
    return whole[len(opening_ids(tokenizer)) + len(body) :]


def check_text(text: str, name: str) -> None:
    """Raise an ``InputError`` for a text that no encoding can hold, such as half of an emoji."""
    match = _SURROGATE.search(text)
    if match is None:
        return
    code = ord(match[0])
    reason = f"character {match.start()} is U+{code:04X}, half of a surrogate pair"
    if code in _ESCAPED_BYTES:
        reason = f"character {match.start()} is the byte 0x{code - 0xDC00:02x}, which is not UTF-8"
    raise InputError(f"{name} is not Unicode text: {reason}")


def repaired(value: Any) -> Any:
    """A text, or a list or table of texts, with U+FFFD for every half of a surrogate pair."""
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, Mapping):
        return {repaired(key): repaired(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [repaired(item) for item in value]
    return value
