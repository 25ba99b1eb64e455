"""Attention scores in chunks of queries: how many at once, and exponentials below a maximum."""

import math

import torch

from kvcat.types import Float, Tensor

CPU_CACHE_ELEMENTS = 2**19
"""Numbers that a CPU keeps in its cache."""
DEVICE_ELEMENTS = 2**26
"""Numbers that an accelerator holds at once, 256 MiB in float32."""


def rows_per_chunk(
    row_elements: int, device: torch.device, *, cpu_elements: int = CPU_CACHE_ELEMENTS, least: int = 1
) -> int:
    """Rows of ``row_elements`` numbers each that are worked on at once.

    Args:
        row_elements: numbers that one row holds.
        device: where they are; on an accelerator a chunk holds at most 2^26 numbers.
        cpu_elements: most numbers of a chunk on a CPU.
        least: rows of a chunk even where they hold more.
    """
    most = cpu_elements if device.type == "cpu" else DEVICE_ELEMENTS
    return max(least, most // row_elements)


def exp_below(
    largest: Float[Tensor, "*batch queries 1"], scores: Float[Tensor, "*batch queries keys"]
) -> Float[Tensor, "*batch queries keys"]:
    """exp(scores - largest), written over the scores.

    By powers of two: on many CPUs this is two to three times as fast as exp.
    """
    log2_e = math.log2(math.e)
    return torch.add(largest * -log2_e, scores, alpha=log2_e, out=scores).exp2_()
