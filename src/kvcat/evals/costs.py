"""What compression and answers from a compact cache take: seconds, memory, tokens per second."""

import ctypes
import ctypes.util
import re
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from kvcat.cache import CompactCache
from kvcat.compress import Trace
from kvcat.evals.task import positions_of

MAX_RUNS, MAX_SECONDS = 3, 2.0
PROMPT, ANSWER = 32, 16  # tokens of the answers that are timed
Step = int | None


def measure(
    make: Callable[[], Iterator[tuple[Step, CompactCache]]],
    device: torch.device,
    *,
    use: Callable[[Step, CompactCache], None] = lambda *_: None,
) -> list[dict[str, Any]]:
    """Cost of the caches that ``make`` yields, each by its step: seconds, peak memory and bytes.

    Work of at most ``MAX_SECONDS`` runs ``MAX_RUNS`` times; seconds are the median of the runs, memory
    is the highest. The first run of a process is slower than the rest: call ``make`` once before.
    ``peak_mib`` is the highest memory above that before the work, from the same process: allocated by
    torch on CUDA; resident on Linux, after the C library has given free memory back, so that earlier
    work changes it little; otherwise None. ``use`` sees every cache of the first run, outside the measurement.
    """
    runs: list[list[dict[str, Any]]] = []
    spent = 0.0
    while not runs or (len(runs) < MAX_RUNS and spent < MAX_SECONDS):
        meter, found = _Meter(device.type == "cuda"), []
        caches = meter.run(make)
        while (made := meter.run(lambda caches=caches: next(caches, None))) is not None:
            step, cache = made
            found.append({"step": step, "seconds": meter.seconds, "peak_mib": meter.peak_mib, "bytes": cache.nbytes})
            if not runs:
                use(step, cache)
        runs.append(found)
        spent += meter.seconds
    costs = []
    for same in zip(*runs, strict=True):
        seconds = statistics.median(cost["seconds"] for cost in same)
        peak = max((cost["peak_mib"] for cost in same if cost["peak_mib"] is not None), default=None)
        costs.append({**same[0], "seconds": seconds, "peak_mib": peak, "runs": len(runs)})
    return costs


class _Meter:
    """Seconds and highest memory of all that ran under it."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self.seconds = 0.0
        self.peak_mib: float | None = None

    def run(self, work: Callable[[], Any]) -> Any:
        before, begun = _start_memory(self.cuda), time.perf_counter()
        value = work()
        if self.cuda:
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - begun
        highest = torch.cuda.max_memory_allocated() / 2**20 if self.cuda else _resident("VmHWM")
        if before is not None and highest is not None:
            self.peak_mib = max(self.peak_mib or 0.0, highest - before)
        return value


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
