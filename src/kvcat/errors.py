"""The exception for a user's mistake, and lines that describe errors."""

import math
import numbers
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


class InputError(ValueError):
    """A user's mistake: one line that names the offending value, raised before any heavy work.

    The command line prints the line and exits with code 2. Every other exception is a bug and shows
    its traceback.
    """


def one_line(error: BaseException) -> str:
    """The kind of an error and the beginning of its message, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def whole(name: str, value: Any) -> int:
    """The number as an ``int``; ``InputError`` for a value that is no whole number.

    True and 1.0 are none; a whole number of numpy is one.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InputError(f"{name} is {value!r}; it must be a whole number")
    return int(value)


def finite(name: str, value: Any) -> float:
    """The number as a ``float``; ``InputError`` for a value that is no finite number."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise InputError(f"{name} is {value!r}; it must be a finite number")
    return float(value)


def check_least(least: int, **settings: int) -> None:
    """Raise an ``InputError`` for a setting that is no whole number, or is below the least."""
    for name, value in settings.items():
        if whole(name, value) < least:
            raise InputError(f"{name} is {value}; it must be at least {least}")


def run_script(main: Callable[[], object]) -> None:
    """Run the main function of a script; a user's mistake is one line and the exit code 2."""
    try:
        main()
    except InputError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)
