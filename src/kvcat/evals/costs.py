"""What compression and answers from a compact cache take: seconds, memory, tokens per second."""

import ctypes
import ctypes.util
import re
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch

from kvcat.cache import CompactCache
from kvcat.compress import Trace
from kvcat.evals.task import positions_of

MAX_RUNS, MAX_SECONDS = 3, 2.0
PROMPT, ANSWER = 32, 16  # tokens of the answers that are timed
Step = int | None
T = TypeVar("T")


def measure(
    make: Callable[[], Iterator[tuple[Step, CompactCache]]], use: Callable[[CompactCache], T], *, cuda: bool = False
) -> list[tuple[dict[str, Any], T]]:
    """Cost of the caches that ``make`` yields, each with what ``use`` made of it outside the measurement.

    A cost is the cache's step, its bytes, and seconds and peak memory until then. Work of at most ``MAX_SECONDS``
    runs ``MAX_RUNS`` times; seconds are the median of the runs, memory is the highest. The first run of a process
    is slower than the rest: call ``make`` once before. ``peak_mib`` is the highest memory above that before the
    work, from the same process: allocated by torch on CUDA; resident on Linux, after the C library has given free
    memory back, so that earlier work changes it little; otherwise None.
    """
    used, runs, spent = [], list[list[dict[str, Any]]](), 0.0
    while not runs or (len(runs) < MAX_RUNS and spent < MAX_SECONDS):
        costs = []
        for cache, cost in _timed(make, cuda):
            costs.append(cost)
            if not runs:
                used.append(use(cache))
        runs.append(costs)
        spent += costs[-1]["seconds"]
    for cost, *same in zip(*runs, strict=True):
        peaks = [own["peak_mib"] for own in (cost, *same) if own["peak_mib"] is not None]
        seconds = statistics.median(own["seconds"] for own in (cost, *same))
        cost.update(seconds=seconds, peak_mib=max(peaks, default=None), runs=len(runs))
    return list(zip(runs[0], used, strict=True))


def _timed(
    make: Callable[[], Iterator[tuple[Step, CompactCache]]], cuda: bool
) -> Iterator[tuple[CompactCache, dict[str, Any]]]:
    """The caches of one run, each with its cost until then."""
    caches, seconds, peak = None, 0.0, None
    while True:
        before, begun = _start_memory(cuda), time.perf_counter()
        caches = make() if caches is None else caches
        step, cache = next(caches, (None, None))
        if cuda:
            torch.cuda.synchronize()
        seconds += time.perf_counter() - begun
        highest = torch.cuda.max_memory_allocated() / 2**20 if cuda else _resident("VmHWM")
        if before is not None and highest is not None:
            peak = max(peak or 0.0, highest - before)
        if cache is None:
            return
        yield cache, {"step": step, "seconds": seconds, "peak_mib": peak, "bytes": cache.nbytes}


def _start_memory(cuda: bool) -> float | None:
    """MiB in use, from which on the highest counts."""
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 2**20
    try:
        ctypes.CDLL(ctypes.util.find_library("c")).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forgets the highest resident size
    except (OSError, AttributeError):
        return None
    return _resident("VmRSS")


def _resident(field: str) -> float | None:
    """MiB of this process, from the kernel's own account."""
    status = Path("/proc/self/status")
    found = re.search(rf"{field}:\s+(\d+) kB", status.read_text(encoding="ascii") if status.exists() else "")
    return int(found[1]) / 1024 if found else None


@torch.no_grad()
def answer_speed(trace: Trace, cache: CompactCache) -> dict[str, float]:
    """Seconds to the first token of an answer, ``ttft``, and ``tokens_per_s`` after it; ``_dense`` on the dense cache.

    Decoded greedily, the fastest of two runs each; nothing where an answer exceeds the model's positions.
    """
    prompt, model = trace.input_ids[:1, :PROMPT], trace.model
    if trace.prefix_len + prompt.shape[1] + ANSWER > positions_of(model):
        return {}

    def seconds(own: CompactCache, count: int) -> float:
        begun = time.perf_counter()
        model.generate(  # type: ignore[operator]
            **own.inputs(model, prompt), max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
        ).cpu()
        return time.perf_counter() - begun

    speed = {}
    for name, own in (("", cache.select([0])), ("_dense", trace.dense_cache().select([0]))):
        first, whole = (min(seconds(own, count) for _ in range(2)) for count in (1, ANSWER))
        speed |= {f"ttft{name}": first, f"tokens_per_s{name}": (ANSWER - 1) / max(whole - first, 1e-9)}
    return speed
