"""The base classes of compressors and eviction scorers, and the helpers that they share."""

import copy
import hashlib
import importlib
import math
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import torch

from kvcat.attention.mass import attention_mass
from kvcat.cache import (
    CompactCache,
    CompactLayer,
    HeadGrid,
    Layer,
    PackedHead,
    QuantizedLayer,
    check_dims,
    first_slots,
    parse_bits,
)
from kvcat.cache.ranges import Range, range_text
from kvcat.compress.prefix import Prefix, protected_layers, protecting
from kvcat.compress.trace import Trace
from kvcat.errors import InputError, check_in, check_kind, finite, whole
from kvcat.types import Float, Int, Tensor, check_no_autocast

Scores = list[Float[Tensor, "batch _ _"]]


@dataclass(frozen=True)
class Compressor(ABC):
    """Base class of compressors, which make compact caches from traces.

    A subclass is a frozen dataclass whose fields are its options. It defines ``fit``, and
    ``Compressor`` does the rest for every method:

    1. a size is checked, and turned into a number of slots (``slots_for``);
    2. protected slots are taken out of the prefix and of the size (``Prefix``);
    3. ``fit`` gives the layers of the slots that are kept, for sizes between none and all;
    4. protected slots are put back before them;
    5. with ``bits`` the slots are quantised, except for protected ones;
    6. what came out is checked, and described (``facts``).

    Args:
        bits: 8 or 4: keys and values become packed codes with that number of bits. None: they stay
            in the model's number type.
    """

    bits: int | None = field(default=None, kw_only=True)

    needs_all_queries: ClassVar[bool] = False
    """Whether the method reads the queries of all tokens of the prefix, so that it cannot compress
    what is compact already."""
    needs_predictions: ClassVar[bool] = False
    """Whether the method learns from the model's predictions after the prefix."""
    fits_queries: ClassVar[bool] = False
    """Whether the method fits slots to queries alone (``fitted_queries``), for which a session
    repeats what it compacts."""
    protects: ClassVar[bool] = True
    """Whether the method can fit the other slots around protected ones."""
    resumes: ClassVar[bool] = False
    """Whether a call accepts ``resume``, a file from which it continues after a kill, and
    ``on_step``, which is called after every step (``GradientCompression``)."""

    @property
    def name(self) -> str:
        """The method's name in the metadata of caches: that of the file which defines it."""
        file = type(self).__module__.rpartition(".")[2]
        return file.strip("_").replace("_", "-")

    @property
    def draws(self) -> bool:
        """Whether the compressor is randomised: its result depends on an option ``seed``."""
        return False

    @property
    def last_step(self) -> int | None:
        """The step of the last snapshot; None for a method without steps."""
        return None

    @abstractmethod
    def fit(self, prefix: Prefix, sizes: Sequence[int]) -> Iterator[Sequence[Layer]]:
        """The slots that are kept, one layer for each of the prefix's, for several sizes.

        Args:
            prefix: what is compressed, without protected slots.
            sizes: slots per layer and head, on average, each between 0 and ``prefix.max_slots``;
                work that they share is done once.
        """

    def fit_codes(
        self, prefix: Prefix, sizes: Sequence[int], bits: int
    ) -> Iterator[Sequence[HeadGrid]]:
        """As ``fit``, quantised: the heads of every layer, with their codes.

        Here every number is rounded to the nearest code at the end; a method that knows the codes
        before it fits overrides this. A size may be ``prefix.max_slots``.
        """
        fitted = self.fit(prefix, [size for size in sizes if size < prefix.max_slots])
        for size in sizes:
            is_whole = size >= prefix.max_slots
            layers = [x.without_absent() for x in prefix.layers] if is_whole else next(fitted)
            yield [_with_codes(layer, bits) for layer in layers]

    def facts(self, prefix: Prefix) -> dict[str, object]:  # noqa: ARG002
        """Options and other facts about the method, for the records of caches."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "bits"}

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
            keep_ratio: fraction of the slots to keep, in (0, 1], that is ceil(keep_ratio *
                prefix_len) slots; 1 returns the dense cache.
            num_slots: average number of slots per layer and head, in [1, prefix_len].
            protect: ranges (first, end) of tokens whose slots stay exact, and come first, in every
                head and layer; they count among the slots. For other calls, ``protecting(trace,
                ranges)`` is a trace that has them.

        Raises:
            InputError: keep_ratio or num_slots is out of range or below the number of protected
                tokens, a range is not in the prefix, or the method cannot compress the trace.
        """
        trace = protecting(trace, protect)
        return next(self.caches(trace, [self.slots_of(trace, keep_ratio, num_slots)]))

    def each(self, trace: Trace, keep_ratios: Sequence[float | int]) -> Iterator[CompactCache]:
        """The compact caches for several keep ratios, in their order.

        Work that they share is done once.

        Raises:
            InputError: as a plain call.
        """
        check_kind(Iterable, "a sequence of fractions", keep_ratios=keep_ratios)
        sizes = [self.slots_of(trace, keep_ratio, None) for keep_ratio in keep_ratios]
        return self.caches(trace, sizes)

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
        if self.last_step is None:
            for cache in self.each(trace, keep_ratios):
                yield iter([(None, cache)])
            return
        for keep_ratio in keep_ratios:
            yield self.snapshots(trace, keep_ratio=keep_ratio)

    def caches(self, trace: Trace, sizes: Sequence[int]) -> Iterator[CompactCache]:
        """The compact caches for several numbers of slots of ``slots_of``, in their order."""
        if self.bits is not None:
            yield from self._quantized_caches(trace, sizes, self.bits)
            return
        between = [size for size in sizes if is_between(trace, size)]
        fitted: Iterator[Sequence[Layer]] = iter(())
        prefix = None
        if between:
            prefix = Prefix.of(trace)
            fitted = self.fit(prefix, [size - prefix.num_protected for size in between])
        for size in sizes:
            if prefix is not None and is_between(trace, size):
                layers = prefix.whole_layers(next(fitted))
                yield compact_cache(trace, layers, self.name, self.facts(prefix))
            else:
                yield at_an_end(trace, size)

    def slots_of(self, trace: Trace, keep_ratio: float | int | None, num_slots: int | None) -> int:
        """The number of slots to keep of a trace, as ``slots_for``.

        Raises:
            InputError: as ``slots_for``; fewer than are protected; protected slots with a method
                that does not protect; unknown ``bits``; a trace without the predictions that the
                method needs; or ``torch.autocast`` is on.
        """
        check_kind(Trace, "a Trace", trace=trace)
        check_no_autocast(trace.hidden.device)
        if self.needs_predictions:
            trace.check_supervises()
        slots = slots_for(trace.prefix_len, keep_ratio, num_slots)
        if trace.protected:
            self.check_protects()
        if slots < trace.num_protected:
            raise InputError(
                f"{slots} slots are fewer than the {trace.num_protected} protected ones "
                f"(tokens {range_text(trace.protected)}): keep more, or protect fewer"
            )
        if self.bits is not None:
            parse_bits(self.bits)
        return slots

    def check_protects(self) -> None:
        """Raise an ``InputError`` for a method that cannot protect slots."""
        if not self.protects:
            raise InputError(f"{self.name} protects no slots: leave out protect")

    def with_seed(self, seed: int) -> "Compressor":
        """The same method with another seed, for a method that ``draws``."""
        drawing: Any = self
        return self if drawing.seed == seed else replace(drawing, seed=seed)

    def in_bits(self, bits: int | str | None) -> "Compressor":
        """The same method whose caches are quantised; None: they are not.

        Raises:
            InputError: other bits than 8 and 4.
        """
        other = copy.copy(self)
        object.__setattr__(other, "bits", None if bits is None else parse_bits(bits))
        return other

    def _quantized_caches(
        self, trace: Trace, sizes: Sequence[int], bits: int
    ) -> Iterator[CompactCache]:
        slots = trace.layers[0].slots
        check_dims(slots.keys.shape[-1], slots.values.shape[-1], bits)
        num_protected = trace.num_protected
        others = [size - num_protected for size in sizes if size > num_protected]
        fitted: Iterator[Sequence[HeadGrid]] = iter(())
        prefix = None
        if others:
            prefix = Prefix.of(trace)
            most = prefix.max_slots
            fitted = self.fit_codes(prefix, [min(size, most) for size in others], bits)
        for size in sizes:
            if prefix is None or size <= num_protected:
                yield at_an_end(trace, size).quantize(bits)
                continue
            grids = prefix.whole_heads(next(fitted))
            layers = [QuantizedLayer.of_heads(grid, bits, slots.keys.dtype) for grid in grids]
            cache = compact_cache(trace, layers, self.name, self.facts(prefix))
            first = first_slots(grids, num_protected)
            yield replace(cache, record=replace(cache.record, first_slots=first))


