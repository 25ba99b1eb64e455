"""The base classes of compressors and eviction scorers, and the helpers that they share."""

import hashlib
import importlib
import math
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvcat.attention.mass import attention_mass
from kvcat.cache import Bits, CompactCache, CompactLayer, Layer, QuantizedLayer, slot_facts
from kvcat.compress.protection import (
    behind_protected,
    check_protected,
    check_room,
    protected_layer,
    protecting,
)
from kvcat.compress.ranges import Range
from kvcat.compress.trace import Trace
from kvcat.errors import InputError
from kvcat.models import model_name
from kvcat.types import Float, Int, Tensor, check_no_autocast

Scores = list[Float[Tensor, "batch _ _"]]


@dataclass(frozen=True)
class Compressor(ABC):
    """Base class of compressors, which make compact caches from traces.

    A subclass is a frozen dataclass whose fields are its options.
    """

    @property
    def draws(self) -> bool:
        """Whether the compressor is randomised: its result depends on an option ``seed``."""
        return False

    def __call__(
        self,
        trace: Trace,
        *,
        keep_ratio: float | int | None = None,
        num_slots: int | None = None,
        protect: Sequence[Range] = (),
    ) -> CompactCache:
        """The compact cache with a size that is given as ``keep_ratio`` or as ``num_slots``.

        Args:
            trace: trace of the prefix.
            keep_ratio: fraction of the slots to keep, in (0, 1], that is ceil(keep_ratio *
                prefix_len) slots; 1 returns the dense cache.
            num_slots: average number of slots per layer and head, in [1, prefix_len].
            protect: ranges (first, end) of tokens whose slots stay exact, and come first, in every
                head and layer; they count among the slots (``protection``). For other calls,
                ``protecting(trace, ranges)`` is a trace that has them.

        Raises:
            InputError: keep_ratio or num_slots is out of range or below the number of protected
                tokens, a range is not in the prefix, or the method cannot compress the trace.
        """
        trace = protecting(trace, protect)
        slots = checked_slots(trace, keep_ratio, num_slots)
        if is_between(trace, slots):
            return next(self.compress(trace, [slots]))
        return self._at_an_end(trace, slots)

    def _at_an_end(self, trace: Trace, slots: int) -> CompactCache:
        """The cache of all slots, or of the protected ones alone."""
        return self.full(trace) if slots >= trace.max_slots else protected_alone(trace)

    def full(self, trace: Trace) -> CompactCache:
        """The cache with all slots: the dense one."""
        return trace.dense_cache()

    def each(self, trace: Trace, keep_ratios: Sequence[float | int]) -> Iterator[CompactCache]:
        """The compact caches for several keep ratios, in their order.

        Work that they share is done once.

        Raises:
            InputError: as a plain call.
        """
        sizes = [checked_slots(trace, keep_ratio, None) for keep_ratio in keep_ratios]
        caches = self.compress(trace, [slots for slots in sizes if is_between(trace, slots)])
        for slots in sizes:
            yield next(caches) if is_between(trace, slots) else self._at_an_end(trace, slots)

    @property
    def last_step(self) -> int | None:
        """The step of the last snapshot; None for a method without steps."""
        return None

    def snapshots(
        self, trace: Trace, *, keep_ratio: float | int | None = None, num_slots: int | None = None
    ) -> Iterator[tuple[int | None, CompactCache]]:
        """The step numbers, each with the compact cache after that step.

        A method without steps yields one cache, for step None.

        Raises:
            InputError: as a plain call.
        """
        return iter([(None, self(trace, keep_ratio=keep_ratio, num_slots=num_slots))])

    def each_snapshots(
        self, trace: Trace, keep_ratios: Sequence[float | int]
    ) -> Iterator[Iterator[tuple[int | None, CompactCache]]]:
        """The snapshots for several keep ratios, in their order.

        Work that they share is done once.
        """
        for cache in self.each(trace, keep_ratios):
            yield iter([(None, cache)])

    @abstractmethod
    def compress(self, trace: Trace, sizes: Sequence[int]) -> Iterator[CompactCache]:
        """The compact caches for several numbers of slots, in their order."""

    def compress_quantized(
        self, trace: Trace, sizes: Sequence[int], bits: Bits
    ) -> Iterator[CompactCache]:
        """The compact caches in few bits; here every number is rounded at the end.

        Args:
            trace: of the prefix.
            sizes: numbers of slots, each at most those of the prefix.
            bits: of keys and values.
        """
        caches = self.compress(trace, [size for size in sizes if size < trace.max_slots])
        for size in sizes:
            cache = next(caches) if size < trace.max_slots else trace.dense_cache()
            yield cache.quantize(bits)


