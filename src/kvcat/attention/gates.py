"""Which slots the masked rows of a batch see, as the attention of one group of layers is told.

Gates are plain classes: FSDP2 copies the dataclasses among a layer's arguments, and a copy would lose what it decides.
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from kvcat.errors import InputError
from kvcat.types import Float, Tensor


@runtime_checkable
class Gate(Protocol):
    """What a decoder layer gets as the keyword ``kv_gate``: one object per group and forward pass."""

    @property
    def coupling(self) -> str:
        """Gradient of the mask, one of ``COUPLINGS``."""
        ...

    @property
    def keep_self(self) -> bool:
        """Whether a masked token sees itself."""
        ...

    @property
    def prefix_len(self) -> int | None:
        """Tokens before the ones that run again, in rows ``[sequence, its suffix again]``; None for masked rows."""
        ...

    def keep_for(
        self,
        module: nn.Module,
        queries: Float[Tensor, "rows heads tokens head_dim"],
        keys: Float[Tensor, "rows kv_heads tokens head_dim"],
        scale: float,
        window: int | None,
    ) -> Float[Tensor, "batch tokens"]:
        """1 for the slots the masked rows, or the suffixes, see in this layer, 0 for the others.

        Args:
            module: the attention module of the layer that asks.
            queries, keys: all rows, after rotation; the first rows are the dense ones.
            scale: factor on q.k.
            window: tokens a query of this layer sees, itself included; None is no limit.
        """
        ...


class SlotGate:
    """A gate that is known before the layer runs.

    Args:
        keep: 1 for visible slots of the masked rows, or of the prefixes, 0 for the others; carries the policy's
            gradient.
        coupling: gradient of the mask, one of ``COUPLINGS``.
        keep_self: a masked token sees itself.
        prefix_len: as in ``Gate``.
    """

    def __init__(
        self,
        keep: Float[Tensor, "batch tokens"],
        coupling: str = "surrogate",
        keep_self: bool = False,
        prefix_len: int | None = None,
    ):
        self.keep, self.coupling, self.keep_self, self.prefix_len = keep, coupling, keep_self, prefix_len

    def keep_for(
        self,
        module: nn.Module,  # noqa: ARG002 (not even its number: compiled layers then share one graph)
        queries: Tensor,  # noqa: ARG002
        keys: Tensor,  # noqa: ARG002
        scale: float,  # noqa: ARG002
        window: int | None,  # noqa: ARG002
    ) -> Float[Tensor, "batch tokens"]:
        """The gate, whatever the layer."""
        return self.keep


class AttentionGate:
    """A gate decided inside the attention of the group's first layer, from the dense rows' queries and keys.

    The first decision stands: when activation checkpointing runs the first layer again, it gets the gate that the
    later layers already used. The object belongs to one group of one forward pass, so nothing else can overwrite it.

    Args:
        layer_idx: the layer that decides.
        num_rows: rows at the head of the batch that are decided about.
        decide: (queries, keys, scale, window) of those rows, of their prefixes where there are -> 1 for visible slots,
            0 for the others; called once, without gradient.
        coupling: gradient of the mask; a decision without gradient makes no use of it.
        keep_self: a masked token sees itself.
        prefix_len: as in ``Gate``.
    """

    def __init__(
        self,
        layer_idx: int,
        num_rows: int,
        decide: Callable[[Tensor, Tensor, float, int | None], Tensor],
        coupling: str = "none",
        keep_self: bool = False,
        prefix_len: int | None = None,
    ):
        self.layer_idx, self.num_rows, self.decide = layer_idx, num_rows, decide
        self.coupling, self.keep_self, self.prefix_len = coupling, keep_self, prefix_len
        self.keep: Float[Tensor, "batch tokens"] | None = None

    def keep_for(
        self, module: nn.Module, queries: Tensor, keys: Tensor, scale: float, window: int | None
    ) -> Float[Tensor, "batch tokens"]:
        """The gate; decides it if the first layer asks for the first time.

        Raises:
            RuntimeError: a later layer asks before the first one has decided.
        """
        if self.keep is None:
            if (asking := layer_number(module)) != self.layer_idx:
                raise RuntimeError(f"layer {asking} asked for the gate that layer {self.layer_idx} has yet to decide")
            with torch.no_grad():
                read = slice(0, self.num_rows), slice(None), slice(0, self.prefix_len)
                self.keep = self.decide(queries[read].detach(), keys[read].detach(), scale, window)
        return self.keep


def layer_number(module: nn.Module) -> int:
    """The layer that an attention module belongs to.

    Raises:
        InputError: the module does not know.
    """
    index = getattr(module, "layer_idx", None)
    if index is None:
        raise InputError(f"{type(module).__name__} is not supported: its attention does not know its layer")
    return int(index)
