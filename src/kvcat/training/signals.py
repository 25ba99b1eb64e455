"""SIGTERM and SIGINT as requests to save a run and stop."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ONE_REQUEST = 2.0  # seconds within which signals count as one


class Stopped(Exception):  # noqa: N818 (not an error)
    """A signal of this number ended the run after its state was saved."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """A list to which SIGTERM and SIGINT append their numbers during the block.

    It stays empty outside the main thread. A signal that arrives more than two seconds after the
    first one raises ``Stopped`` at once, even if the program waits for data. Signals within two
    seconds count as one, because torchrun may forward a signal that its processes already received.
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
        if now - first_at > _ONE_REQUEST:
            raise Stopped(signum, "stopped at once; the checkpoints so far are in place")

    handlers = {signum: signal.signal(signum, note) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
