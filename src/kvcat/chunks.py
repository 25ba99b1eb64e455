"""The number of rows to process at once, so that whole intermediate tensors never exist."""

import torch

CPU_CACHE_ELEMENTS = 2**19
"""Numbers that a CPU keeps in its cache."""
DEVICE_ELEMENTS = 2**26
"""Numbers that an accelerator holds at once, 256 MiB in float32."""
CHUNK_TOKENS = 4096
"""Tokens of each example that a forward pass runs at once."""


def rows_per_chunk(
    row_elements: int,
    device: torch.device,
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
