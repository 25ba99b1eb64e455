"""Worker processes: in order, ahead of being asked, and never left behind."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from kvcat.data import ReadingStopped, workers
from kvcat.data.shards import local_shards
from kvcat.data.workers import ProcessWorker
from kvcat.errors import InputError

PARENT = """
import signal
import time
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs with it ignored
from kvcat.data.workers import ProcessWorker
worker = ProcessWorker(time.sleep)
worker.send(0)
worker.receive()
worker.send(60)
print(worker.pid, flush=True)
worker.receive()
"""


def running(pid):
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_answers_come_in_order_and_before_they_are_asked_for():
    worker = ProcessWorker(abs)
    for number in range(-50, 50):
        worker.send(number)
    assert [worker.receive() for _ in range(100)] == [abs(number) for number in range(-50, 50)]
    for number in range(5):  # what exceeds a pipe's buffer, in both directions
        worker.send(-number)
    worker.close()
    assert not running(worker.pid)


def test_a_mistake_in_a_worker_is_told_here_and_a_failure_with_its_traceback():
    worker = ProcessWorker(local_shards)
    worker.send("nowhere/at/all")
    with pytest.raises(InputError, match="no such text file or folder: nowhere/at/all"):
        worker.receive()
    worker.send(3)
    with pytest.raises(RuntimeError, match="a data worker failed:\nTraceback"):
        worker.receive()
    worker.close()


def test_the_signals_that_end_a_run_leave_the_workers_to_their_parent_and_a_death_is_told():
    worker = ProcessWorker(abs)
    worker.send(-1)
    assert worker.receive() == 1
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(worker.pid, number)
    worker.send(-2)
    assert worker.receive() == 2
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="a data worker died \\(exit code -9"):
        worker.receive()
    worker.close()


def test_closing_ends_a_worker_in_the_middle_of_a_request():
    worker = ProcessWorker(time.sleep)
    worker.send(0)
    worker.receive()
    worker.send(60)
    started = time.monotonic()
    worker.close()
    assert time.monotonic() - started < 2
    assert not running(worker.pid)


def test_waiting_ends_when_the_caller_stops(monkeypatch):
    monkeypatch.setattr(workers, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(workers, "POLL_SECONDS", 0.05)
    worker = ProcessWorker(time.sleep, lambda: True)
    worker.send(60)
    with pytest.raises(ReadingStopped):
        worker.receive()
    worker.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_no_worker_outlives_its_parent(how):
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    assert running(pid)
    parent.send_signal(how)
    parent.communicate(timeout=20)
    deadline = time.monotonic() + 10
    while running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not running(pid)


def test_a_worker_starts_without_torch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "random.py").write_text("raise SystemExit('the folder of the run is not on the path')")
    worker = ProcessWorker(partial(eval, "[m for m in ('torch', 'transformers') if m in __import__('sys').modules]"))
    worker.send({})
    assert worker.receive() == []
    worker.close()