@dataclass(frozen=True)
class Scorer(ABC):
    """Base class of eviction scorers, which choose the slots to keep.

    A subclass is a frozen dataclass whose fields are its options.
    """

    needs_all_queries: ClassVar[bool] = False
    """As in ``Compressor``: true for a scorer that asks for ``Trace.prefix_queries_from``."""

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
        num_slots = whole("num_slots", num_slots)
        check_in(f"[1, {prefix_len}]", num_slots=num_slots)
        return num_slots
    ratio = finite("keep_ratio", keep_ratio)
    check_in("(0, 1]", keep_ratio=ratio)
    # rounded first, so that 0.1 * 30 = 3.0000000000000004 gives 3
    return max(1, math.ceil(float(f"{ratio * prefix_len:.12g}")))


def is_between(trace: Trace, num_slots: int) -> bool:
    """Whether a cache has to be made: not of all slots, nor of the protected ones alone."""
    return trace.num_protected < num_slots < trace.max_slots


def at_an_end(trace: Trace, num_slots: int) -> CompactCache:
    """The cache of all slots, or of the protected ones alone."""
    if num_slots >= trace.max_slots:
        return trace.dense_cache()
    return compact_cache(trace, protected_layers(trace), "protected", {})


def compact_cache(
    trace: Trace,
    layers: Sequence[Layer | QuantizedLayer],
    method: str,
    options: Mapping[str, object],
) -> CompactCache:
    """A compact cache of the trace, whose record has the method and its options.

    Raises:
        InputError: keys, values or log-bias are not finite, because a low-precision type
            overflowed.
    """
    _check_finite(layers, method, options)
    record = replace(
        trace.record(method),
        options={key: str(option) for key, option in options.items()},
    )
    return CompactCache(layers, trace.prefix_len, trace.fingerprint, record, trace.states)


