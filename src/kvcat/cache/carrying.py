"""What keys carry from a compact cache to kvcat's attention function.

Between a cache's update and its attention function a transformers model hands the keys on as they are, so what the
tensor object carries arrives. No channel, no mask and no argument of the model is needed for it.
"""

from dataclasses import dataclass

from kvcat.cache.slots import RaggedLayer
from kvcat.types import Float, Int, Tensor


@dataclass
class CarriedBias:
    """The log-bias of the first slots of the keys, on its way to attention.

    Args:
        log_bias: nats added to the scores of the first slots; the keys after them get none.
        taken: whether attention has asked for it.
    """

    log_bias: Float[Tensor, "rows kv_heads slots"]
    taken: bool = False


@dataclass
class CarriedSlots:
    """Slots that the keys themselves, those of the new tokens, do not hold.

    Args:
        slots: the compact prefix of every example.
        rows: the example that each row of the batch goes on from.
        taken: whether attention has asked for them.
    """

    slots: RaggedLayer
    rows: Int[Tensor, " batch"]
    taken: bool = False


Carried = CarriedBias | CarriedSlots


def attach(keys: Float[Tensor, "rows kv_heads keys head_dim"], carried: Carried) -> Tensor:
    """The same keys, carrying what only kvcat's attention function understands."""
    keys.kv_carried = carried  # type: ignore[attr-defined]
    return keys


def carried_by(keys: Float[Tensor, "rows kv_heads keys head_dim"]) -> Carried | None:
    """What the keys carry, which counts as taken from then on; None where they carry nothing."""
    carried = getattr(keys, "kv_carried", None)
    if carried is not None:
        carried.taken = True
    return carried


def attach_log_bias(
    keys: Float[Tensor, "rows kv_heads keys head_dim"], log_bias: Float[Tensor, "rows kv_heads slots"]
) -> Float[Tensor, "rows kv_heads keys head_dim"]:
    """The same keys, carrying the log-bias of their first slots.

    Args:
        keys: of all slots and of the tokens after them.
        log_bias: nats added to the scores of the first slots; the keys after them get none.
    """
    return attach(keys, CarriedBias(log_bias))


def log_bias_of(keys: Float[Tensor, "rows kv_heads keys head_dim"]) -> Float[Tensor, "rows kv_heads slots"] | None:
    """The log-bias that the keys carry; None without one."""
    carried = carried_by(keys)
    return carried.log_bias if isinstance(carried, CarriedBias) else None
