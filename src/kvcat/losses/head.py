"""The output head of a language model: what turns its last hidden states into logits."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.nn import functional

from kvcat.errors import InputError
from kvcat.types import Float, Tensor


@dataclass(frozen=True, eq=False)
class OutputHead:
    """logits = cap(a (W x + b)), cap(z) = c tanh(z / c), or z without a soft-cap.

    ``weight`` and ``bias`` are read from the module when they are asked for, so a head stays valid where sharding
    exchanges the module's parameters; tied weights are the embedding's own parameter.

    Args:
        linear: W and b; an ``nn.Linear`` that computes as one.
        scale: a, before the soft-cap; not zero.
        softcap: c, positive; None for none.

    Raises:
        InputError: a module whose forward is not W x + b, scale or soft-cap out of range.
    """

    linear: nn.Module
    scale: float = 1.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.linear, nn.Linear) or type(self.linear).forward is not nn.Linear.forward:
            raise InputError(f"an output head must be a plain linear layer, got {type(self.linear).__name__}")
        if not abs(self.scale) > 0:
            raise InputError(f"the scale of the logits must not be zero, got {self.scale}")
        if self.softcap is not None and not self.softcap > 0:
            raise InputError(f"the soft-cap of the logits must be positive, got {self.softcap}")

    @property
    def weight(self) -> Float[Tensor, "vocab hidden"]:
        """W."""
        return cast(nn.Linear, self.linear).weight

    @property
    def bias(self) -> Float[Tensor, " vocab"] | None:
        """The bias b, None where the head has none."""
        return cast(nn.Linear, self.linear).bias

    def compute_dtype(self) -> torch.dtype:
        """Dtype of the matrix products: autocast's where it is on and W is not float64, W's own otherwise."""
        device, dtype = self.weight.device.type, self.weight.dtype
        if torch.is_autocast_enabled(device) and dtype != torch.float64:
            return torch.get_autocast_dtype(device)
        return dtype

    def logits(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch vocab"]:
        """Logits in the dtype of the matrix product, with gradient; all of them at once.

        Args:
            hidden: output of the model's final norm, in any dtype.
        """
        logits = functional.linear(hidden.to(self.compute_dtype()), self.weight, self.bias)
        if self.scale != 1:
            logits = logits * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap
