"""Compression methods as a command line names them: which there are, and how options follow a name.

Nothing here imports torch, so that help texts and mistakes need no second.
"""

import json
from pathlib import Path
from typing import Any

from kvcat.errors import InputError

_FOLDERS = ("methods", "eviction")


def method_names() -> list[str]:
    """The names of all methods: a method's file in ``kvcat.compress`` has its name, with "_" for "-"."""
    room = Path(__file__).parent / "compress"
    files = [path.stem for folder in _FOLDERS for path in sorted((room / folder).glob("[!_]*.py"))]
    return [name.replace("_", "-") for name in files]


def parse_method(spec: str) -> tuple[str, dict[str, Any]]:
    """Name and options of ``NAME,option=value,...``, such as ``gradient,num_steps=20,init=random``.

    Values are JSON (numbers, true, false, null, lists); what is not JSON is text. Brackets hold text with commas
    together: ``gradient,init=[attention-matching,budgets=equal]``.

    Args:
        spec: as above; options may be missing.

    Raises:
        InputError: no name, an option without a value, or one that is given twice.
    """
    name, *parts = _split(spec)
    if not name or "=" in name:
        raise InputError(f"{spec!r} names no method: it reads NAME,option=value,...")
    options: dict[str, Any] = {}
    for part in parts:
        option, equals, value = part.partition("=")
        if not equals or not option or not value:
            raise InputError(f"{part!r} in method {spec!r} is no option=value")
        if option in options:
            raise InputError(f"option {option} is given twice in method {spec!r}")
        options[option] = _value(value)
    return name, options


def _split(spec: str) -> list[str]:
    """Parts between commas; commas within brackets do not count."""
    parts, depth = [""], 0
    for letter in spec:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _value(text: str) -> Any:
    try:
        value = json.loads({"None": "null", "none": "null", "True": "true", "False": "false"}.get(text, text))
    except ValueError:
        return text[1:-1] if text[0] == "[" and text[-1] == "]" else text
    return tuple(value) if isinstance(value, list) else value
