"""What a compact cache records about the tokens of its document.

``compose`` encodes the first tokens again after another document. It needs their ids, and which
slots represent them. Unquantised layers know the positions of their slots. Layers in few
bits do not, so that their caches record which of the first tokens have a slot. A hash of all tokens
shows whether other tokens are those of the same document.
"""

import hashlib
from collections.abc import Sequence

import torch

from kvcat.cache.heads import HeadGrid
from kvcat.options import NUM_FIRST
from kvcat.types import Int, Tensor

FirstIds = tuple[tuple[int, ...], ...]
"""Per example, the ids of its first tokens, at most ``NUM_FIRST``."""
FirstSlots = tuple[tuple[int, ...], ...]
"""Per example, for every head of every layer, which of the first tokens have a slot: the bits of a
number, of which the lowest is the first token's. (): it is not known.
"""


def document_digests(tokens: Int[Tensor, "batch prefix"]) -> tuple[str, ...]:
    """A hash of the tokens of every document in a batch."""
    texts = [repr([row]) for row in tokens.tolist()]
    return tuple(hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts)


def first_ids(tokens: Int[Tensor, "batch prefix"]) -> FirstIds:
    """The ids of the first tokens."""
    return tuple(tuple(row) for row in tokens[:, :NUM_FIRST].tolist())


def first_slots(layers: Sequence[HeadGrid], num_protected: int) -> FirstSlots:
    """Which of the first tokens have a slot, in every head of every layer.

    Nothing is known if a head does not know its positions, or if its slots are not in their order:
    then its first slots are not those of the first tokens.

    Args:
        num_protected: of the slots of every head, which come first, in an order of their own.
    """
    rows = []
    for example in range(len(layers[0])):
        heads = [head for layer in layers for head in layer[example]]
        numbers = []
        for head in heads:
            if head.positions is None:
                return ()
            apart = head.positions.tensor_split([num_protected])
            if not all((positions.diff() >= 0).all() for positions in apart):
                return ()
            first = set(head.positions[head.positions < NUM_FIRST].tolist())
            numbers.append(sum(1 << position for position in first))
        rows.append(tuple(numbers))
    return tuple(rows)


def count_before(
    slots: FirstSlots, num_tokens: int, counts: Sequence[Int[Tensor, "batch kv_heads"]]
) -> list[Int[Tensor, "batch kv_heads"]]:
    """How many slots of every head represent one of the first ``num_tokens`` tokens.

    Args:
        slots: what ``first_slots`` gave.
        num_tokens: at most ``NUM_FIRST``.
        counts: slots of every head of each layer, whose shapes the result has.
    """
    mask = (1 << num_tokens) - 1
    numbers = [[(number & mask).bit_count() for number in row] for row in slots]
    heads_of_layers = [layer_counts.shape[1] for layer_counts in counts]
    return list(torch.tensor(numbers).split(heads_of_layers, dim=1))
