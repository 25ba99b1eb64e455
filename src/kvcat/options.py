"""Names with options, ``NAME,option=value,...``, of methods and policies: parsed, and checked by
type.
"""

import dataclasses
import json
import math
import re
import typing
from collections.abc import Mapping
from types import NoneType
from typing import Any

from kvcat.errors import InputError

_TYPE_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "text",
    NoneType: "null",
}
_PYTHON_WORDS = {"None": "null", "none": "null", "True": "true", "False": "false"}
_COMMA_OUTSIDE_BRACKETS = re.compile(r",(?![^\[]*\])")


def parse_spec(spec: str, what: str = "method") -> tuple[str, dict[str, Any]]:
    """Name and options of ``NAME,option=value,...``, such as ``gradient,num_steps=20,init=random``.

    Values are JSON (numbers, true, false, null, lists). A value that is not JSON is text. Brackets
    hold text with commas together: ``gradient,init=[attention-matching,budgets=equal]``. They do
    not nest.

    Args:
        spec: the text.
        what: the word for it in error messages.

    Raises:
        InputError: no name, an option without a value, or an option that occurs twice.
    """
    name, *assignments = _COMMA_OUTSIDE_BRACKETS.split(spec)
    if not name or "=" in name:
        raise InputError(f"{spec!r} names no {what}: it reads NAME,option=value,...")
    options: dict[str, Any] = {}
    for assignment in assignments:
        option, _, value = assignment.partition("=")
        if not option or not value:
            raise InputError(f"{assignment!r} in {what} {spec!r} is no option=value")
        if option in options:
            raise InputError(f"option {option} is given twice in {what} {spec!r}")
        options[option] = _parse_value(value)
    return name, options


def check_options(kind: type, options: Mapping[str, Any], name: str) -> None:
    """Reject options that a dataclass does not have, and values of another type than the field's.

    Raises:
        InputError: the first such option, with the options that exist or the type wanted.
    """
    hints = typing.get_type_hints(kind)
    check_typed_options({f.name: hints[f.name] for f in dataclasses.fields(kind)}, options, name)


def check_typed_options(hints: Mapping[str, Any], options: Mapping[str, Any], name: str) -> None:
    """Reject options that ``hints`` does not name, and values that do not fit the hint.

    Args:
        hints: type of every option; several types as a union, words as a Literal.
        options: values by option.
        name: whose options they are, for error messages.

    Raises:
        InputError: the first such option, with the options that exist or the type wanted.
    """
    for option, value in options.items():
        if option not in hints:
            choices = ", ".join(hints) or "none"
            raise InputError(f"{name} has no option {option!r}; its options: {choices}")
        kinds = typing.get_args(hints[option]) or (hints[option],)
        if not any(_fits(value, kind) for kind in kinds):
            wanted = " or ".join(_TYPE_WORDS.get(kind, repr(kind)) for kind in kinds)
            raise InputError(f"{name}: {option} is {value!r}; it must be {wanted}")


def _parse_value(text: str) -> Any:
    try:
        value = json.loads(_PYTHON_WORDS.get(text, text))
    except ValueError:
        is_bracketed = text[0] == "[" and text[-1] == "]"
        return text[1:-1] if is_bracketed else text
    return tuple(value) if isinstance(value, list) else value


def _fits(value: Any, kind: Any) -> bool:
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    is_literal_word = value == kind
    return type(value) is kind or is_literal_word