def _with_codes(layer: Layer, bits: int) -> HeadGrid:
    """The heads of a layer, every number rounded to the nearest code."""
    return [
        [replace(head, codes=PackedHead.nearest(head.keys, head.values, bits)) for head in row]
        for row in layer.heads()
    ]


def _check_finite(
    layers: Sequence[Layer | QuantizedLayer], method: str, options: Mapping[str, object]
) -> None:
    """Reject layers with a number that is not finite; a log-bias of -inf hides a slot.

    Quantised keys and values are always finite. Their log-bias is not if keys attract so much more
    attention rounded than they did that its fit overflows.
    """
    for index, layer in enumerate(layers):
        if isinstance(layer, QuantizedLayer):
            tensors = {"log-bias": layer.half_bias}
            remedy = "leave out the bits"
        else:
            tensors = {"keys": layer.keys, "values": layer.values, "log-bias": layer.log_bias}
            ridge = ", or a larger ridge" if "ridge" in options else ""
            remedy = f"choose bfloat16 or float32{ridge}"
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            is_usable = tensor < torch.inf if name == "log-bias" else tensor.isfinite()
            if not is_usable.all():
                dtype = str(tensor.dtype).removeprefix("torch.")
                settings = ", ".join(f"{key}={value}" for key, value in options.items())
                raise InputError(
                    f"{method} ({settings}) gives {name} in layer {index} that are not finite in "
                    f"{dtype}: {remedy}"
                )


def best_layers(prefix: Prefix, scores: Scores, num_slots: int) -> list[Layer]:
    """In every layer, the slots of a prefix with the highest scores, unchanged.

    Args:
        prefix: what is compressed.
        scores: of all slots, protected ones included.
        num_slots: of every head.
    """
    if prefix.protected:
        pairs = zip(prefix.trace.layers, scores, strict=True)
        scores = [x.index_select(2, prefix.trace.other_slots(layer)) for layer, x in pairs]
    return [
        _best_layer(slots, of_layer, num_slots)
        for slots, of_layer in zip(prefix.layers, scores, strict=True)
    ]


def _best_layer(
    slots: CompactLayer, scores: Float[Tensor, "batch kv_heads slots"], num_slots: int
) -> Layer:
    """The slots of a layer with the highest scores, unchanged, without padding.

    Among equal scores, the earlier slot is kept.
    """
    chosen = top_positions(scores.masked_fill(slots.ranks() < 0, -torch.inf), num_slots)
    rows = chosen.unsqueeze(-1)  # (batch, kv_heads, slots, 1)
    keys, values = (
        states.gather(2, rows.expand(-1, -1, -1, states.shape[-1]))
        for states in (slots.keys, slots.values)
    )
    bias = None if slots.log_bias is None else slots.log_bias.gather(2, chosen)
    positions = None if slots.positions is None else slots.positions.gather(2, chosen)
    return CompactLayer(keys, values, bias, positions).without_absent()


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
        # 7 bytes: torch accepts no seed beyond 63 bits
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
