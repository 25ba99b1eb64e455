"""The number of processor threads that a command uses."""

import os
import sys

from kvcat.errors import InputError

THREADS_HELP = """common option:
  --threads INT>=1  Number of processor threads; by default OMP_NUM_THREADS, or all processors.
"""
_OPTION = "--threads"


def take_threads(name: str, arguments: list[str]) -> list[str]:
    """The arguments of a command without ``--threads``, which is applied.

    Raises:
        InputError: the value is not a whole number of at least 1, or occurs twice.
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
        if option != _OPTION:
            others.append(argument)
        else:
            words.append(value if equals else next(waiting, ""))
    if not words:
        return None, others
    if len(words) > 1 or not words[0].isascii() or not words[0].isdigit() or int(words[0]) < 1:
        raise InputError(f"{_OPTION} takes INT>=1, not {' '.join(words)} (see kvcat {name} --help)")
    return int(words[0]), others
