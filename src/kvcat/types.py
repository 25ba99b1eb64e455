"""Array annotations, the meaning of axis names, and the dtype for sums.

Axes: ``batch`` examples, ``tokens`` positions of a sequence, ``heads`` query heads, ``kv_heads``
key-value heads (``heads`` is a multiple of it), ``queries`` positions that attend, ``keys``
positions attended to, ``slots`` kept KV slots, ``head_dim`` channels of one head, ``hidden`` model
width, ``vocab`` token types, ``prefix`` and ``suffix`` the two parts of an evaluated window.
"""

import torch
from jaxtyping import Bool as Bool
from jaxtyping import Float as Float
from jaxtyping import Int as Int
from jaxtyping import UInt8 as UInt8
from torch import Tensor as Tensor

from kvcat.errors import InputError


def at_least_float32(states: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """The tensor in float32, or in float64 if it has that type."""
    return states.to(torch.promote_types(states.dtype, torch.float32))


def check_no_autocast(device: torch.device) -> None:
    """Raise an ``InputError`` inside ``torch.autocast``, which rounds what is measured and solved
    in float32.
    """
    if torch.is_autocast_enabled(device.type):
        raise InputError(
            "torch.autocast is on, which rounds keys, queries and fits: leave it, and load the "
            "model in bfloat16 if it shall compute in that type"
        )