@dataclass(frozen=True)
class Scorer(ABC):
    """Base class of eviction scorers, which choose the slots to keep.

    A subclass is a frozen dataclass whose fields are its options.
    """

    @abstractmethod
    def measure(self, trace: Trace) -> Scores:
        """Per layer, one score per slot and KV head; slots with the highest scores are kept."""

    def num_recent(self, num_slots: int) -> int:  # noqa: ARG002
        """The number of last slots that are kept regardless of their scores; 0 by default."""
        return 0


def slots_for(prefix_len: int, keep_ratio: float | int | None, num_slots: int | None) -> int:
    """The number of slots to keep: ceil(keep_ratio * prefix_len), or ``num_slots`` itself.

    keep_ratio is in (0, 1], num_slots in [1, prefix_len].

    Raises:
        InputError: a value is out of range, or both or neither of the two are given.
    """
    if (keep_ratio is None) == (num_slots is None):
        raise InputError(
            f"give either keep_ratio or num_slots, not keep_ratio={keep_ratio} and "
            f"num_slots={num_slots}"
        )
    if num_slots is not None:
        if not 1 <= num_slots <= prefix_len:
            raise InputError(f"num_slots must be in [1, {prefix_len}], not {num_slots}")
        return num_slots
    if keep_ratio is None or not 0 < keep_ratio <= 1:
        raise InputError(f"keep_ratio must be in (0, 1], not {keep_ratio}")
    # rounded first, so that 0.1 * 30 = 3.0000000000000004 gives 3
    return max(1, math.ceil(float(f"{keep_ratio * prefix_len:.12g}")))


def checked_slots(trace: Trace, keep_ratio: float | int | None, num_slots: int | None) -> int:
    """The number of slots to keep of a trace, as ``slots_for``.

    Raises:
        InputError: as ``slots_for``, fewer than are protected, or ``torch.autocast`` is on.
    """
    check_no_autocast(trace.keys[0].device)
    slots = slots_for(trace.prefix_len, keep_ratio, num_slots)
    check_room(trace, slots)
    return slots


def is_between(trace: Trace, num_slots: int) -> bool:
    """Whether a cache has to be made: not of all slots, nor of the protected ones alone."""
    return trace.num_protected < num_slots < trace.max_slots


def protected_alone(trace: Trace) -> CompactCache:
    """The cache that holds only the protected slots."""
    layers = [protected_layer(trace, index) for index in range(len(trace.keys))]
    return compact_cache(trace, layers, "protected", {})


def compact_cache(
    trace: Trace,
    layers: Sequence[Layer | QuantizedLayer],
    method: str,
    options: Mapping[str, object],
) -> CompactCache:
    """A compact cache of the trace, with metadata about its method.

    Raises:
        InputError: keys, values or log-bias are not finite, because a low-precision type
            overflowed; or the first slots are not the protected ones.
    """
    _check_finite(layers, method, options)
    cache = CompactCache(layers, trace.prefix_len, trace.fingerprint, states=trace.states)
    check_protected(trace, cache, method)
    facts = {
        "method": method,
        **slot_facts(cache),
        **options,
        "model": model_name(trace.model),
        "architecture": type(trace.model).__name__,
        **trace.facts(),
    }
    return replace(cache, metadata={key: str(fact) for key, fact in facts.items()})


