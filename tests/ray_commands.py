"""Commands of kvcat on a Ray cluster, and the death of a worker (for tests)."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def worker_pids(name):
    """The processes of this machine that run an actor or a task of Ray."""
    pids = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                command = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if command.startswith(b"ray::") and name in command:
                pids.append(int(folder.name))
    return pids


def start(address, *arguments):
    """A command of kvcat as from a shell that names the cluster in RAY_ADDRESS."""
    environment = {**os.environ, "RAY_ADDRESS": address}
    command = [sys.executable, "-m", "kvcat", *map(str, arguments), "--ray", "auto"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)


def kill_a_worker(name, is_in_the_middle, command):
    """Kill one worker with SIGKILL when the command is in the middle of its work."""
    while command.poll() is None:
        pids = worker_pids(name)
        if is_in_the_middle() and pids:
            os.kill(pids[0], signal.SIGKILL)
            return
        time.sleep(0.02)
    raise AssertionError(f"the command ended before: {command.communicate()}")
