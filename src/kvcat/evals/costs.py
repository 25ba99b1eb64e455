"""What compression takes and what answers from a compact cache take: seconds, memory, tokens per second."""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from kvcat.cache import CompactCache
from kvcat.types import Int, Tensor

_MIB = 2**20
_Value = TypeVar("_Value")


class Meter:
    """Seconds and memory of all that runs within its ``with`` blocks.

    Memory is the highest that was allocated (CUDA) or resident (Linux) within a block, above what was at its
    beginning; where neither can be known it is None.

    Args:
        device: where the work runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.seconds = 0.0
        self.peak_mib: float | None = None

    def __enter__(self) -> "Meter":
        self._sync()
        self._before = self._start_memory()
        self._begun = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._sync()
        self.seconds += time.perf_counter() - self._begun
        highest = torch.cuda.max_memory_allocated() / _MIB if self._cuda else _resident("VmHWM")
        if self._before is not None and highest is not None:
            self.peak_mib = max(self.peak_mib or 0.0, highest - self._before)

    def _start_memory(self) -> float | None:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated() / _MIB
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forgets the highest resident size
        except OSError:
            return None
        return _resident("VmRSS")

    def _sync(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


def metered(values: Iterator[_Value], meter: Meter) -> Iterator[_Value]:
    """The same values; the meter runs while they are made, not while they are used."""
    while True:
        try:
            with meter:
                value = next(values)
        except StopIteration:
            return
        yield value


@torch.no_grad()
def answer_speed(
    model: PreTrainedModel, cache: CompactCache, prompt_ids: Int[Tensor, "batch tokens"], *, num_tokens: int = 16
) -> dict[str, float]:
    """Seconds to the first token of an answer, ``ttft``, and ``tokens_per_s`` behind it, one example decoded greedily.

    Args:
        model: the model the cache was made with.
        cache: of one example.
        prompt_ids: what follows the cached text.
        num_tokens: of the answer, at least 2.
    """
    seconds = []
    for count in (1, num_tokens):
        begun = time.perf_counter()
        model.generate(  # type: ignore[operator]
            **cache.inputs(model, prompt_ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
            pad_token_id=0,
        ).cpu()  # fmt: skip
        seconds.append(time.perf_counter() - begun)
    first, whole = seconds
    return {"ttft": first, "tokens_per_s": (num_tokens - 1) / max(whole - first, 1e-9)}


def _resident(field: str) -> float | None:
    """MiB of this process, from the kernel's own account."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(rf"{field}:\s+(\d+) kB", status)
    return int(found[1]) / 1024 if found else None
