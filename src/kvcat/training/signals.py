"""SIGTERM and SIGINT as requests to save a run and stop."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stopped(Exception):  # noqa: N818 (not an error)
    """A signal of this number ended the run after its state was saved."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum


@contextmanager
def stop_requests(one_request: float = 2.0) -> Iterator[list[int]]:
    """A list to which SIGTERM and SIGINT append their numbers during the block.

    It stays empty outside the main thread. Signals within ``one_request`` seconds of the first one
    count as one with it, because torchrun may forward a signal that its processes already received.
    A later signal raises ``Stopped`` at once, even if the program waits for data.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    first_at: float | None = None

    def note(signum: int, _: FrameType | None) -> None:
        nonlocal first_at
        now = time.monotonic()
        if first_at is None:
            first_at = now
        received.append(signum)
        if now - first_at > one_request:
            raise Stopped(signum, "stopped at once; the checkpoints so far are in place")

    handlers = {signum: signal.signal(signum, note) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
