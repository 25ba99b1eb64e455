"""Array annotations and the legend of axis names.

Axes: ``batch`` examples, ``tokens`` positions of a sequence, ``heads`` query heads, ``kv_heads`` key-value heads
(``heads`` is a multiple of it), ``queries`` positions that attend, ``keys`` positions attended to, ``slots`` kept KV
slots, ``head_dim`` channels of one head, ``hidden`` model width, ``vocab`` token types, ``prefix`` and ``suffix`` the
two parts of an evaluated window.
"""

from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = ["Bool", "Float", "Int", "Tensor"]
