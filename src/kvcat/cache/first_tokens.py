"""What a compact cache records about the tokens of its document, as metadata.

``compose`` encodes the first tokens again behind another document. It needs their ids, and which
slots represent them. Layers in ordinary numbers know the positions of their slots. Layers in few
bits do not, so that their caches record which of the first tokens have a slot. A hash of all tokens
shows whether other tokens are those of the same document.
"""

import hashlib
from collections.abc import Sequence

import torch

from kvcat.cache.heads import HeadGrid
from kvcat.choices import NUM_FIRST
from kvcat.types import Int, Tensor

DOCUMENT = "document"
FIRST_IDS = "first_ids"
FIRST_SLOTS = "first_slots"
_ROWS = ";"  # between the examples of a batch
_DIGITS = NUM_FIRST // 4  # hexadecimal digits for one bit of each first token


def document_digest(tokens: Int[Tensor, "batch prefix"]) -> str:
    """A hash of the tokens of every document in a batch, as text for the metadata."""
    return _ROWS.join(_digests(tokens))


def same_documents(
    metadata: dict[str, str], num_examples: int, tokens: Int[Tensor, "batch prefix"]
) -> list[bool] | None:
    """Per row, whether tokens are those of the example of a cache that the row continues.

    None if the cache does not record it: a composed one.

    Args:
        metadata: of the cache.
        num_examples: of the cache.
        tokens: a multiple of this number of rows; consecutive rows continue the same example.
    """
    recorded = metadata.get(DOCUMENT, "").split(_ROWS)
    if recorded == [""] or len(recorded) != num_examples:
        return None
    rows_of_each = len(tokens) // num_examples
    wanted = [digest for digest in recorded for _ in range(rows_of_each)]
    return [one == other for one, other in zip(_digests(tokens), wanted, strict=True)]


def _digests(tokens: Int[Tensor, "batch prefix"]) -> list[str]:
    texts = [repr([row]) for row in tokens.tolist()]
    return [hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts]


def first_ids(tokens: Int[Tensor, "batch prefix"]) -> str:
    """The ids of the first tokens, as text for the metadata."""
    rows = tokens[:, :NUM_FIRST].tolist()
    return _ROWS.join(" ".join(str(token) for token in row) for row in rows)


def parse_first_ids(text: str) -> Int[Tensor, "batch first"]:
    """The ids that ``first_ids`` wrote."""
    return torch.tensor([[int(word) for word in row.split()] for row in text.split(_ROWS)])


def joined_first_ids(text: str, num_tokens: int, later: str) -> str:
    """The ids of the first tokens of a document and of the tokens that follow it, as text.

    Args:
        text: those of the document.
        num_tokens: of the document.
        later: the ids of the first tokens after it.
    """
    ids = parse_first_ids(text)
    if ids.shape[1] < num_tokens:  # a long document, or one that does not record all of them
        return text
    return first_ids(torch.cat([ids, parse_first_ids(later)], dim=1))


def first_slots(layers: Sequence[HeadGrid]) -> dict[str, str]:
    """Which of the first tokens have a slot, in every head of every layer, as metadata.

    The metadata are empty if a head does not know its positions, or if its slots are not in their
    order (protected slots come first): then its first slots are not those of the first tokens. Each
    head has ``NUM_FIRST`` bits, of which the lowest is the first token's.
    """
    rows = []
    for example in range(len(layers[0])):
        words = []
        for layer in layers:
            for head in layer[example]:
                if head.positions is None or not _ascends(head.positions):
                    return {}
                words.append(_bits(head.positions))
        rows.append("".join(words))
    return {FIRST_SLOTS: _ROWS.join(rows)}


def count_before(
    text: str, num_tokens: int, counts: Sequence[Int[Tensor, "batch kv_heads"]]
) -> list[Int[Tensor, "batch kv_heads"]]:
    """How many slots of every head represent one of the first ``num_tokens`` tokens.

    Args:
        text: the metadata that ``first_slots`` made.
        num_tokens: at most ``NUM_FIRST``.
        counts: slots of every head of each layer, whose shapes the result has.
    """
    mask = (1 << num_tokens) - 1
    numbers = []
    for row in text.split(_ROWS):
        words = [row[start : start + _DIGITS] for start in range(0, len(row), _DIGITS)]
        numbers.append([(int(word, 16) & mask).bit_count() for word in words])
    heads_of_layers = [layer_counts.shape[1] for layer_counts in counts]
    return list(torch.tensor(numbers).split(heads_of_layers, dim=1))


def of_examples(metadata: dict[str, str], chosen: Sequence[int]) -> dict[str, str]:
    """The metadata of the chosen examples of a batch."""
    selected = dict(metadata)
    for name in (DOCUMENT, FIRST_IDS, FIRST_SLOTS):
        if name in metadata:
            texts = metadata[name].split(_ROWS)
            selected[name] = _ROWS.join(texts[example] for example in chosen)
    return selected


def _ascends(positions: Int[Tensor, " slots"]) -> bool:
    """Whether slots are in the order of their positions."""
    return bool((positions[1:] >= positions[:-1]).all())


def _bits(positions: Int[Tensor, " slots"]) -> str:
    """One head's word."""
    first = positions[positions < NUM_FIRST].tolist()
    return f"{sum(1 << position for position in set(first)):0{_DIGITS}x}"
