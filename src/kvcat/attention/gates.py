"""What reaches attention beside queries, keys and values: gates, and what the keys of a compact cache carry.

A gate says which slots the masked rows of a batch see in one group of layers. Gates are plain classes: FSDP2 copies
the dataclasses among a layer's arguments, and a copy would lose the decision.

A transformers model hands the keys of a cache's update on to its attention function as they are, so an attribute of
the tensor arrives. No channel, no mask and no argument of the model is needed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from kvcat.errors import InputError
from kvcat.types import Float, Int, Tensor

Head = tuple[Float[Tensor, "slots head_dim"], Float[Tensor, "slots value_dim"], Float[Tensor, " slots"] | None]


class SlotGate:
    """A group's gate in one forward pass; a decoder layer gets it as the keyword ``kv_gate``.

    Args:
        keep: 1 for slots that the masked rows see, 0 for the others; carries the policy's gradient.
            None: not decided yet.
        coupling: gradient of the mask, one of ``COUPLINGS``.
        prefix_len: tokens before the suffix that runs again, in rows ``[sequence, its suffix again]``;
            ``keep`` is then of the prefix. None: whole rows are masked.
    """

    def __init__(
        self,
        keep: Float[Tensor, "batch slots"] | None,
        coupling: str = "surrogate",
        prefix_len: int | None = None,
    ):
        self.keep, self.coupling, self.prefix_len = keep, coupling, prefix_len

    def keep_for(
        self,
        module: nn.Module,  # noqa: ARG002 (not even its number: compiled layers then share one graph)
        queries: Float[Tensor, "rows heads tokens head_dim"],  # noqa: ARG002
        keys: Float[Tensor, "rows kv_heads tokens head_dim"],  # noqa: ARG002
        scale: float,  # noqa: ARG002
        window: int | None,  # noqa: ARG002
    ) -> Float[Tensor, "batch slots"]:
        """1 for the slots that the masked rows see in this layer, 0 for the others.

        Queries and keys are those of all rows after rotation, the dense rows first.
        """
        return self.keep  # type: ignore[return-value]


class AttentionGate(SlotGate):
    """A gate decided in the attention of the group's first layer, from the dense rows' queries and keys.

    The first decision stands: when activation checkpointing runs the first layer again, it gets the
    gate that the later layers already used.

    Args:
        layer_idx: the layer that decides.
        num_rows: dense rows at the head of the batch that are read.
        decide: (queries, keys, scale, window) of those rows or their prefixes -> 1 for visible slots, 0
            for the others; called once, without gradient.
        coupling, prefix_len: as in ``SlotGate``.
    """

    def __init__(
        self,
        layer_idx: int,
        num_rows: int,
        decide: Callable[[Tensor, Tensor, float, int | None], Tensor],
        coupling: str = "surrogate",
        prefix_len: int | None = None,
    ):
        super().__init__(None, coupling, prefix_len)
        self.layer_idx, self.num_rows, self.decide = layer_idx, num_rows, decide

    def keep_for(
        self, module: nn.Module, queries: Tensor, keys: Tensor, scale: float, window: int | None
    ) -> Float[Tensor, "batch slots"]:
        """As ``SlotGate.keep_for``; the first call decides.

        Raises:
            RuntimeError: a later layer comes before the first one has decided.
        """
        if self.keep is None:
            if (found := layer_number(module)) != self.layer_idx:
                raise RuntimeError(f"layer {found} needs the gate that layer {self.layer_idx} has yet to decide")
            with torch.no_grad():
                read = slice(0, self.num_rows), slice(None), slice(0, self.prefix_len)
                self.keep = self.decide(queries[read].detach(), keys[read].detach(), scale, window)
        return self.keep


def layer_number(module: nn.Module) -> int:
    """The layer that an attention module belongs to."""
    index = getattr(module, "layer_idx", None)
    if index is None:
        raise InputError(f"{type(module).__name__} is not supported: its attention does not know its layer")
    return int(index)


@runtime_checkable
class SlotsByHead(Protocol):
    """Slots of a layer whose heads may hold different numbers of them."""

    def head(self, example: int, head: int) -> Head:
        """Keys, values and log-bias of one KV head of one example."""
        ...


@dataclass
class Carried:
    """What only kvcat's attention function adds to the keys: a log-bias, or slots that the keys do not hold.

    Args:
        log_bias: nats added to the scores of the first keys; the keys after them get none.
        slots: slots before all keys, where heads hold different numbers of them.
        rows: with ``slots``, the example that each row of the batch goes on from.
        taken: whether attention has read it.
    """

    log_bias: Float[Tensor, "rows kv_heads slots"] | None = None
    slots: SlotsByHead | None = None
    rows: Int[Tensor, " batch"] | None = None
    taken: bool = False


def attach(keys: Float[Tensor, "rows kv_heads keys head_dim"], carried: Carried) -> Tensor:
    """The same keys, carrying it."""
    keys.kv_carried = carried  # type: ignore[attr-defined]
    return keys


def carried_by(keys: Float[Tensor, "rows kv_heads keys head_dim"]) -> Carried | None:
    """What the keys carry, marked as taken; None where they carry nothing."""
    carried = getattr(keys, "kv_carried", None)
    if carried is not None:
        carried.taken = True
    return carried
