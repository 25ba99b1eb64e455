"""Tokenization: tokens at the start of a text, control tokens, and text after other text.

If a text spells a control token, such as ``<|im_end|>``, it is encoded as ordinary characters and
not as the control token. Control tokens are the tokens that the tokenizer marks as special, and the
added tokens that its chat template writes.
"""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from kvcat.errors import InputError
from kvcat.options import Bos

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SURROGATE = re.compile("[\ud800-\udfff]")
# how Python represents bytes of a command line that are not UTF-8
_ESCAPED_BYTES = range(0xDC80, 0xDD00)
# a text is encoded after one of these; nearly always one of them shares no token with the text
_STAND_INS = ("\n", "a", ".", "1")

_USUAL_CHARACTERS = 8  # of a token; few texts have tokens of more on average
_SHORTEST_PIECE, _LONGEST_PIECE = 1 << 12, 1 << 18  # characters
_TOKENS_AT_CUTS = 16  # more than cutting a piece out of its text can add

Encode = Callable[[str], list[int]]


class Piece(NamedTuple):
    """A piece of a text; control tokens are those within one piece of a chat template's markup."""

    text: str
    is_markup: bool = False


class TextEncoder:
    """An encoder from texts to token ids that adds no tokens at the start or the end.

    Args:
        tokenizer: a tokenizer of transformers, fast or slow.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        self.tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        """Token ids of a whole text."""
        return self.joined([Piece(text)])

    def behind(self, text: str) -> list[int]:
        """Token ids of a text that follows another text, as if both were encoded as one text.

        A space that the tokenizer adds at the start of a text is not added here.
        """
        return self.joined([Piece(text)], behind=True)

    def check_fits(self, text: str, positions: int) -> None:
        """Raise an ``InputError`` for a text that has more tokens than a model has positions.

        Of a long text only as much is encoded as is needed to know it; a text that is a little too
        long may pass.
        """
        if len(text) <= _USUAL_CHARACTERS * positions:
            return
        length = min(_LONGEST_PIECE, max(_SHORTEST_PIECE, _USUAL_CHARACTERS * positions))
        num_tokens = 0
        for start in range(0, len(text), length):
            piece = self(text[start : start + length])
            num_tokens += max(0, len(piece) - _TOKENS_AT_CUTS)
            if num_tokens > positions:
                raise InputError(
                    f"the text has more than {positions} tokens, and the model {positions} "
                    "positions: shorten the text, or split it into several"
                )

    def joined(self, pieces: Sequence[Piece], *, behind: bool = False) -> list[int]:
        """Token ids of one text that consists of several pieces.

        With ``behind``, the text follows another text, as in the method of that name.
        """
        text = "".join(piece.text for piece in pieces)
        if not any(piece.is_markup for piece in pieces):
            encode = self._as_text
            return encode_behind(encode, text, self._unknown) if behind else encode(text)
        (first, *others), written = self._fragments(pieces)
        encode = self._whole
        ids = encode_behind(encode, first, self._unknown) if behind else encode(first)
        for fragment in others:
            ids += encode_behind(encode, fragment, self._unknown)
        counts = Counter(ids)
        for token_id, name in self.control_tokens.items():
            # a normalizer may make one of other characters
            if token_id != self._unknown and counts[token_id] > written[name]:
                raise _no_tokens(name)
        return ids

    @cached_property
    def control_tokens(self) -> dict[int, str]:
        """The control tokens by id."""
        return control_tokens(self.tokenizer)

    def _whole(self, text: str) -> list[int]:
        """Token ids of a text, in which control tokens are encoded as such."""
        return self.tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=False, verbose=False
        )

    def _as_text(self, text: str) -> list[int]:
        """Token ids of a text, in which no control tokens are encoded as such."""
        ids = self.tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=True, verbose=False
        )
        return as_text(ids, text, self._whole, self.control_tokens, self._unknown)

    @property
    def _unknown(self) -> int | None:
        return unknown_id(self.tokenizer)

    def _fragments(self, pieces: Sequence[Piece]) -> tuple[list[str], Counter[str]]:
        """The text of all pieces, cut inside every control token that is not in one piece of
        markup, and how often it holds each of the others.
        """
        text = "".join(piece.text for piece in pieces)
        stops = list(accumulate(len(piece.text) for piece in pieces))
        pattern = _pattern(self.control_tokens.values())
        written: Counter[str] = Counter()
        fragments = []
        start = place = 0
        while (match := pattern.search(text, place)) is not None:
            number = bisect_right(stops, match.start())
            if pieces[number].is_markup and match.end() <= stops[number]:
                written[match[0]] += 1
                place = match.end()
                continue
            place = match.start() + 1
            fragments.append(text[start:place])
            start = place
        return [*fragments, text[start:]], written


def as_text(
    ids: list[int],
    text: str,
    encode: Encode,
    control: Mapping[int, str],
    unknown: int | None,
) -> list[int]:
    """Token ids of a text without control tokens: ``ids``, or new ids if these contain some.

    Tokenizers have an option not to search for special tokens. With it they still search for added
    tokens that are not marked as special, and some vocabularies contain control tokens as ordinary
    tokens. In these cases the text is cut inside each control token, and the fragments are encoded
    one by one.

    Raises:
        InputError: a control token remains, wherever the text is cut.
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
        raise _no_tokens(control[min(remaining)])
    return ids


