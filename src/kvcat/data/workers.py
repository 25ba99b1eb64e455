"""Worker processes that answer requests in order, and end with the process that started them.

A worker is a fresh interpreter, neither forked (tokenizers and BLAS hold threads) nor spawned by multiprocessing (which
runs the main script again). It hears of its parent's end, however that came, by the end of the connection.
"""

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from multiprocessing import connection as connections
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from kvcat.errors import InputError

Handler = Callable[[Any], Any]

POLL_SECONDS = 0.5
PATIENCE_SECONDS = 10.0  # how long a reader that was asked to stop still waits for what is under way
END_SECONDS = 2.0


class ReadingStopped(Exception):  # noqa: N818 - an end, not an error
    """Waiting for data ended because the caller's ``stop`` said so."""


class InProcessWorker:
    """Computes each answer when it is asked for.

    Args:
        handler: called with each request.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._requests: deque[Any] = deque()

    def send(self, request: Any) -> None:
        """Keep a request."""
        self._requests.append(request)

    def receive(self) -> Any:
        """The answer to the oldest request."""
        return self._handler(self._requests.popleft())

    def close(self) -> None:
        """Drop what was not answered."""
        self._requests.clear()


class ProcessWorker:
    """Computes answers in a process of its own, ahead of their being asked for.

    Args:
        handler: called with each request in the other process; what it imports decides how fast that starts.
        stop: asked while an answer is waited for; once it says so for ten seconds, the waiting ends.
    """

    def __init__(self, handler: Handler, stop: Callable[[], bool] | None = None) -> None:
        if os.name != "posix":
            raise InputError("worker processes need a POSIX system; read with 0 workers")
        ours, theirs = connections.Pipe()
        home = str(Path(__file__).resolve().parents[2])
        paths = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
        environment = {
            **os.environ, "PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = f"from kvcat.data.workers import serve; serve({theirs.fileno()})"
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", command],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment,
            )
        self._stop, self._connection, self._process = stop, ours, process
        self._end = weakref.finalize(self, _end, ours, process)
        self.send(handler)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def send(self, request: Any) -> None:
        """Hand over a request; the process keeps those it has not come to.

        Raises:
            RuntimeError: the process has died.
        """
        try:
            self._connection.send(request)
        except OSError:
            raise self._death() from None

    def receive(self) -> Any:
        """The answer to the oldest open request, waited for.

        Raises:
            InputError: as the handler raised it.
            ReadingStopped: ``stop`` said so, and no answer came.
            RuntimeError: the handler failed, or the process has died.
        """
        asked_at: float | None = None
        while not self._connection.poll(POLL_SECONDS):
            if self._stop is not None and self._stop():
                asked_at = asked_at or time.monotonic()
                if time.monotonic() - asked_at > PATIENCE_SECONDS:
                    raise ReadingStopped("no data came while the run was asked to stop")
        try:
            kind, value = self._connection.recv()
        except (EOFError, OSError):
            raise self._death() from None
        if kind == "refused":
            raise InputError(value)
        if kind == "failed":
            raise RuntimeError(f"a data worker failed:\n{value}")
        return value

    def close(self) -> None:
        """End the process, in the middle of a request too."""
        self._end()

    def _death(self) -> RuntimeError:
        try:
            code: object = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            code = "unknown"
        return RuntimeError(f"a data worker died (exit code {code}; -9 is often a lack of memory)")


def _end(connection: Any, process: "subprocess.Popen[bytes]") -> None:
    connection.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


Worker = InProcessWorker | ProcessWorker  # answers requests in the order in which they were sent


def make_worker(handler: Handler, *, process: bool, stop: Callable[[], bool] | None = None) -> Worker:
    """A worker around a picklable handler, in a process of its own or in this one."""
    return ProcessWorker(handler, stop) if process else InProcessWorker(handler)


def serve(descriptor: int) -> None:
    """What a worker process does: answer until the connection ends.

    The signals that end a run are the parent's to act on: it may still need what is under way.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    connection = connections.Connection(descriptor)
    handler = connection.recv()
    requests: SimpleQueue[Any] = SimpleQueue()
    answers: SimpleQueue[tuple[str, Any]] = SimpleQueue()
    threading.Thread(target=_receive, args=(connection, requests), daemon=True).start()
    threading.Thread(target=_send, args=(connection, answers), daemon=True).start()
    while True:
        answers.put(_answer(handler, requests.get()))


def _answer(handler: Handler, request: Any) -> tuple[str, Any]:
    try:
        return "done", handler(request)
    except InputError as error:
        return "refused", str(error)
    except Exception:
        return "failed", traceback.format_exc()


def _receive(connection: Any, requests: "SimpleQueue[Any]") -> None:
    """Take requests as they come, so that the sender never waits; the end of the connection ends the process."""
    try:
        while True:
            requests.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)


def _send(connection: Any, answers: "SimpleQueue[tuple[str, Any]]") -> None:
    try:
        while True:
            connection.send(answers.get())
    except OSError:
        os._exit(0)
