"""Options given by name, checked against the fields they are for."""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from kvcat.errors import InputError

_WORDS = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text", type(None): "null"}


def check_options(kind: type, options: Mapping[str, Any], name: str) -> None:
    """Refuses options that a dataclass does not have, or values of another type than their field's."""
    hints = typing.get_type_hints(kind)
    fields = [field.name for field in dataclasses.fields(kind)]
    for option, value in options.items():
        if option not in fields:
            raise InputError(f"{name} has no option {option!r}; its options: {', '.join(fields) or 'none'}")
        if not _fits(value, hints[option]):
            raise InputError(f"{name}: {option} is {value!r}; it must be {_told(hints[option])}")


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in typing.get_args(hint))
    if origin is Literal:
        return value in typing.get_args(hint)
    if origin is tuple:
        parts = typing.get_args(hint)
        same = isinstance(value, tuple) and len(value) == len(parts)
        return same and all(_fits(x, part) for x, part in zip(value, parts, strict=True))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint) if isinstance(hint, type) else True


def _told(hint: Any) -> str:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_told(part) for part in parts)
    if origin is Literal:
        return " or ".join(repr(part) for part in parts)
    if origin is tuple:
        return f"[{', '.join(_told(part) for part in parts)}]"
    return _WORDS.get(hint, getattr(hint, "__name__", str(hint)))
