"""The exception for a user's mistake, and lines that describe errors."""

import sys
from collections.abc import Callable
from pathlib import Path


class InputError(ValueError):
    """A user's mistake: one line that names the offending value, raised before any heavy work.

    The command line prints the line and exits with code 2. Every other exception is a bug and shows
    its traceback.
    """


def one_line(error: BaseException) -> str:
    """The kind of an error and the beginning of its message, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def check_least(least: int, **settings: int) -> None:
    """Raise an ``InputError`` for a setting whose value is below the least."""
    for name, value in settings.items():
        if value < least:
            raise InputError(f"{name} is {value}; it must be at least {least}")


def run_script(main: Callable[[], object]) -> None:
    """Run the main function of a script; a user's mistake is one line and the exit code 2."""
    try:
        main()
    except InputError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)
