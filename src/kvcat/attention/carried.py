"""Data that a cache attaches to its keys for kvcat's attention.

transformers passes the keys that a cache layer's ``update`` returns to its attention function
unchanged. So the cache layer sets an attribute on that tensor (``attach``), and kvcat's attention
function reads it (``carried_by``); no channel, mask or argument of the model is needed. An
operation on the keys in between would lose the attribute without an error. Therefore every
``Carried`` records whether attention has read it: the cache layer checks this at its next update,
and ``kvcat.models.self_test`` before the first use of a model. Only this module knows the
attribute.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvcat.types import Float, Int, Tensor

SlotsOfExample = Callable[[int], tuple[Any, list[int]]]
"""The slots of an example, head after head as ``HeadSlots`` (kvcat.cache), and how many each KV
head has.
"""


@dataclass
class Carried:
    """The data that keys carry: a log-bias, or slots that the keys do not contain.

    Args:
        log_bias: nats added to the scores of the first keys. The keys after them get none.
        slots: slots before all keys, if heads have different numbers of them.
        rows: with ``slots``, the example that each row of the batch continues.
        taken: whether attention has read it.
    """

    log_bias: Float[Tensor, "rows kv_heads slots"] | None = None
    slots: SlotsOfExample | None = None
    rows: Int[Tensor, " batch"] | None = None
    taken: bool = False


def attach(keys: Float[Tensor, "rows kv_heads keys head_dim"], carried: Carried) -> Tensor:
    """The same keys, with the data attached."""
    keys.kv_carried = carried  # type: ignore[attr-defined]
    return keys


def carried_by(keys: Float[Tensor, "rows kv_heads keys head_dim"]) -> Carried | None:
    """The data that the keys carry, marked as taken; None if they carry none."""
    carried = getattr(keys, "kv_carried", None)
    if carried is not None:
        carried.taken = True
    return carried
