"""Costs of compression and of answers from a compact cache: seconds, memory, tokens per second."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from kvcat.cache import CompactCache
from kvcat.compress import Trace
from kvcat.generate import Row, generate
from kvcat.models import positions_of

MAX_RUNS = 3
MAX_SECONDS = 2.0
PROMPT_TOKENS = 32  # length of the prompt of a timed answer
ANSWER_TOKENS = 16
_TIMED_ANSWERS = 2
_MIB = 2**20
Step = int | None
Snapshots = Iterator[tuple[Step, CompactCache]]
Clock = Callable[[], float]
T = TypeVar("T")


class Meter:
    """The total seconds and the peak memory of the blocks of ``measured``.

    The peak is the CUDA memory that torch allocated above its allocation when the meter was made.
    It is None without CUDA.
    """

    def __init__(self, *, cuda: bool, clock: Clock = time.perf_counter) -> None:
        self.seconds = 0.0
        self.peak_mib: float | None = None
        self._cuda = cuda
        self._clock = clock
        self._bytes_before = torch.cuda.memory_allocated() if cuda else 0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Add the time and memory of the block to the meter."""
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begun = self._clock()
        yield
        if self._cuda:
            torch.cuda.synchronize()
        self.seconds += self._clock() - begun
        if self._cuda:
            peak = (torch.cuda.max_memory_allocated() - self._bytes_before) / _MIB
            self.peak_mib = max(self.peak_mib or 0.0, peak)


def measure(
    make: Callable[[], Snapshots],
    use: Callable[[CompactCache], T],
    *,
    cuda: bool = False,
    max_seconds: float = MAX_SECONDS,
    clock: Clock = time.perf_counter,
) -> list[tuple[dict[str, Any], T]]:
    """The cost of each cache that ``make`` yields, with the result of ``use`` on it.

    A cost has the cache's step and bytes, and the seconds and peak memory that ``make`` used until
    it yielded the cache. It does not include ``use``. Work of at most ``max_seconds`` runs
    ``MAX_RUNS`` times, and the median time is reported. The first run in a process is slower, so
    call ``make`` once before.
    """
    results: list[T] = []

    def add_result(cache: CompactCache) -> None:
        results.append(use(cache))

    costs = _costs_of_run(make, add_result, Meter(cuda=cuda, clock=clock))
    runs = [costs]
    while len(runs) < MAX_RUNS and costs[-1]["seconds"] <= max_seconds:
        runs.append(_costs_of_run(make, None, Meter(cuda=cuda, clock=clock)))
    for index, cost in enumerate(costs):
        cost["seconds"] = statistics.median(run[index]["seconds"] for run in runs)
        cost["runs"] = len(runs)
    return list(zip(costs, results, strict=True))


def _costs_of_run(
    make: Callable[[], Snapshots], use: Callable[[CompactCache], None] | None, meter: Meter
) -> list[dict[str, Any]]:
    """The costs of one run, in the order of the caches."""
    costs = []
    with meter.measured():
        snapshots = make()
        snapshot = next(snapshots, None)
    while snapshot is not None:
        step, cache = snapshot
        costs.append(
            {
                "step": step,
                "seconds": meter.seconds,
                "peak_mib": meter.peak_mib,
                "bytes": cache.nbytes,
            }
        )
        if use is not None:
            use(cache)
        with meter.measured():
            snapshot = next(snapshots, None)
    return costs


@torch.no_grad()
def answer_speed(trace: Trace, cache: CompactCache) -> dict[str, float]:
    """Time to the first token of an answer, ``ttft`` in seconds, and then ``tokens_per_s``.

    The figures for the dense cache have the suffix ``_dense``. Answers are decoded greedily, and
    the faster of two runs counts. The result is empty if an answer would exceed the model's
    positions.
    """
    # any tokens will do, except the beginning of the document itself
    prompt = trace.input_ids[:1, 1 : 1 + PROMPT_TOKENS]
    num_tokens = trace.prefix_len + prompt.shape[1] + ANSWER_TOKENS
    if num_tokens > positions_of(trace.model.config):
        return {}
    speed = {}
    for ending, timed in (("", cache), ("_dense", trace.dense_cache())):
        first = _seconds_of_answer(trace, timed.select([0]), prompt, 1)
        whole = _seconds_of_answer(trace, timed.select([0]), prompt, ANSWER_TOKENS)
        speed[f"ttft{ending}"] = first
        speed[f"tokens_per_s{ending}"] = (ANSWER_TOKENS - 1) / max(whole - first, 1e-9)
    return speed


def _seconds_of_answer(
    trace: Trace, cache: CompactCache, prompt: torch.Tensor, num_tokens: int
) -> float:
    """Seconds to decode a number of tokens after a prompt: the faster of two runs."""
    model: Any = trace.model
    seconds = []
    for _ in range(_TIMED_ANSWERS):
        begun = time.perf_counter()
        inputs = cache.inputs(model, prompt, any_length=True)
        row = Row((), num_tokens)  # reads every token, and so waits for the device
        generate(model, inputs, [row], min_new_tokens=num_tokens)
        seconds.append(time.perf_counter() - begun)
    return min(seconds)
