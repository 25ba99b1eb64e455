"""Stopping on a signal, between two steps."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stopped(Exception):  # noqa: N818 (not an error)
    """A signal ended the run after its state was saved.

    Args:
        signum: the signal's number.
        message: where the run stands.
    """

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """A list that a SIGTERM or SIGINT appends its number to, while the block runs; empty off the main thread.

    The second signal of a kind does what it would do without the block: a second Ctrl-C ends the program at once.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def note(signum: int, _: FrameType | None) -> None:
        received.append(signum)
        signal.signal(signum, previous[signal.Signals(signum)])

    previous = {s: signal.signal(s, note) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
