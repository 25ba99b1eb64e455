"""The number of processor threads that a command uses."""

import math
import os
import sys
import time
from pathlib import Path

from kvcat.errors import InputError

THREADS_HELP = """common option:
  --threads INT>=1  Number of processor threads; by default the number of processors that are free
                    at the start (`kvcat train`: all processors). If the environment sets
                    OMP_NUM_THREADS, that number is the default.
"""
THREADS = "--threads"
_MOST_THREADS = max(1024, os.cpu_count() or 1)  # torch fails, or makes so many, for a slip
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_SAMPLES = 10
_SECONDS_BETWEEN = 0.002


def take_threads(name: str, arguments: list[str]) -> list[str]:
    """The arguments of a command without ``--threads``, which is applied.

    Without ``--threads``, the number of free processors is applied, with three exceptions. If torch
    was already imported, a program calls the command line and sets threads itself. If the
    environment sets a number, that number counts. ``train`` uses all processors, because a resumed
    run is bitwise equal only with the same number of threads.

    Raises:
        InputError: the value is not a whole number from 1 to 1024 (or the number of processors,
            if that is larger), or occurs twice.
    """
    count, others = _split(name, arguments)
    if count is None:
        is_set = "torch" in sys.modules or any(variable in os.environ for variable in VARIABLES)
        if name == "train" or is_set or {"-h", "--help"} & set(arguments):
            return others
        count = free_processors()
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


def free_processors(root: Path = Path("/")) -> int:
    """The number of processors that this process may use and that are idle, at least 1.

    ``root`` contains the system's files: proc/loadavg, and control groups in sys/fs/cgroup.
    """
    total = os.cpu_count() or 1
    idle = total - round(_busy_processors(root / "proc" / "loadavg"))
    return max(1, min(_allowed_processors(root / "sys" / "fs" / "cgroup"), idle))


def _allowed_processors(cgroup: Path) -> int:
    """The number of processors that affinity and control group allow this process."""
    affinity = getattr(os, "sched_getaffinity", None)
    allowed = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    limit = _group_limit(cgroup)
    return allowed if limit is None else min(allowed, max(1, math.floor(limit)))


def _group_limit(cgroup: Path) -> float | None:
    """The number of processors that the control group allows; None without a limit.

    Linux has two versions of the files with this limit.
    """
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:  # "max", or -1
        return None
    return int(quota) / int(period)


def _busy_processors(loadavg: Path) -> float:
    """The number of processors that other threads use.

    It is the load of the last minute, but at most the number of threads that run or wait now,
    because the load still includes commands that have just ended.
    """
    try:
        load = os.getloadavg()[0]
    except (AttributeError, OSError):  # Windows
        return 0.0
    running = []
    for _ in range(_SAMPLES):
        now = _running_threads(loadavg)
        if now is None:
            return load
        running.append(now)
        time.sleep(_SECONDS_BETWEEN)
    return min(load, float(max(running)))


def _running_threads(loadavg: Path) -> int | None:
    """The number of threads that run or wait for a processor, without this one; None if unknown."""
    try:
        fields = loadavg.read_text().split()
    except OSError:
        return None
    running = fields[3].partition("/")[0]
    return max(0, int(running) - 1)
