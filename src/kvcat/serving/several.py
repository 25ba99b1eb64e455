"""Several packed caches as one prefix of a widened model, joined without running the model.

The slots of all documents follow one another. Keys are rotated to the documents' new positions, and
the first document's attention sink is that of all: the slots of a later document's first token are
hidden. There is no seam: ``kvcat pack`` of several caches (``kvcat.compose``) encodes the first
tokens of later documents again.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

from kvcat.cache import count_before
from kvcat.errors import InputError
from kvcat.serving.prefix import LayerStates, PackedDocument
from kvcat.serving.widen import UNSEEN
from kvcat.types import Float, Tensor


class WideRotation(NamedTuple):
    """The rotary embedding of a widened model.

    Args:
        frequencies: radians per position of each pair of channels, one half of a head.
        rotated: whether each layer rotates its keys.
        bias_channel: channel of a key that holds the log-bias.
    """

    frequencies: tuple[float, ...]
    rotated: tuple[bool, ...]
    bias_channel: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "WideRotation":
        """The rotary embedding that the configuration of a widened model describes."""
        rope: dict[str, Any] = config.rope_parameters
        wide = config.head_dim
        frequencies = []
        for pair, factor in enumerate(rope["short_factor"]):
            unscaled = rope["rope_theta"] ** -(2 * pair / wide)
            frequencies.append(unscaled / factor)
        uses_rope = getattr(config, "no_rope_layers", None) or [1] * config.num_hidden_layers
        rotated = tuple(bool(layer) for layer in uses_rope)
        return cls(tuple(frequencies), rotated, config.kvcat_head_dim // 2)

    def __call__(
        self, keys: Float[Tensor, "kv_heads slots wide"], shift: int
    ) -> Float[Tensor, "kv_heads slots wide"]:
        """Keys of one layer, moved by ``shift`` positions."""
        angles = torch.tensor(self.frequencies, dtype=torch.float64) * shift
        precise = keys if keys.dtype == torch.float64 else keys.float()
        cos = angles.cos().to(precise)
        sin = angles.sin().to(precise)
        first, second = precise.chunk(2, dim=-1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        return turned.to(keys.dtype)


class JoinedPrefix(NamedTuple):
    """Packed caches of several documents, one behind the other; used as a ``Prefix``."""

    documents: tuple[PackedDocument, ...]
    rotation: WideRotation

    @property
    def digest(self) -> str:
        """A hash of the files' checksums, in their order."""
        return hashlib.sha256(
            " ".join(document.digest for document in self.documents).encode()
        ).hexdigest()

    @property
    def num_slots(self) -> int:
        """Slots of every head, and the position of the next token."""
        return sum(document.num_slots for document in self.documents)

    @property
    def chat(self) -> bool:
        """Whether the first document opens a user's turn in the chat template."""
        return self.documents[0].chat

    @property
    def chat_template(self) -> str:
        """Digest of that template; empty: not known."""
        return self.documents[0].chat_template

    def load(self) -> list[LayerStates]:
        """Keys and values of every layer.

        Raises:
            InputError: a file is damaged or has changed.
        """
        loaded = [document.load() for document in self.documents]
        hidden = [None, *(_sinks(document) for document in self.documents[1:])]
        num_tokens = sum(document.num_tokens for document in self.documents)
        states = []
        for layer, is_rotated in enumerate(self.rotation.rotated):
            keys = []
            start = 0  # of a document, tokens
            for document, states_of_document, sinks in zip(
                self.documents, loaded, hidden, strict=True
            ):
                shift = (
                    start - (num_tokens - self.num_slots) + document.num_tokens - document.num_slots
                )
                document_keys = states_of_document[layer][0]
                moved = self.rotation(document_keys, shift) if is_rotated else document_keys.clone()
                if sinks is not None:
                    first = _num_hidden(document, layer)
                    moved[sinks[layer], first, self.rotation.bias_channel] = UNSEEN
                keys.append(moved)
                start += document.num_tokens
            values = [states_of_document[layer][1] for states_of_document in loaded]
            states.append((torch.cat(keys, dim=1), torch.cat(values, dim=1)))
        return states


def join(
    documents: Sequence[PackedDocument], rotation: WideRotation | None
) -> PackedDocument | JoinedPrefix:
    """One prefix of the documents of several packed caches; a single one is returned unchanged.

    Args:
        documents: at least one.
        rotation: of the served model; None: several caches are rejected.

    Raises:
        InputError: several caches that cannot be joined.
    """
    if len(documents) == 1:
        return documents[0]
    if rotation is None:
        raise InputError("several caches in a request need the rotation of a widened model")
    for number, document in enumerate(documents[1:], start=2):
        if document.chat:
            raise InputError(
                f"document {number} opens a turn of the chat template: compress all documents but "
                "the first without --chat"
            )
    if any(document.num_tokens < document.num_slots for document in documents):
        raise InputError("a packed cache has more slots than its document has tokens")
    return JoinedPrefix(tuple(documents), rotation)


def _num_hidden(document: PackedDocument, layer: int) -> int:
    """Slots that only fill up a layer, which come before the others."""
    return document.num_slots - document.layer_slots[layer] if document.layer_slots else 0


def _sinks(document: PackedDocument) -> list[Tensor] | None:
    """Per layer, the heads whose first slot is the document's first token; None: not recorded."""
    if not document.first_slots:
        return None
    num_layers, num_heads, _ = document.shape
    heads = [torch.ones(1, num_heads, dtype=torch.long)] * num_layers
    counts = count_before(document.first_slots, 1, heads)
    return [layer_counts[0] > 0 for layer_counts in counts]
