"""The slots of attention heads: the type that compressors make and layers of caches hold."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from kvcat.cache.codes import PackedHead
from kvcat.types import Float, Int, Tensor, at_least_float32


@dataclass(frozen=True)
class HeadSlots:
    """The slots of one KV head of one example, or of a batch of KV heads with equally many.

    Args:
        keys: after rotation.
        log_bias: nats added to the scaled score of each slot; None adds none.
        positions: token positions of the keys, if they are known.
        codes: of quantised slots, whose keys and values are the numbers that the codes represent;
            of a batch, those of every head.
    """

    keys: Float[Tensor, "*heads slots head_dim"]
    values: Float[Tensor, "*heads slots value_dim"]
    log_bias: Float[Tensor, "*heads slots"] | None = None
    positions: Int[Tensor, "*heads slots"] | None = None
    codes: PackedHead | Sequence[PackedHead] | None = None

    def __len__(self) -> int:
        """The number of slots of a single head."""
        return self.keys.shape[-2]

    def kept(self, which: slice | Tensor) -> "HeadSlots":
        """The chosen slots of a single head, unquantised."""
        bias = None if self.log_bias is None else self.log_bias[which]
        positions = None if self.positions is None else self.positions[which]
        return HeadSlots(self.keys[which], self.values[which], bias, positions)

    def split(self) -> Iterator["HeadSlots"]:
        """Each head of a batch."""
        for head, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            bias = None if self.log_bias is None else self.log_bias[head]
            positions = None if self.positions is None else self.positions[head]
            codes = self.codes[head] if isinstance(self.codes, list) else None
            yield HeadSlots(keys, values, bias, positions, codes)

    def to(self, dtype: torch.dtype) -> "HeadSlots":
        """Keys and values in another dtype; the dtype of the log-bias does not change."""
        return replace(self, keys=self.keys.to(dtype), values=self.values.to(dtype))

    def moved(self, num_tokens: int) -> "HeadSlots":
        """The same keys as those of tokens that come later by so many."""
        positions = None if self.positions is None else self.positions + num_tokens
        return replace(self, positions=positions)

    def bias_or_zeros(self) -> Float[Tensor, "*heads slots"]:
        """The log-bias; for slots without one 0, in at least float32."""
        if self.log_bias is not None:
            return self.log_bias
        dtype = torch.promote_types(self.keys.dtype, torch.float32)
        return self.keys.new_zeros(self.keys.shape[:-1], dtype=dtype)

    @staticmethod
    def stacked(heads: Sequence["HeadSlots"]) -> "HeadSlots":
        """A batch of heads with equally many slots, in at least float32.

        It has a log-bias if one of them has, and no positions.
        """
        keys = at_least_float32(torch.stack([head.keys for head in heads]))
        values = at_least_float32(torch.stack([head.values for head in heads]))
        bias = None
        if any(head.log_bias is not None for head in heads):
            bias = torch.stack([at_least_float32(head.bias_or_zeros()) for head in heads])
        return HeadSlots(keys, values, bias)

    @staticmethod
    def joined(pieces: Sequence["HeadSlots"]) -> "HeadSlots":
        """The slots of several pieces of one head, one after the other.

        Pieces without a log-bias get 0 if another has one. The positions are known if those of all
        pieces are.
        """
        bias = None
        if any(piece.log_bias is not None for piece in pieces):
            bias = torch.cat([piece.bias_or_zeros() for piece in pieces], dim=-1)
        known = [piece.positions for piece in pieces if piece.positions is not None]
        positions = torch.cat(known, dim=-1) if len(known) == len(pieces) else None
        keys = torch.cat([piece.keys for piece in pieces], dim=-2)
        values = torch.cat([piece.values for piece in pieces], dim=-2)
        return HeadSlots(keys, values, bias, positions)


HeadGrid = list[list[HeadSlots]]
"""The heads of one layer, per example and KV head."""
