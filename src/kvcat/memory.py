"""Memory: rows to process at once, too little of it, what was freed, the peak of a block."""

import ctypes
import errno
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CPU_CACHE_ELEMENTS = 2**19
"""Numbers that a CPU keeps in its cache."""
DEVICE_ELEMENTS = 2**26
"""Numbers that an accelerator holds at once, 256 MiB in float32."""
LOGIT_ELEMENTS = 2**28
"""Logits of one pass that an accelerator holds at once, 512 MiB in bfloat16."""
CHUNK_TOKENS = 4096
"""Tokens of each example that a forward pass runs at once."""


def rows_per_chunk(
    row_elements: int,
    device: "torch.device",
    *,
    cpu_elements: int = CPU_CACHE_ELEMENTS,
    device_elements: int = DEVICE_ELEMENTS,
    least: int = 1,
) -> int:
    """The number of rows of ``row_elements`` numbers to process at once.

    Args:
        row_elements: numbers that one row holds.
        device: device of the rows.
        cpu_elements: most numbers of a chunk on a CPU.
        device_elements: most numbers of a chunk on an accelerator.
        least: rows of a chunk even if they hold more numbers than that.
    """
    most = cpu_elements if device.type == "cpu" else device_elements
    return max(least, most // row_elements)


# the allocator's words, and those of a file that is mapped into memory
_OF_TORCH = ("can't allocate memory", "Cannot allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is not enough memory, in Python, on the CPU or on a GPU."""
    is_of_torch = isinstance(error, RuntimeError) and (
        type(error).__name__ == "OutOfMemoryError"
        or any(words in str(error) for words in _OF_TORCH)
    )
    is_of_system = isinstance(error, OSError) and error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or is_of_torch or is_of_system


def return_freed_memory() -> None:
    """Give memory that was freed back to the system, where the C library is glibc.

    A forward pass frees many tensors between those that stay. glibc keeps their memory, which can
    be half of what a trace holds.
    """
    if not sys.platform.startswith("linux"):
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
    if trim is not None:
        trim(0)


class PeakMemory:
    """The most memory that a process held since this was made, over what it held then.

    Memory of the GPU, where the work is on one; else the resident memory, which only Linux reports.
    """

    def __init__(self, device: "torch.device") -> None:
        self.device = device
        self._before: int | None = None
        if device.type == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
        elif sys.platform.startswith("linux"):
            return_freed_memory()
            try:
                Path("/proc/self/clear_refs").write_text("5")  # sets the peak to the present size
            except OSError:  # a system that does not allow it
                return
            self._before = _resident_peak()

    def bytes(self) -> int | None:
        """The bytes so far; None if the system does not report them."""
        if self._before is None:
            return None
        if self.device.type == "cuda":
            import torch

            return torch.cuda.max_memory_allocated(self.device) - self._before
        return _resident_peak() - self._before


def _resident_peak() -> int:
    """The largest resident memory of this process on Linux."""
    (line,) = (
        line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line
    )
    return 1024 * int(line.split()[1])
