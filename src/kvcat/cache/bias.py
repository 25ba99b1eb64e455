"""How a log-bias travels from a cache to the attention that adds it."""

from kvcat.types import Float, Tensor


class Carried:
    """A log-bias on its way to attention, and whether it has been taken there."""

    def __init__(self, log_bias: Float[Tensor, "rows kv_heads slots"]):
        self.log_bias, self.taken = log_bias, False


def attach_log_bias(
    keys: Float[Tensor, "rows kv_heads keys head_dim"], log_bias: Float[Tensor, "rows kv_heads slots"]
) -> Float[Tensor, "rows kv_heads keys head_dim"]:
    """The same keys, carrying the log-bias of their first slots to kvcat's attention function.

    Between a cache's update and its attention function a transformers model hands the keys on as they are, so what the
    tensor object carries arrives. No channel, no mask and no argument of the model is needed for it.

    Args:
        keys: of all slots and of the tokens after them.
        log_bias: nats added to the scores of the first slots; the keys after them get none.
    """
    keys.kv_log_bias = Carried(log_bias)  # type: ignore[attr-defined]
    return keys


def carried_by(keys: Float[Tensor, "rows kv_heads keys head_dim"]) -> Carried | None:
    """What the keys carry; None without a log-bias."""
    return getattr(keys, "kv_log_bias", None)


def log_bias_of(keys: Float[Tensor, "rows kv_heads keys head_dim"]) -> Float[Tensor, "rows kv_heads slots"] | None:
    """The log-bias that the keys carry, which counts as taken from then on; None without one."""
    carried = carried_by(keys)
    if carried is None:
        return None
    carried.taken = True
    return carried.log_bias
