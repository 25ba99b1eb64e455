"""TF32: float32 products on a GPU with 10 bits behind the point, several times as fast."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_SWITCH = "NVIDIA_TF32_OVERRIDE"  # of NVIDIA's libraries, which use no TF32 if it is 0


def tf32_facts(states: torch.Tensor) -> dict[str, str]:
    """What a record says about products with a tensor inside ``tf32_products``; nothing without
    TF32.
    """
    has_tf32 = states.dtype == torch.float32 and _uses_tf32(states.device)
    return {"float32": "tf32"} if has_tf32 else {}


@contextmanager
def tf32_products(device: torch.device) -> Iterator[None]:
    """Inside the block, products of float32 matrices on a GPU are in TF32, unless the environment
    has NVIDIA_TF32_OVERRIDE=0.

    For passes of a model, where it adds about 2.5e-7 nats of KL; not for least squares.
    """
    is_on = torch.backends.cuda.matmul.fp32_precision == "tf32"
    if is_on or not _uses_tf32(device):
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _uses_tf32(device: torch.device) -> bool:
    return device.type == "cuda" and os.environ.get(_SWITCH) != "0"
