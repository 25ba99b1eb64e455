"""Memory that the C library holds for this process."""

import ctypes
import errno
import sys

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
