"""The number of processor threads that a command uses."""

import os
import sys

from kvcat.errors import InputError

THREADS_HELP = """common option:
  --threads INT>=1  Processor threads (default: OMP_NUM_THREADS, or all).
"""
THREADS = "--threads"
_MOST_THREADS = max(1024, os.cpu_count() or 1)  # torch fails, or makes so many, for a slip


def take_threads(name: str, arguments: list[str]) -> list[str]:
    """The arguments of a command without ``--threads``, which is applied.

    Raises:
        InputError: the value is not a whole number from 1 to 1024 (or the number of processors,
            if that is larger), or occurs twice.
    """
    count, others = _split(name, arguments)
    if count is None:
        return others
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(count)
    else:
        # torch reads it on import; importing torch here would slow down commands that do not need
        # it
        os.environ["OMP_NUM_THREADS"] = str(count)
    return others


def _split(name: str, arguments: list[str]) -> tuple[int | None, list[str]]:
    """The number of threads in the arguments (None: not named), and the other arguments."""
    words: list[str] = []
    others: list[str] = []
    waiting = iter(arguments)
    for argument in waiting:
        option, equals, value = argument.partition("=")
        if option != THREADS:
            others.append(argument)
        else:
            words.append(value if equals else next(waiting, ""))
    if not words:
        return None, others
    is_number = len(words) == 1 and words[0].isascii() and words[0].isdigit()
    # the length first: Python does not convert texts of thousands of digits
    if not is_number or len(words[0]) > 9 or not 1 <= int(words[0]) <= _MOST_THREADS:
        shown = " ".join(words)[:40]
        raise InputError(
            f"{THREADS} takes INT from 1 to {_MOST_THREADS}, not {shown} (see kvcat {name} --help)"
        )
    return int(words[0]), others
