"""How many processor threads a command computes with."""

import math
import os
import sys
import time
from pathlib import Path

from kvcat.errors import InputError

THREADS_HELP = """common option:
  --threads INT>=1  Processor threads; by default as many as processors are free at the start, but
                    for `kvcat train` all of them. OMP_NUM_THREADS in the environment comes first.
"""
_OPTION = "--threads"
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_SAMPLES = 10
_SECONDS_BETWEEN = 0.002


def take_threads(name: str, arguments: list[str]) -> list[str]:
    """The arguments of a command without ``--threads``, which is put into effect.

    Where it is not given, the number of free processors is, unless torch was imported before (a
    program that calls the command line sets threads itself), the environment sets a number, or the
    command is ``train``: a resumed run has the same bits only with the same number of threads.

    Raises:
        InputError: not a whole number of at least 1, or given twice.
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
        # torch reads it when it is imported, which takes seconds and some commands do not need
        os.environ["OMP_NUM_THREADS"] = str(count)
    return others


def _split(name: str, arguments: list[str]) -> tuple[int | None, list[str]]:
    """The number of threads that the arguments ask for, and the other arguments."""
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


def free_processors(root: Path = Path("/")) -> int:
    """Processors that this process may use and others leave idle, at least 1.

    ``root`` has the system's files: proc/loadavg, and those of control groups in sys/fs/cgroup.
    """
    total = os.cpu_count() or 1
    idle = total - round(_busy_processors(root / "proc" / "loadavg"))
    return max(1, min(_allowed_processors(root / "sys" / "fs" / "cgroup"), idle))


def _allowed_processors(cgroup: Path) -> int:
    """Processors that this process may use: its affinity, and the limit of its control group."""
    affinity = getattr(os, "sched_getaffinity", None)
    allowed = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    limit = _group_limit(cgroup)
    return allowed if limit is None else min(allowed, max(1, math.floor(limit)))


def _group_limit(cgroup: Path) -> float | None:
    """Processors that the control group grants; None without a limit.

    Linux has two versions of the files that say so.
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
    """Processors that others keep busy.

    It is the load of the last minute, but not more than run or wait at this moment: a command that
    ended just now has left its load behind.
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
    """Threads that run or wait for a processor, without this one; None where it is not known."""
    try:
        fields = loadavg.read_text().split()
    except OSError:
        return None
    running = fields[3].partition("/")[0]
    return max(0, int(running) - 1)