def _check_finite(
    layers: Sequence[Layer | QuantizedLayer], method: str, options: Mapping[str, object]
) -> None:
    """Reject layers with a number that is not finite; a log-bias of -inf hides a slot.

    Codes of few bits are always finite.
    """
    for index, layer in enumerate(layers):
        if isinstance(layer, QuantizedLayer):
            continue
        tensors = {"keys": layer.keys, "values": layer.values}
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                dtype = str(tensor.dtype).removeprefix("torch.")
                settings = ", ".join(f"{key}={value}" for key, value in options.items())
                raise InputError(
                    f"{method} ({settings}) gives {name} in layer {index} that are not finite in "
                    f"{dtype}: choose bfloat16 or float32, or a larger ridge"
                )


def best_layer(
    trace: Trace, index: int, scores: Float[Tensor, "batch kv_heads prefix"], num_slots: int
) -> Layer:
    """The slots with the highest scores in one layer, unchanged; the protected ones come first.

    Among equal scores, the earlier slot is kept.
    """
    if trace.protected:
        other_scores = scores.index_select(2, trace.other_slots(index))
        num_others = num_slots - trace.num_protected
        others = best_layer(trace.unprotected, index, other_scores, num_others)
        return behind_protected(trace, index, others)
    slots = top_positions(scores.masked_fill(trace.ranks(index) < 0, -torch.inf), num_slots)
    bias = None if trace.log_bias is None else trace.log_bias[index].gather(2, slots)
    rows = slots.unsqueeze(-1)
    keys, values = (
        x[index].gather(2, rows.expand(-1, -1, -1, x[index].shape[-1]))
        for x in (trace.keys, trace.values)
    )
    return CompactLayer(keys, values, bias, None if trace.past_len else slots).without_absent()


def top_positions(
    scores: Float[Tensor, "*heads prefix"], num_slots: int
) -> Int[Tensor, "*heads slots"]:
    """The positions of the highest scores, in ascending order.

    Among equal scores, the earlier position is chosen.
    """
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    return order[..., :num_slots].sort(dim=-1).values


@torch.no_grad()
def received_mass(trace: Trace, start: int) -> Scores:
    """The total attention to each prefix position from the prefix queries at and after ``start``.

    There is one sum per KV head.
    """
    queries_of_layers = trace.prefix_queries_from(start)
    states = zip(queries_of_layers, trace.keys, trace.scales, trace.sinks, strict=True)
    return [
        attention_mass(queries, keys, scale=scale, sinks=sinks)
        for queries, keys, scale, sinks in states
    ]


def example_generators(trace: Trace, seed: int) -> list[torch.Generator]:
    """One random generator per example, seeded from the seed and the example's prefix.

    The draws for an example therefore do not depend on its batch.
    """
    generators = []
    for row in trace.input_ids[:, : trace.prefix_len].cpu():
        digest = hashlib.sha256(f"{seed}:".encode() + row.contiguous().numpy().tobytes()).digest()
        generators.append(torch.Generator().manual_seed(int.from_bytes(digest[:7], "little")))
    return generators


def classes_in(package: str, folder: Iterable[str], base: type) -> dict[str, Any]:
    """The only public subclass of ``base`` in every module of a package, by the module's name.

    A "_" in the name becomes "-".
    """
    classes = {}
    for entry in pkgutil.iter_modules(folder):
        module = importlib.import_module(f"{package}.{entry.name}")
        subclasses = [
            kind
            for name, kind in vars(module).items()
            if isinstance(kind, type)
            and issubclass(kind, base)
            and kind.__module__ == module.__name__
            and not name.startswith("_")
        ]
        (classes[entry.name.replace("_", "-")],) = subclasses
    return classes
