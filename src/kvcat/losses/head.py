"""The output head: the map from the final hidden states to logits."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.nn import functional

from kvcat.errors import InputError, check_in
from kvcat.types import Float, Tensor


@dataclass(frozen=True, eq=False)
class OutputHead:
    """logits = cap(a (W x + b)), cap(z) = c tanh(z / c), or z without a soft-cap.

    ``weight`` and ``bias`` are read from the module at every use, so a head stays valid if sharding
    replaces the module's parameters.

    Args:
        linear: W and b; an ``nn.Linear`` that computes as one.
        scale: a, before the soft-cap; not zero.
        softcap: c, positive; None: no soft-cap.

    Raises:
        InputError: a module whose forward is not W x + b, scale or soft-cap out of range.
    """

    linear: nn.Module
    scale: float = 1.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        kind = type(self.linear)
        if not isinstance(self.linear, nn.Linear) or kind.forward is not nn.Linear.forward:
            raise InputError(f"an output head must be a plain linear layer, got {kind.__name__}")
        if not abs(self.scale) > 0:
            raise InputError(f"the scale of the logits must not be zero, got {self.scale}")
        if self.softcap is not None:
            check_in("(0, inf)", softcap=self.softcap)

    @property
    def weight(self) -> Float[Tensor, "vocab hidden"]:
        """W."""
        return cast(nn.Linear, self.linear).weight

    @property
    def bias(self) -> Float[Tensor, " vocab"] | None:
        """b; None if the head has no bias."""
        return cast(nn.Linear, self.linear).bias

    def compute_dtype(self) -> torch.dtype:
        """Dtype of the matrix products: autocast's if it is on and W is not float64, else W's."""
        device = self.weight.device.type
        dtype = self.weight.dtype
        if torch.is_autocast_enabled(device) and dtype != torch.float64:
            return torch.get_autocast_dtype(device)
        return dtype

    def logits(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch vocab"]:
        """All logits at once, in the dtype of the matrix product."""
        logits = functional.linear(hidden.to(self.compute_dtype()), self.weight, self.bias)
        if self.scale != 1:
            logits = logits * self.scale
        if self.softcap is None:
            return logits
        return torch.tanh(logits / self.softcap) * self.softcap
