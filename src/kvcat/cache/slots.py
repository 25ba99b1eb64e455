"""The slots of one layer: equally many in every head, or as many as each head deserves."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch

from kvcat.attention.carried import Head
from kvcat.errors import InputError
from kvcat.types import Bool, Float, Int, Tensor


@dataclass(frozen=True)
class CompactLayer:
    """Keys and values of one layer's slots, and what is added to the scores of each slot.

    Args:
        keys: keys after rotation at their original positions.
        values: values.
        log_bias: nats added to the scaled score of each slot; None adds none.
        positions: token positions that the slots' keys stood at, where the method knows them.
    """

    keys: Float[Tensor, "batch kv_heads slots head_dim"]
    values: Float[Tensor, "batch kv_heads slots value_dim"]
    log_bias: Float[Tensor, "batch kv_heads slots"] | None = None
    positions: Int[Tensor, "batch kv_heads slots"] | None = None

    @property
    def batch_size(self) -> int:
        """Number of examples."""
        return self.keys.shape[0]

    @property
    def num_slots(self) -> int:
        """Slots of the fullest head: of every head."""
        return self.keys.shape[2]

    @property
    def counts(self) -> Int[Tensor, "batch kv_heads"]:
        """Slots of every head."""
        return torch.full(self.keys.shape[:2], self.num_slots)

    def head(self, example: int, head: int) -> Head:
        """Keys, values and log-bias of one head.

        Args:
            example: row of the batch.
            head: KV head.
        """
        bias = None if self.log_bias is None else self.log_bias[example, head]
        return self.keys[example, head], self.values[example, head], bias

    def padded(self) -> "CompactLayer":
        """The layer itself: nothing is missing."""
        return self

    def without_absent(self) -> "Layer":
        """Without the slots of log-bias -inf, which no query sees: what ``padded`` added goes again."""
        if self.log_bias is None or bool((there := self.log_bias > -torch.inf).all()):
            return self
        return self.taken(there)

    def taken(self, there: Bool[Tensor, "batch kv_heads slots"]) -> "Layer":
        """Some of the slots, ragged where heads are left with other numbers of them.

        Args:
            there: which ones; at least one of every head.

        Raises:
            InputError: a head without slots.
        """
        flat = {name: tensor[there] for name, tensor in self.tensors().items()}
        return _evened(RaggedLayer(**{"log_bias": None, **flat}, counts=there.sum(-1).cpu()))

    def select(self, rows: Int[Tensor, " rows"] | list[int] | slice) -> "CompactLayer":
        """The given examples."""
        return CompactLayer(**{name: tensor[rows] for name, tensor in self.tensors().items()})

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "CompactLayer":
        """On another device, keys and values in another dtype; the log-bias keeps its own."""
        moved = {name: tensor.to(device=device) for name, tensor in self.tensors().items()}
        return CompactLayer(
            **{**moved, "keys": moved["keys"].to(dtype=dtype), "values": moved["values"].to(dtype=dtype)}
        )

    def tensors(self) -> dict[str, Tensor]:
        """The tensors there are, by field name."""
        named = {name: getattr(self, name) for name in ("keys", "values", "log_bias", "positions")}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @staticmethod
    def ragged(
        keys: list[list[Tensor]],
        values: list[list[Tensor]],
        log_bias: list[list[Tensor]] | None = None,
        positions: list[list[Tensor]] | None = None,
    ) -> "Layer":
        """A layer whose heads have slots of their own number; where these are equal, an ordinary one.

        Args:
            keys: per example and KV head, keys after rotation (slots, head_dim), at least one slot.
            values: likewise, (slots, value_dim).
            log_bias: likewise, (slots,); None adds none.
            positions: likewise, (slots,); None where they are not known.
        """
        counts = torch.tensor([[len(head) for head in row] for row in keys])
        flat = {
            name: torch.cat([head for row in part for head in row])
            for name, part in (("keys", keys), ("values", values), ("log_bias", log_bias), ("positions", positions))
            if part is not None
        }
        return _evened(RaggedLayer(**{"log_bias": None, **flat}, counts=counts))


@dataclass(frozen=True)
class RaggedLayer:
    """Slots of one layer whose heads keep different numbers of them, one head after the other in one tensor.

    Args:
        keys: of all heads of the first example, then of the next.
        values: in the same order.
        log_bias: in the same order, nats; None adds none.
        counts: slots of every head, at least 1; on the CPU.
        positions: token positions that the slots' keys stood at, where the method knows them.

    Raises:
        InputError: a head without slots, or counts that do not add up.
    """

    keys: Float[Tensor, "total_slots head_dim"]
    values: Float[Tensor, "total_slots value_dim"]
    log_bias: Float[Tensor, " total_slots"] | None
    counts: Int[Tensor, "batch kv_heads"]
    positions: Int[Tensor, " total_slots"] | None = None

    def __post_init__(self) -> None:
        lengths = {len(tensor) for tensor in (self.keys, self.values, self.log_bias) if tensor is not None}
        if self.counts.numel() == 0 or int(self.counts.min()) < 1:
            raise InputError("a head without slots: every head keeps at least one")
        if lengths != {int(self.counts.sum())}:
            raise InputError(f"heads of {int(self.counts.sum())} slots in all do not fit tensors of {sorted(lengths)}")

    @cached_property
    def _ends(self) -> list[int]:
        return [0, *accumulate(self.counts.flatten().tolist())]

    @property
    def batch_size(self) -> int:
        """Number of examples."""
        return self.counts.shape[0]

    @property
    def num_slots(self) -> int:
        """Slots of the fullest head."""
        return int(self.counts.max())

    def head(self, example: int, head: int) -> Head:
        """Keys, values and log-bias of one head.

        Args:
            example: row of the batch.
            head: KV head.
        """
        ends = self._ends
        index = example * self.counts.shape[1] + head
        own = slice(ends[index], ends[index + 1])
        return self.keys[own], self.values[own], None if self.log_bias is None else self.log_bias[own]

    def padded(self) -> CompactLayer:
        """All heads with as many slots as the fullest; those added have a log-bias of -inf: no query sees them."""
        batch, kv_heads = self.counts.shape
        wide = self.num_slots
        counts = self.counts.to(self.keys.device)
        there = (torch.arange(wide, device=counts.device) < counts.unsqueeze(-1)).flatten()
        bias = self.keys.new_full((len(there),), -torch.inf, dtype=torch.promote_types(self.keys.dtype, torch.float32))
        bias[there] = 0.0 if self.log_bias is None else self.log_bias.to(bias.dtype)

        def spread(flat: Tensor) -> Tensor:
            result = flat.new_zeros(len(there), flat.shape[-1])
            result[there] = flat
            return result.view(batch, kv_heads, wide, -1)

        return CompactLayer(spread(self.keys), spread(self.values), bias.view(batch, kv_heads, wide))

    def select(self, rows: Int[Tensor, " rows"] | list[int] | slice) -> "Layer":
        """The given examples."""
        chosen = torch.arange(self.batch_size)[rows].tolist()
        ends = [0, *accumulate(self.counts.sum(1).tolist())]
        spans = [slice(start, stop) for start, stop in pairwise(ends)]

        def taken(flat: Tensor) -> Tensor:
            return torch.cat([flat[spans[row]] for row in chosen])

        flat = {name: taken(tensor) for name, tensor in self.tensors().items() if name != "counts"}
        return _evened(RaggedLayer(**{"log_bias": None, **flat}, counts=self.counts[chosen]))

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "RaggedLayer":
        """On another device, keys and values in another dtype; the log-bias keeps its own."""
        moved = {name: tensor.to(device=device) for name, tensor in self.tensors().items() if name != "counts"}
        moved |= {"keys": moved["keys"].to(dtype=dtype), "values": moved["values"].to(dtype=dtype)}
        return RaggedLayer(**{"log_bias": None, **moved}, counts=self.counts)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors there are, by field name."""
        named = {name: getattr(self, name) for name in ("keys", "values", "log_bias", "counts", "positions")}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


Layer = CompactLayer | RaggedLayer


def _evened(layer: RaggedLayer) -> Layer:
    """An ordinary layer where all heads hold equally many slots."""
    if int(layer.counts.min()) < layer.num_slots:
        return layer
    shape = (*layer.counts.shape, layer.num_slots)
    return CompactLayer(**{n: x.reshape(*shape, *x.shape[1:]) for n, x in layer.tensors().items() if n != "counts"})
