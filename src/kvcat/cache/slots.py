"""The slots of one layer: equally many in every head, or a number for each head."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate, pairwise

import torch

from kvcat.attention import Head
from kvcat.types import Bool, Float, Int, Tensor

Rows = Int[Tensor, " rows"] | list[int] | slice


class _Slots:
    """What both kinds of layers have in common."""

    counts: Int[Tensor, "batch kv_heads"]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors there are, by field name."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "Layer":
        """On another device, keys and values in another dtype; the log-bias keeps its own."""
        moved = {name: tensor.to(device=device) for name, tensor in self.tensors().items() if name != "counts"}
        moved |= {name: moved[name].to(dtype=dtype) for name in ("keys", "values")}
        return replace(self, **moved)  # type: ignore[type-var]

    @property
    def batch_size(self) -> int:
        """Number of examples."""
        return self.counts.shape[0]

    @property
    def num_slots(self) -> int:
        """Slots of the fullest head."""
        return int(self.counts.max())


@dataclass(frozen=True)
class CompactLayer(_Slots):
    """Keys and values of one layer's slots, and what is added to the scores of each slot.

    Args:
        keys: keys after rotation at their original positions.
        values: values.
        log_bias: nats added to the scaled score of each slot; None adds none.
        positions: token positions of the slots' keys, where the method knows them.
    """

    keys: Float[Tensor, "batch kv_heads slots head_dim"]
    values: Float[Tensor, "batch kv_heads slots value_dim"]
    log_bias: Float[Tensor, "batch kv_heads slots"] | None = None
    positions: Int[Tensor, "batch kv_heads slots"] | None = None

    @property
    def counts(self) -> Int[Tensor, "batch kv_heads"]:  # type: ignore[override]
        """Slots of every head."""
        return torch.full(self.keys.shape[:2], self.keys.shape[2])

    def head(self, example: int, head: int) -> Head:
        """Keys, values and log-bias of one KV head of one example."""
        bias = None if self.log_bias is None else self.log_bias[example, head]
        return self.keys[example, head], self.values[example, head], bias

    def padded(self) -> "CompactLayer":
        """The layer itself."""
        return self

    def without_absent(self) -> "Layer":
        """Without the slots of log-bias -inf, which no query sees; undoes ``RaggedLayer.padded``."""
        there = None if self.log_bias is None else self.log_bias > -torch.inf
        return self if there is None or bool(there.all()) else self.taken(there)

    def taken(self, there: Bool[Tensor, "batch kv_heads slots"]) -> "Layer":
        """Some of the slots, at least one of every head; ragged where heads keep different numbers of them."""
        return _layer({name: tensor[there] for name, tensor in self.tensors().items()}, there.sum(-1).cpu())

    def select(self, rows: Rows) -> "CompactLayer":
        """The given examples."""
        return CompactLayer(**{name: tensor[rows] for name, tensor in self.tensors().items()})

    @staticmethod
    def ragged(
        keys: list[list[Tensor]],
        values: list[list[Tensor]],
        log_bias: list[list[Tensor]] | None = None,
        positions: list[list[Tensor]] | None = None,
    ) -> "Layer":
        """A layer from single heads, ragged where they hold different numbers of slots.

        Args:
            keys: per example and KV head, keys after rotation (slots, head_dim), at least one slot.
            values, log_bias, positions: likewise; None: no log-bias, positions that are not known.
        """
        parts = {"keys": keys, "values": values, "log_bias": log_bias, "positions": positions}
        flat = {n: torch.cat([head for row in part for head in row]) for n, part in parts.items() if part is not None}
        return _layer(flat, torch.tensor([[len(head) for head in row] for row in keys]))


@dataclass(frozen=True)
class RaggedLayer(_Slots):
    """Slots of one layer whose heads hold different numbers of them, one head after the other, example by example.

    Args:
        keys, values, log_bias, positions: as in ``CompactLayer``.
        counts: slots of every head, at least 1; on the CPU.
    """

    keys: Float[Tensor, "total_slots head_dim"]
    values: Float[Tensor, "total_slots value_dim"]
    counts: Int[Tensor, "batch kv_heads"]
    log_bias: Float[Tensor, " total_slots"] | None = None
    positions: Int[Tensor, " total_slots"] | None = None

    @cached_property
    def _heads(self) -> list[slice]:
        return list(_spans(self.counts.flatten()))

    def head(self, example: int, head: int) -> Head:
        """Keys, values and log-bias of one KV head of one example."""
        own = self._heads[example * self.counts.shape[1] + head]
        return self.keys[own], self.values[own], None if self.log_bias is None else self.log_bias[own]

    def padded(self) -> CompactLayer:
        """All heads with as many slots as the fullest; added slots have log-bias -inf, which no query sees."""
        counts = self.counts.to(self.keys.device)
        there = torch.arange(self.num_slots, device=counts.device) < counts.unsqueeze(-1)
        bias = self.keys.new_full(there.shape, -torch.inf, dtype=torch.promote_types(self.keys.dtype, torch.float32))
        bias[there] = 0.0 if self.log_bias is None else self.log_bias.to(bias.dtype)
        keys, values = (flat.new_zeros(*there.shape, flat.shape[-1]) for flat in (self.keys, self.values))
        keys[there], values[there] = self.keys, self.values
        return CompactLayer(keys, values, bias)

    def select(self, rows: Rows) -> "Layer":
        """The given examples."""
        rows = rows.cpu() if isinstance(rows, Tensor) else rows
        chosen, examples = torch.arange(self.batch_size)[rows], list(_spans(self.counts.sum(1)))
        flat = {
            name: torch.cat([tensor[examples[row]] for row in chosen.tolist()])
            for name, tensor in self.tensors().items()
            if name != "counts"
        }
        return _layer(flat, self.counts[chosen])


Layer = CompactLayer | RaggedLayer


def _spans(counts: Int[Tensor, " parts"]) -> Iterator[slice]:
    return (slice(start, stop) for start, stop in pairwise([0, *accumulate(counts.tolist())]))


def _layer(flat: dict[str, Tensor], counts: Int[Tensor, "batch kv_heads"]) -> Layer:
    """A ``CompactLayer`` where all heads hold equally many slots, which follow each other head by head."""
    if int(counts.min()) < int(counts.max()):
        return RaggedLayer(**flat, counts=counts)
    return CompactLayer(**{n: x.reshape(*counts.shape, -1, *x.shape[1:]) for n, x in flat.items()})
