"""Patience with a network that fails now and then."""

import logging
import lzma
import time
import zlib
from collections.abc import Callable
from typing import TypeVar

from kvcat.errors import InputError

WAITS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0)  # seconds before each retry; after the last the reading ends

_FOR_EVER = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_CLIENTS = frozenset(("aiohttp", "httpcore", "httpx", "httpx2", "requests", "urllib3"))
_PASSING_STATUS = frozenset((408, 425, 429))

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Retries:
    """Waits after each failure in a row, longer each time, and gives up after the last of ``WAITS``.

    Args:
        what: what is being read, for the messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._failures = 0

    def succeeded(self) -> None:
        """Something was read: the count starts anew."""
        self._failures = 0

    def wait(self, error: Exception) -> None:
        """Say what failed on standard error and wait.

        Raises:
            InputError: one failure too many.
        """
        if self._failures == len(WAITS):
            raise InputError(
                f"cannot read {self._what}: the network stays away, {len(WAITS)} retries in {sum(WAITS):.0f} s "
                f"({one_line(error)})"
            ) from error
        seconds = WAITS[self._failures]
        self._failures += 1
        _log.warning(
            "reading %s failed (%s); retry %d of %d in %g s",
            self._what, one_line(error), self._failures, len(WAITS), seconds,
        )  # fmt: skip
        time.sleep(seconds)


def with_retries(what: str, call: Callable[[], _T]) -> _T:
    """What ``call`` returns; it is called again while it fails for a passing reason.

    Raises:
        InputError: it kept failing.
    """
    retries = Retries(what)
    while True:
        try:
            return call()
        except Exception as error:
            if not passing(error):
                raise
            retries.wait(error)


def passing(error: Exception) -> bool:
    """Whether an error of a remote read may be gone a moment later."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int):
        return status in _PASSING_STATUS or status >= 500
    if isinstance(error, (InputError, *_FOR_EVER)):
        return False
    return isinstance(error, (OSError, EOFError)) or _module(error) in _CLIENTS or _is_cut(error)


def unreadable(error: Exception) -> bool:
    """Whether the fault is in the file that was read, not in the program that reads it."""
    return isinstance(error, (OSError, EOFError, zlib.error, lzma.LZMAError)) or _is_cut(error)


def one_line(error: BaseException) -> str:
    """The kind of an error and the beginning of what it says."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _module(error: Exception) -> str:
    return type(error).__module__.partition(".")[0]


def _is_cut(error: Exception) -> bool:
    """Whether pyarrow found a file damaged, as one cut short in transit is too."""
    return any(kind.__name__ == "ArrowInvalid" for kind in type(error).__mro__)
