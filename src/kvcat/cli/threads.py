"""The number of processor threads that a command computes with."""

import math
import os
import sys
import time
from pathlib import Path

from kvcat.errors import InputError

THREADS_HELP = """common option:
  --threads INT>=1  Processor threads. Default: OMP_NUM_THREADS if the environment sets it, else all
                    processors for `kvcat train`, and those free at the start for other commands.
"""
_OPTION = "--threads"
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_CGROUP = Path("/sys/fs/cgroup")
_SAMPLES = 10
_SECONDS_BETWEEN = 0.002


def take_threads(name: str, arguments: list[str]) -> list[str]:
    """The arguments of a command without ``--threads``, after setting the number of threads.

    Without ``--threads`` the number of free processors is used, except in three cases where nothing
    is set: torch is already imported (a program that calls the command line sets threads itself);
    the environment sets a number; or the command is ``train``, because a resumed run has the same
    bits only with the same number of threads.

    Raises:
        InputError: a number of threads that is not a whole number of at least 1, or two numbers.
    """
    count, others = _split(name, arguments)
    is_torch_imported = "torch" in sys.modules
    if count is None:
        is_set = is_torch_imported or any(variable in os.environ for variable in _VARIABLES)
        asks_for_help = not {"-h", "--help"}.isdisjoint(arguments)
        if name == "train" or is_set or asks_for_help:
            return others
        count = free_processors()
    if is_torch_imported:
        import torch

        torch.set_num_threads(count)
    else:
        # torch reads it when it is imported, which needs seconds; some commands never import it
        os.environ["OMP_NUM_THREADS"] = str(count)
    return others


def _split(name: str, arguments: list[str]) -> tuple[int | None, list[str]]:
    """The number of threads that the arguments ask for, and the other arguments."""
    counts: list[str] = []
    others: list[str] = []
    unread = iter(arguments)
    for argument in unread:
        option, equals, value = argument.partition("=")
        if option != _OPTION:
            others.append(argument)
        elif equals:
            counts.append(value)
        else:
            counts.append(next(unread, ""))
    if not counts:
        return None, others
    is_number = counts[0].isascii() and counts[0].isdigit()
    if len(counts) > 1 or not is_number or int(counts[0]) < 1:
        words = " ".join(counts)
        raise InputError(f"{_OPTION} takes INT>=1, not {words} (see kvcat {name} --help)")
    return int(counts[0]), others


def free_processors() -> int:
    """Number of processors that this process may use and other processes leave idle; at least 1."""
    total = os.cpu_count() or 1
    idle = total - round(_busy_processors())
    return max(1, min(_allowed_processors(), idle))


def _allowed_processors() -> int:
    """Number of processors that the affinity and the control group of this process allow."""
    affinity = getattr(os, "sched_getaffinity", None)
    allowed = (os.cpu_count() or 1) if affinity is None else len(affinity(0))
    limit = _group_limit()
    return allowed if limit is None else min(allowed, max(1, math.floor(limit)))


def _group_limit() -> float | None:
    """Processors that the control group (version 1 or 2) grants; None without a limit."""
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (_CGROUP / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (_CGROUP / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:  # "max", or -1
        return None
    return int(quota) / int(period)


def _busy_processors() -> float:
    """Processors that others keep busy: the last minute's load, at most the threads running now."""
    try:
        load = os.getloadavg()[0]
    except (AttributeError, OSError):  # Windows
        return 0.0
    most_running = 0
    for _ in range(_SAMPLES):
        num_running = _running_threads()
        if num_running is None:
            return load
        most_running = max(most_running, num_running)
        time.sleep(_SECONDS_BETWEEN)
    return min(load, float(most_running))


def _running_threads() -> int | None:
    """Number of other threads that run or wait for a processor; None if the system has no count."""
    try:
        fields = Path("/proc/loadavg").read_text().split()
    except OSError:
        return None
    running = fields[3].partition("/")[0]
    return max(0, int(running) - 1)
