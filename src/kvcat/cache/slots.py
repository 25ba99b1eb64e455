"""The slots of one layer: equally many in every head, or a number for each head."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate, pairwise
from numbers import Integral
from typing import Any

import torch
from torch import nn

from kvcat.cache.heads import HeadGrid, HeadSlots
from kvcat.errors import InputError, check_kind
from kvcat.types import Bool, Float, Int, Tensor

Rows = Int[Tensor, " rows"] | list[int] | slice
_COUNTED = ("keys", "values", "log_bias")
_OF_SLOTS = (*_COUNTED, "positions")


def chosen_examples(rows: Rows, num_examples: int) -> list[int]:
    """The numbers of the examples that ``rows`` choose of a batch.

    Raises:
        InputError: no example, or one that the batch does not have.
    """
    check_kind((Sequence, slice, torch.Tensor), "a list of numbers", rows=rows)
    chosen: list[Any]
    if isinstance(rows, slice):
        chosen = list(range(num_examples))[rows]
    else:
        chosen = list(rows.tolist() if isinstance(rows, torch.Tensor) else rows)
    for row in chosen:
        is_number = isinstance(row, Integral) and not isinstance(row, bool)
        if not is_number or not -num_examples <= int(row) < num_examples:
            raise InputError(
                f"example {row} does not exist: the batch has examples 0 to {num_examples - 1}"
            )
    if not chosen:
        raise InputError("no example is chosen")
    return chosen


def in_dtype(name: str, states: Tensor, dtype: torch.dtype | None) -> Tensor:
    """States in another dtype; None: in theirs.

    Raises:
        InputError: a number that this dtype cannot hold.
    """
    converted = states.to(dtype=dtype)
    if converted.dtype != states.dtype and not converted.isfinite().all():
        raise InputError(
            f"{name} of the cache up to {states.abs().max():.3g} do not fit in {converted.dtype}"
        )
    return converted


class Slots:
    """The base class of all kinds of layers."""

    counts: Int[Tensor, "batch kv_heads"]

    def head(self, example: int, head: int) -> HeadSlots:
        """The slots of one KV head of one example."""
        raise NotImplementedError

    def example(self, number: int) -> tuple[HeadSlots, list[int]]:
        """The slots of an example, head after head, and how many each KV head has."""
        counts = self.counts[number].tolist()
        heads = [self.head(number, head) for head in range(len(counts))]
        return HeadSlots.joined(heads), counts

    def heads(self) -> HeadGrid:
        """The slots of all heads, per example and KV head."""
        num_examples, num_heads = self.counts.shape
        return [
            [self.head(example, head) for head in range(num_heads)]
            for example in range(num_examples)
        ]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are not None, by field name."""
        tensors = {}
        for field in fields(self):  # type: ignore[arg-type]
            tensor = getattr(self, field.name)
            if tensor is not None:
                tensors[field.name] = tensor
        return tensors

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Any:
        """On another device, keys and values in another dtype; the dtype of the log-bias does not
        change.

        Raises:
            InputError: a number that this dtype cannot hold.
        """
        tensors = self.tensors()
        tensors.pop("counts", None)  # which are on the CPU always
        moved = {name: tensor.to(device=device) for name, tensor in tensors.items()}
        for name in ("keys", "values"):
            moved[name] = in_dtype(name, moved[name], dtype)
        return replace(self, **moved)  # type: ignore[type-var]

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and log-bias."""
        tensors = self.tensors()
        return sum(tensors[name].nbytes for name in _COUNTED if name in tensors)

    @property
    def has_log_bias(self) -> bool:
        """Whether the slots have a log-bias."""
        return "log_bias" in self.tensors()

    @property
    def batch_size(self) -> int:
        """Number of examples."""
        return self.counts.shape[0]

    @property
    def num_slots(self) -> int:
        """Slots per head, on average, rounded up; see ``CompactCache``."""
        return rounded_mean([self.counts])

    @property
    def max_slots(self) -> int:
        """Slots of the fullest head."""
        return int(self.counts.max())


@dataclass(frozen=True)
class CompactLayer(Slots):
    """Keys and values of one layer's slots, and a bias on the score of each slot.

    Args:
        keys: keys after rotation at their original positions.
        log_bias: nats added to the scaled score of each slot; None adds none.
        positions: token positions of the slots' keys, if the method knows them.
    """

    keys: Float[Tensor, "batch kv_heads slots head_dim"]
    values: Float[Tensor, "batch kv_heads slots value_dim"]
    log_bias: Float[Tensor, "batch kv_heads slots"] | None = None
    positions: Int[Tensor, "batch kv_heads slots"] | None = None

    @property
    def counts(self) -> Int[Tensor, "batch kv_heads"]:  # type: ignore[override]
        """Slots of every head."""
        return torch.full(self.keys.shape[:2], self.keys.shape[2])

    def head(self, example: int, head: int) -> HeadSlots:
        """The slots of one KV head of one example."""
        bias = None if self.log_bias is None else self.log_bias[example, head]
        positions = None if self.positions is None else self.positions[example, head]
        return HeadSlots(self.keys[example, head], self.values[example, head], bias, positions)

    def padded(self) -> "CompactLayer":
        """The layer itself."""
        return self

    def exists(self) -> Bool[Tensor, "batch kv_heads slots"]:
        """Which slots are not padding: a log-bias of -inf hides a slot from every query."""
        if self.log_bias is None:
            shape = self.keys.shape[:3]
            return torch.ones(1, dtype=torch.bool, device=self.keys.device).expand(shape)
        return self.log_bias > -torch.inf

    def present_counts(self) -> Int[Tensor, "batch kv_heads"]:
        """The number of slots of every head that are not padding; on the CPU."""
        return self.exists().sum(-1).cpu()

    def present_head(self, example: int, head: int) -> HeadSlots:
        """The slots of one KV head of one example, without padding."""
        slots = self.head(example, head)
        if slots.log_bias is None:
            return slots
        exists = slots.log_bias > -torch.inf
        return slots if bool(exists.all()) else slots.kept(exists)

    def ranks(self) -> Int[Tensor, "batch kv_heads slots"]:
        """The index of each slot within its head; -1 for padding."""
        exists = self.exists()
        return (exists.cumsum(-1) - 1).masked_fill(~exists, -1)

    def at(self, slots: Int[Tensor, " chosen"]) -> "CompactLayer":
        """The chosen slots, the same in every head."""
        tensors = {
            name: x.index_select(2, slots.to(x.device)) for name, x in self.tensors().items()
        }
        return CompactLayer(**tensors)

    def extended(
        self,
        keys: Float[Tensor, "batch kv_heads new head_dim"],
        values: Float[Tensor, "batch kv_heads new value_dim"],
    ) -> "CompactLayer":
        """The slots, and after them one for each of some tokens; positions are not known."""
        bias = self.log_bias
        if bias is not None:
            bias = nn.functional.pad(bias, (0, keys.shape[2]))
        all_keys = torch.cat([self.keys, keys], dim=2)
        return CompactLayer(all_keys, torch.cat([self.values, values], dim=2), bias)

    def without_absent(self) -> "Layer":
        """The layer without slots of log-bias -inf, which no query sees; undoes ``padded``."""
        if self.log_bias is None:
            return self
        exists = self.log_bias > -torch.inf
        return self if bool(exists.all()) else self.taken(exists)

    def taken(self, kept: Bool[Tensor, "batch kv_heads slots"]) -> "Layer":
        """The kept slots, at least one in every head; ragged if heads keep different numbers."""
        flat = {name: tensor[kept] for name, tensor in self.tensors().items()}
        return _layer(flat, kept.sum(-1).cpu())

    def select(self, rows: Rows) -> "CompactLayer":
        """The given examples."""
        return CompactLayer(**{name: tensor[rows] for name, tensor in self.tensors().items()})

    @staticmethod
    def of_heads(heads: HeadGrid) -> "Layer":
        """A layer from its heads; ragged if they hold different numbers of slots.

        Args:
            heads: per example and KV head, at least one slot each. If one of them has a log-bias,
                that of the others is 0; the layer has positions if all heads have.
        """
        flat = HeadSlots.joined([head for of_example in heads for head in of_example])
        tensors = {name: getattr(flat, name) for name in _OF_SLOTS}
        counts = torch.tensor([[len(head) for head in of_example] for of_example in heads])
        return _layer({name: x for name, x in tensors.items() if x is not None}, counts)


@dataclass(frozen=True)
class RaggedLayer(Slots):
    """Slots of one layer whose heads hold different numbers of slots.

    The slots of one head follow those of the previous head, example by example.

    Args:
        keys, values, log_bias, positions: as in ``CompactLayer``.
        counts: slots of every head, at least 1; on the CPU.
    """

    keys: Float[Tensor, "total_slots head_dim"]
    values: Float[Tensor, "total_slots value_dim"]
    counts: Int[Tensor, "batch kv_heads"]
    log_bias: Float[Tensor, " total_slots"] | None = None
    positions: Int[Tensor, " total_slots"] | None = None

    @property
    def dims(self) -> tuple[int, int]:
        """Channels of a key and of a value."""
        return self.keys.shape[-1], self.values.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        """Type of the keys and values."""
        return self.keys.dtype

    @property
    def device(self) -> torch.device:
        """Where the keys and values are."""
        return self.keys.device

    @cached_property
    def _places(self) -> list[slice]:
        """The slots of every head, example by example."""
        return list(spans(self.counts.flatten().tolist()))

    def head(self, example: int, head: int) -> HeadSlots:
        """The slots of one KV head of one example."""
        return self._flat.kept(self._places[example * self.counts.shape[1] + head])

    def example(self, number: int) -> tuple[HeadSlots, list[int]]:
        """The slots of an example, head after head, and how many each KV head has."""
        num_heads = self.counts.shape[1]
        of_example = self._places[number * num_heads : (number + 1) * num_heads]
        slots = self._flat.kept(slice(of_example[0].start, of_example[-1].stop))
        return slots, [place.stop - place.start for place in of_example]

    @property
    def _flat(self) -> HeadSlots:
        return HeadSlots(self.keys, self.values, self.log_bias, self.positions)

    def padded(self) -> CompactLayer:
        """All heads with as many slots as the fullest; added slots have log-bias -inf."""
        counts = self.counts.to(self.keys.device)
        slot_numbers = torch.arange(self.max_slots, device=counts.device)
        exists = slot_numbers < counts.unsqueeze(-1)  # (batch, kv_heads, slots)
        bias_dtype = torch.promote_types(self.keys.dtype, torch.float32)
        bias = self.keys.new_full(exists.shape, -torch.inf, dtype=bias_dtype)
        # a mask of all slots in their order selects what the flat tensors hold in the same order
        bias[exists] = 0.0 if self.log_bias is None else self.log_bias.to(bias_dtype)
        keys = self.keys.new_zeros(*exists.shape, self.keys.shape[-1])
        keys[exists] = self.keys
        values = self.values.new_zeros(*exists.shape, self.values.shape[-1])
        values[exists] = self.values
        return CompactLayer(keys, values, bias)

    def select(self, rows: Rows) -> "Layer":
        """The given examples."""
        if isinstance(rows, Tensor):
            rows = rows.cpu()
        chosen = torch.arange(self.batch_size)[rows]
        slots_of_examples = list(spans(self.counts.sum(1).tolist()))
        tensors = self.tensors()
        del tensors["counts"]
        flat = {}
        for name, tensor in tensors.items():
            flat[name] = torch.cat([tensor[slots_of_examples[row]] for row in chosen.tolist()])
        return _layer(flat, self.counts[chosen])


Layer = CompactLayer | RaggedLayer


def rounded_mean(counts: Sequence[Int[Tensor, "batch _"]]) -> int:
    """The average of all counts, rounded up."""
    total = sum(int(layer_counts.sum()) for layer_counts in counts)
    num_heads = sum(layer_counts.numel() for layer_counts in counts)
    return -(-total // num_heads)


def spans(sizes: Sequence[int]) -> Iterator[slice]:
    """The rows of each group, for groups of these sizes that follow each other."""
    return (slice(start, stop) for start, stop in pairwise([0, *accumulate(sizes)]))


def _layer(flat: dict[str, Tensor], counts: Int[Tensor, "batch kv_heads"]) -> Layer:
    """A layer from slots that follow each other head by head; ragged if the counts differ."""
    if int(counts.min()) < int(counts.max()):
        return RaggedLayer(**flat, counts=counts)
    by_head = {}
    for name, tensor in flat.items():
        by_head[name] = tensor.reshape(*counts.shape, -1, *tensor.shape[1:])
    return CompactLayer(**by_head)


def repeated(states: Tensor, batch: int) -> Tensor:
    """Every row as often as a batch needs it."""
    # a forward may have other rows than those that ``inputs`` was made for
    if batch % len(states):
        raise InputError(f"a cache of {len(states)} examples cannot serve a batch of {batch}")
    return states if batch == len(states) else states.repeat_interleave(batch // len(states), dim=0)