def _no_tokens(name: str) -> InputError:
    return InputError(f"the tokenizer has no tokens for the text {name!r} but the control token")


def control_tokens(tokenizer: "PreTrainedTokenizerBase") -> dict[int, str]:
    """The control tokens by id: special tokens, and added tokens that the template writes."""
    template = tokenizer.chat_template or ""
    written = "\n".join(template.values()) if isinstance(template, dict) else str(template)
    tokens = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    named = getattr(tokenizer, "chat_control_tokens", None) or ()  # transformers 5.23
    for token_id, token in tokenizer.added_tokens_decoder.items():
        is_markup = token.content in named or (
            token.content in written and not token.content.isspace()
        )
        if token.special or is_markup:
            tokens[token_id] = token.content
    # a single character cannot be cut, so it is not treated as a control token
    return {token_id: content for token_id, content in tokens.items() if len(content) > 1}


def unknown_id(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """The id of the token for unknown characters; None if there is none."""
    return cast("int | None", tokenizer.unk_token_id)


def cut_control_tokens(text: str, contents: Iterable[str]) -> list[str]:
    """Consecutive fragments of a text, none of which spells a control token."""
    pattern = _pattern(contents)
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


def _pattern(contents: Iterable[str]) -> re.Pattern[str]:
    """Any of some texts, the longest at a place."""
    longest_first = sorted(contents, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")  # (?!) never matches


def encode_behind(encode: Encode, text: str, unknown: int | None = None) -> list[int]:
    """Token ids of a text that follows another text.

    The text is encoded after a placeholder, whose tokens are then removed. If a token spans the
    border, another placeholder is tried. If this happens with every placeholder, the text is
    encoded alone.
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
    """The token ids at the start of a text: BOS for many tokenizers, nothing for others.

    Args:
        bos: "auto": the tokens that the tokenizer adds; "always": these, or BOS if it adds none;
            "never": no tokens.

    Raises:
        InputError: bos is "always" and there is no BOS token, or the tokenizer also changes the
            tokens of the text.
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
    """The token ids that the tokenizer adds after a text, such as EOS; none for most tokenizers."""
    whole = tokenizer.encode("a")
    body = tokenizer.encode("a", add_special_tokens=False)
    return whole[len(opening_ids(tokenizer)) + len(body) :]


def check_text(text: str, name: str) -> None:
    """Raise an ``InputError`` for a text that UTF-8 cannot encode, such as half of an emoji."""
    match = _SURROGATE.search(text)
    if match is None:
        return
    code = ord(match[0])
    reason = f"character {match.start()} is U+{code:04X}, half of a surrogate pair"
    if code in _ESCAPED_BYTES:
        reason = f"character {match.start()} is the byte 0x{code - 0xDC00:02x}, which is not UTF-8"
    raise InputError(f"{name} is not Unicode text: {reason}")


def repaired(value: Any) -> Any:
    """The value with U+FFFD for every unpaired surrogate in its texts; lists and dicts included."""
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, Mapping):
        return {repaired(key): repaired(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [repaired(item) for item in value]
    return value
