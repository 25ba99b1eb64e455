"""The exception for a user's mistake, and lines that describe errors."""

import math
import numbers
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
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
    """The number as an ``int``; ``InputError`` for a value that is not a whole number.

    True and 1.0 are none; a whole number of numpy is one.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InputError(f"{name} is {value!r}; it must be a whole number")
    return int(value)


def finite(name: str, value: Any) -> float:
    """The number as a ``float``; ``InputError`` for a value that is not a finite number."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise InputError(f"{name} is {value!r}; it must be a finite number")
    return float(value)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """A hint at the choice that a mistyped word resembles, such as " (did you mean --keep?)".

    It is empty if the word resembles none.
    """
    known = [choice for choice in choices if choice != word]
    close = get_close_matches(word, known, n=1, cutoff=0.7)
    longer = [choice for choice in known if len(word) > 2 and choice.startswith(word)]
    meant = close or longer[:1]
    return f" (did you mean {meant[0]}?)" if meant else ""


def unknown_name(kind: str, name: str, choices: Iterable[str]) -> InputError:
    """The error for a name of some kind, such as a compressor, that is not among the choices."""
    known = list(choices)
    hint = did_you_mean(name, known)
    return InputError(f"no {kind} {name!r}{hint}; there are {', '.join(known)}")


def check_one_of(setting: str, value: object, choices: Iterable[str]) -> None:
    """Raise an ``InputError`` for the value of a setting that is not among the choices."""
    known = list(choices)
    if value in known:
        return
    hint = did_you_mean(str(value), known)
    raise InputError(f"{setting} must be one of {', '.join(known)}, not {value!r}{hint}")


def check_least(least: int, **settings: int) -> None:
    """Raise an ``InputError`` for a setting that is not a whole number, or is below the least."""
    for name, value in settings.items():
        if whole(name, value) < least:
            raise InputError(f"{name} is {value}; it must be at least {least}")


def check_in(interval: str, **settings: Any) -> None:
    """Raise an ``InputError`` for a setting that is not a number in an interval.

    Args:
        interval: such as "(0, 1]" or "[0, inf)"; infinity itself is never in it.
        settings: values by name.
    """
    low, high = (float(end) for end in interval[1:-1].split(","))
    if math.isinf(high):
        wanted = f"at least {low:g}" if interval[0] == "[" else f"larger than {low:g}"
    else:
        wanted = f"in {interval}"
    for name, value in settings.items():
        number = finite(name, value)
        is_open_end = (interval[0] == "(" and number == low) or (
            interval[-1] == ")" and number == high
        )
        if not low <= number <= high or is_open_end:
            raise InputError(f"{name} must be {wanted}, not {value}")


def check_shard(index: int, count: int) -> None:
    """Raise an ``InputError`` for a part of the work that does not exist."""
    if not 0 <= index < count:
        raise InputError(f"shard {index} of {count}: shards are 0 to {count - 1}")


def check_kind(kind: type | tuple[type, ...], wanted: str, **arguments: Any) -> None:
    """Raise an ``InputError`` for an argument of another type.

    Args:
        kind: the type, or several.
        wanted: the type in words, such as "a text".
        arguments: values by name.
    """
    for name, value in arguments.items():
        if not isinstance(value, kind):
            is_short = value is None or isinstance(value, str | bytes | int | float)
            shown = repr(value)[:60] if is_short else f"a {type(value).__name__}"
            raise InputError(f"{name} is {shown}; it must be {wanted}")


def run_script(main: Callable[[], object]) -> None:
    """Run the main function of a script; a user's mistake is one line and the exit code 2."""
    try:
        main()
    except InputError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)
