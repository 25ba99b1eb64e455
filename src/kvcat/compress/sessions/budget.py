"""The budget of a session: slots, or the bytes that they need."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from kvcat.cache.ranges import Range, num_positions
from kvcat.compress.sessions.state import SessionState
from kvcat.errors import InputError, check_least
from kvcat.types import at_least_float32


def budget_in_slots(model: PreTrainedModel, budget: int | None, budget_bytes: int | None) -> int:
    """The budget as a number of slots per layer and head.

    Args:
        model: of the session.
        budget: number of slots; None if bytes are given.
        budget_bytes: bytes of keys, values and log-bias of all layers and heads; None if slots are
            given.

    Raises:
        InputError: both or none of them, or less than one.
    """
    if budget is not None and budget_bytes is None:
        check_least(1, budget=budget)
        return int(budget)
    if budget_bytes is not None and budget is None:
        check_least(1, budget_bytes=budget_bytes)
        return int(budget_bytes) // bytes_per_slot(model)
    raise InputError("a session needs one of budget (slots) and budget_bytes")


def bytes_per_slot(model: PreTrainedModel) -> int:
    """Bytes of one slot in every layer and head: key, value and log-bias.

    They are read off a forward pass of one token.
    """
    first_token = torch.zeros(1, dtype=torch.long, device=model.device)
    state, _ = SessionState.empty(model).run(model, first_token)
    num_bytes = 0
    for keys, values in zip(state.keys, state.values, strict=True):
        log_bias = at_least_float32(keys[..., 0])
        num_bytes += keys.nbytes + values.nbytes + log_bias.nbytes
    return num_bytes


def check_budget(budget: int, tail: int, room: int, protect: Sequence[Range]) -> None:
    """Reject a budget without a slot for what is not protected, besides tail and room.

    Args:
        budget, tail, room: of the session, slots.
        protect: ranges of tokens whose slots stay exact.
    """
    num_protected = num_positions(protect)
    least = tail + room + num_protected + 1
    if budget < least:
        raise InputError(
            f"budget={budget} slots hold no slot besides the tail of {tail}, room for {room} and "
            f"{num_protected} protected tokens: give at least {least}"
        )
