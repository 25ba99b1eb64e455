"""Options: the words that some allow, and how they are parsed from text and checked by type."""

import dataclasses
import json
import math
import numbers
import re
import types
import typing
from collections.abc import Mapping
from types import NoneType
from typing import Any, Literal

from kvcat.errors import InputError, did_you_mean

DocumentSupervision = Literal["reconstruction", "self"]
"""The text to which a document's cache is fitted: a copy of it, or the document itself."""

SuffixSupervision = Literal["suffix", "first-half", "reconstruction"]
"""The text to which a window's cache is fitted: its suffix, half of it, or its prefix repeated."""

Supervision = Literal[SuffixSupervision, DocumentSupervision]
"""The text to which a cache is fitted."""

Bos = Literal["auto", "always", "never"]
"""The tokens at the start of a text: the tokenizer's (auto), at least BOS, or none."""

NUM_FIRST = 16
"""First tokens of a document whose ids a compact cache records."""
SEAM_TOKENS = 8
"""First tokens of every later document that ``kvcat.compose`` encodes again, by default."""

_TYPE_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "text",
    NoneType: "null",
}
# JSON requires digits on both sides of the point
_SHORT_NUMBER = re.compile(r"[+-]?(\d+\.|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_PYTHON_WORDS = {"None": "null", "none": "null", "True": "true", "False": "false"}
_BUDGETS = re.compile(r"\bbudgets=([^,\]]+)")
_COMMA_OUTSIDE_BRACKETS = re.compile(r",(?![^\[]*\])")


def parse_spec(spec: str, what: str = "method") -> tuple[str, dict[str, Any]]:
    """The name and options in a text such as ``gradient,num_steps=20,init=random``.

    Values are JSON (numbers, true, false, null, lists). A value that is not JSON is text. A text
    with commas is written in brackets: ``gradient,init=[attention-matching,budgets=equal]``.
    Brackets cannot be nested.

    Args:
        what: word for such a text in error messages.

    Raises:
        InputError: there is no name, or an option has no value or occurs twice.
    """
    name, *assignments = _COMMA_OUTSIDE_BRACKETS.split(spec)
    if not name or "=" in name:
        raise InputError(f"{spec!r} names no {what}: it reads NAME,option=value,...")
    options: dict[str, Any] = {}
    for assignment in assignments:
        option, _, value = assignment.partition("=")
        if not option or not value:
            raise InputError(f"{assignment!r} in {what} {spec!r} is not of the form option=value")
        if option in options:
            raise InputError(f"option {option} is given twice in {what} {spec!r}")
        options[option] = _parse_value(value)
    return name, options


def check_options(kind: type, options: Mapping[str, Any], name: str) -> None:
    """Reject options that are not fields of a dataclass, and values of the wrong type.

    Raises:
        InputError: an option is unknown or has a wrong type.
    """
    hints = typing.get_type_hints(kind)
    check_typed_options({f.name: hints[f.name] for f in dataclasses.fields(kind)}, options, name)


def check_typed_options(hints: Mapping[str, Any], options: Mapping[str, Any], name: str) -> None:
    """Reject options that are not in ``hints``, and values of the wrong type.

    Args:
        hints: type of every option; a union for several types, a Literal for words.
        name: owner of the options, for error messages.

    Raises:
        InputError: an option is unknown or has a wrong type.
    """
    for option, value in options.items():
        if option not in hints:
            choices = ", ".join(hints) or "none"
            hint = did_you_mean(option, hints)
            raise InputError(f"{name} has no option {option!r}{hint}; its options: {choices}")
        try:
            typed_value(value, hints[option])
        except TypeError:
            wanted = describe_type(hints[option])
            hint = did_you_mean(str(value), words_of(hints[option]))
            raise InputError(f"{name}: {option} is {value!r}{hint}; it must be {wanted}") from None


def typed_fields(hints: Mapping[str, Any], content: Any, name: object) -> dict[str, Any]:
    """The entries of a file in the types of their fields.

    Args:
        hints: type of every entry, as in ``typed_value``.
        name: of the file, for error messages.

    Raises:
        InputError: an entry is missing, unknown or of a wrong type.
    """
    if not isinstance(content, Mapping):
        raise InputError(
            f"{name} is damaged: {str(content)[:80]!r} is not a table of {', '.join(hints)}"
        )
    for entry in [*hints, *content]:
        if entry not in content or entry not in hints:
            problem = "lacks" if entry in hints else "has an unknown entry"
            raise InputError(f"{name} is damaged or not of this version: it {problem} {entry!r}")
    typed = {}
    for entry, hint in hints.items():
        try:
            typed[entry] = typed_value(content[entry], hint)
        except TypeError:
            value = repr(content[entry])[:80]
            problem = f"its {entry} is {value}; it must be {describe_type(hint)}"
            raise InputError(f"{name} is damaged: {problem}") from None
    return typed


def typed_value(value: Any, hint: Any) -> Any:
    """A value from JSON, TOML or Python, converted to the type of an option.

    Whole numbers are accepted as numbers, and lists as tuples. Numbers must be finite.

    Args:
        hint: bool, int, float, str, None, a Literal, a tuple of these, a dict of texts and these,
            or a union of them.

    Raises:
        TypeError: the value does not have the type.
    """
    kind = typing.get_origin(hint) or hint
    arguments = typing.get_args(hint)
    if kind in (types.UnionType, typing.Union):
        return _typed_as_one_of(value, arguments)
    if kind is Literal and isinstance(value, str) and value in arguments:
        return value
    if kind is tuple and isinstance(value, tuple | list):
        return _typed_tuple(value, arguments)
    if kind is dict and isinstance(value, dict):
        return {
            typed_value(key, str): typed_value(each, arguments[1]) for key, each in value.items()
        }
    number: Any = value
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if kind is float and is_number:
        try:
            real = float(number)
        except OverflowError:  # a whole number beyond all of them
            raise TypeError from None
        if math.isfinite(real):
            return real
    if kind is int and is_number and isinstance(value, numbers.Integral):
        return int(number)
    if kind is str and isinstance(value, str):
        return value
    if kind in (bool, NoneType) and type(value) is kind:
        return value
    raise TypeError


def describe_type(hint: Any) -> str:
    """The type of an option in words, such as "a whole number or null"."""
    kind = typing.get_origin(hint) or hint
    arguments = typing.get_args(hint)
    if kind in (types.UnionType, typing.Union):
        return " or ".join(describe_type(argument) for argument in arguments)
    if kind is Literal:
        words = ", ".join(arguments)
        return f"one of {words}"
    if kind is tuple:
        count = "" if arguments[-1] is ... else f"{len(arguments)} "
        return f"a list of {count}values, each {describe_type(arguments[0])}"
    if kind is dict:
        return f"a table, each entry {describe_type(arguments[1])}"
    return _TYPE_WORDS[kind]


def budget_files(method: str) -> list[str]:
    """The files of budgets in the text of a method, also in brackets."""
    return [text for text in _BUDGETS.findall(method) if text not in ("equal", "adaptive")]


def words_of(hint: Any) -> list[str]:
    """The words that an option of this type allows."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return list(arguments)
    return [word for argument in arguments for word in words_of(argument)]


def _typed_as_one_of(value: Any, hints: tuple[Any, ...]) -> Any:
    for hint in hints:
        try:
            return typed_value(value, hint)
        except TypeError:
            continue
    raise TypeError


def _typed_tuple(values: tuple[Any, ...] | list[Any], hints: tuple[Any, ...]) -> tuple[Any, ...]:
    if hints[-1] is ...:
        hints = hints[:1] * len(values)
    if len(values) != len(hints):
        raise TypeError
    return tuple(typed_value(value, hint) for value, hint in zip(values, hints, strict=True))


def _parse_value(text: str) -> Any:
    try:
        value = json.loads(_PYTHON_WORDS.get(text, text))
    except ValueError:
        if _SHORT_NUMBER.fullmatch(text):
            return float(text)
        is_bracketed = text[0] == "[" and text[-1] == "]"
        return text[1:-1] if is_bracketed else text
    return tuple(value) if isinstance(value, list) else value
