"""Memory of this process: what the C library holds, and the most that a block needs."""

import ctypes
import errno
import sys
from pathlib import Path

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is not enough memory, in Python, on the CPU or on a GPU."""
    is_of_torch = isinstance(error, RuntimeError) and (
        type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
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

    Args:
        device: of the work.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._before: int | None = None
        if device.type == "cuda":
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
            return torch.cuda.max_memory_allocated(self.device) - self._before
        return _resident_peak() - self._before


def _resident_peak() -> int:
    """The largest resident memory of this process on Linux."""
    (line,) = (
        line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line
    )
    return 1024 * int(line.split()[1])
