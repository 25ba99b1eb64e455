"""What compression and answers from a compact cache take: seconds, memory, tokens per second."""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from kvcat.cache import CompactCache
from kvcat.compress import Trace
from kvcat.models import plain_generation, positions_of

MAX_RUNS, MAX_SECONDS = 3, 2.0
PROMPT, ANSWER = 32, 16  # tokens of the answers that are timed
Step = int | None
T = TypeVar("T")


def measure(
    make: Callable[[], Iterator[tuple[Step, CompactCache]]], use: Callable[[CompactCache], T], *, cuda: bool = False
) -> list[tuple[dict[str, Any], T]]:
    """Cost of the caches that ``make`` yields, each with what ``use`` made of it outside the measurement.

    A cost is the cache's step, its bytes, and seconds and peak memory until then: what torch allocated on CUDA above
    what stood before the first, else None. Work of at most ``MAX_SECONDS`` runs ``MAX_RUNS`` times; seconds are the
    median. The first run of a process is slower than the rest: call ``make`` once before.
    """
    used, runs = [], list[list[dict[str, Any]]]()
    while not runs or (len(runs) < MAX_RUNS and runs[0][-1]["seconds"] <= MAX_SECONDS):
        costs = []
        for cache, cost in _timed(make, cuda):
            costs.append(cost)
            if not runs:
                used.append(use(cache))
        runs.append(costs)
    for same in zip(*runs, strict=True):
        same[0].update(seconds=statistics.median(cost["seconds"] for cost in same), runs=len(runs))
    return list(zip(runs[0], used, strict=True))


def _timed(
    make: Callable[[], Iterator[tuple[Step, CompactCache]]], cuda: bool
) -> Iterator[tuple[CompactCache, dict[str, Any]]]:
    """The caches of one run, each with its cost until then."""
    caches, seconds, peak = None, 0.0, None
    before = torch.cuda.memory_allocated() if cuda else 0
    while True:
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        caches = make() if caches is None else caches
        step, cache = next(caches, (None, None))
        if cuda:
            torch.cuda.synchronize()
        seconds += time.perf_counter() - begun
        if cuda:
            peak = max(peak or 0.0, (torch.cuda.max_memory_allocated() - before) / 2**20)
        if cache is None:
            return
        yield cache, {"step": step, "seconds": seconds, "peak_mib": peak, "bytes": cache.nbytes}


@torch.no_grad()
def answer_speed(trace: Trace, cache: CompactCache) -> dict[str, float]:
    """Seconds to the first token of an answer, ``ttft``, and ``tokens_per_s`` after it; ``_dense`` on the dense cache.

    Decoded greedily, the fastest of two runs each; nothing where an answer exceeds the model's positions.
    """
    model = trace.model
    prompt = trace.input_ids[:1, 1 : 1 + PROMPT]  # any tokens but the document from its beginning
    if trace.prefix_len + prompt.shape[1] + ANSWER > positions_of(model.config):
        return {}

    def seconds(own: CompactCache, count: int) -> float:
        begun = time.perf_counter()
        with plain_generation(model, max_new_tokens=count, min_new_tokens=count) as settings:
            inputs = own.inputs(model, prompt, any_length=True)
            model.generate(**inputs, generation_config=settings).cpu()  # type: ignore[operator]
        return time.perf_counter() - begun

    speed = {}
    for name, own in (("", cache.select([0])), ("_dense", trace.dense_cache().select([0]))):
        first, whole = (min(seconds(own, count) for _ in range(2)) for count in (1, ANSWER))
        speed |= {f"ttft{name}": first, f"tokens_per_s{name}": (ANSWER - 1) / max(whole - first, 1e-9)}
    return speed
