"""Presses of kvpress that keep protected slots as well as those of their choice."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from kvcat.compress.protection import protected_layer
from kvcat.compress.trace import Trace
from kvcat.errors import InputError
from kvcat.types import Tensor

_TRIES = 4


class KeptHeads(NamedTuple):
    """The keys and values that a press keeps in a layer of one example, one tensor per KV head."""

    keys: list[Tensor]
    values: list[Tensor]


class Pressed(NamedTuple):
    """What a press keeps of one example, layer by layer, and all keys that it received."""

    layers: list[KeptHeads]
    whole_keys: list[Tensor]


def press_with_protected(
    press: Callable[[Callable[[Any], None], int], Pressed], trace: Trace, example: int, size: int
) -> list[KeptHeads]:
    """The slots of one example's layers: the protected ones first, then those that a press keeps.

    Presses that score slots find the protected ones to be the best. Others are asked for more or
    fewer slots until those that they keep and the protected ones are as many as wanted, or fewer.

    Args:
        press: runs a press on the example, asked for a number of slots; before that its first
            argument changes the parts of the press that score slots.
        trace: with protected slots.
        example: its number in the trace.
        size: slots per layer and head, on average.

    Raises:
        InputError: the press keeps too many slots of its choice.
    """
    best: list[KeptHeads] = []
    fewest_missing = math.inf
    asked = size
    for _ in range(_TRIES):
        kept, whole_keys = press(partial(_prefer_protected, trace=trace), asked)
        layers = [
            _protected_first(heads, keys[0], trace, index, example)
            for index, (heads, keys) in enumerate(zip(kept, whole_keys, strict=True))
        ]
        counts = [len(keys) for heads in layers for keys in heads.keys]
        missing = size - sum(counts) / len(counts)
        if 0 <= missing < fewest_missing:
            best = layers
            fewest_missing = missing
        change = math.floor(missing)
        if change == 0 or not 1 <= asked + change < trace.prefix_len:
            break
        asked += change
    if not best:
        raise InputError(
            f"the press keeps more than {size} slots, with the {trace.num_protected} protected "
            "ones: keep more, or protect fewer"
        )
    return best


def _prefer_protected(press: Any, trace: Trace) -> None:
    """Let a press score protected slots higher than all others."""
    score = press.score
    slots = trace.protected_slots(0)

    def with_protected(*args: Any, **kwargs: Any) -> Tensor:
        scores = score(*args, **kwargs)
        if scores.shape[-1] != trace.prefix_len:
            return scores
        least, most = scores.aminmax()
        scores = scores.clone()
        scores[..., slots] = 2 * most - least + 1
        return scores

    press.score = with_protected


def _protected_first(
    kept: KeptHeads, whole_keys: Tensor, trace: Trace, index: int, example: int
) -> KeptHeads:
    """The protected slots of a layer, and then the others that a press keeps.

    Args:
        kept: what the press keeps of every head.
        whole_keys: keys of the prefix that the press received, (kv_heads, prefix, head_dim).
        trace: with protected slots.
        index: of the layer.
        example: number in the trace.
    """
    fixed = protected_layer(trace, index)
    protected_slots = trace.protected_slots(index)
    keys = []
    values = []
    for head, head_keys in enumerate(kept.keys):
        protected = set(_as_bytes(whole_keys[head, protected_slots]))
        is_other = [key not in protected for key in _as_bytes(head_keys)]
        others = torch.tensor(is_other, dtype=torch.bool, device=head_keys.device)
        keys.append(torch.cat([fixed.keys[example, head], head_keys[others]]))
        values.append(torch.cat([fixed.values[example, head], kept.values[head][others]]))
    return KeptHeads(keys, values)


def _as_bytes(rows: Tensor) -> list[bytes]:
    """The bytes of each row, by which keys are found again."""
    on_cpu = rows.detach().cpu().contiguous().view(torch.uint8).numpy()
    return [row.tobytes() for row in on_cpu]
