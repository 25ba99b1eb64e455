"""What keys carry from a compact cache to kvcat's attention function.

A transformers model hands the keys of a cache's update on to its attention function as they are, so an attribute of
the tensor arrives. No channel, no mask and no argument of the model is needed.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvcat.types import Float, Int, Tensor

Head = tuple[Float[Tensor, "slots head_dim"], Float[Tensor, "slots value_dim"], Float[Tensor, " slots"] | None]


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
