"""Memory that the C library holds for this process."""

import ctypes
import sys


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
