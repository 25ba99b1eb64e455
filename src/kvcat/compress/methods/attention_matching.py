"""Attention Matching: few slots fitted to the attention of the whole prefix."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import repeat
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from tqdm.auto import tqdm

from kvcat.cache import (
    Bits,
    CompactCache,
    CompactLayer,
    Layer,
    PackedHead,
    QuantizedLayer,
    check_dims,
    first_slots,
)
from kvcat.compress.base import Compressor, compact_cache
from kvcat.compress.budgets import attention_and_curves, share_out, slot_sizes
from kvcat.compress.calibration import CalibratedBudgets, load_budgets
from kvcat.compress.fitting import fit_to_dense
from kvcat.compress.head_attention import DenseAttention, HeadBatch, take
from kvcat.compress.heads import HeadIndex, Heads, draw_rows
from kvcat.compress.protection import behind_protected
from kvcat.compress.queries import fitted_queries, usual_own_weight
from kvcat.compress.rounding import RoundedHeads, round_keys_together, round_values_together
from kvcat.compress.solvers import check_ridge
from kvcat.compress.trace import Trace
from kvcat.errors import InputError
from kvcat.options import check_options
from kvcat.types import Float, Int, Tensor

BUDGETS = ("equal", "adaptive")
PRESETS: dict[str, dict[str, Any]] = {
    "stable": {},
    "known": {"own_weight": 0.0, "ridge": 3e-3},
    "paper": {
        "num_queries": 256,
        "num_iters": 2,
        "ridge": 1e-4,
        "own_weight": 0.0,
        "budgets": "equal",
    },
}


class HeadFit(NamedTuple):
    """The slots that a batch of KV heads keeps."""

    slots: Int[Tensor, "heads slots"]  # positions in the prefix, ascending
    values: Float[Tensor, "heads slots value_dim"]
    log_bias: Float[Tensor, "heads slots"]  # nats

    def split(self) -> Iterator["HeadFit"]:
        """The slots of each head, without the dimension of heads."""
        return map(HeadFit._make, zip(*self, strict=True))


class SlotsOfHead(NamedTuple):
    """The slots that one KV head keeps, and in few bits their keys and values."""

    fit: HeadFit  # without the dimension of heads
    packed: PackedHead | None


@dataclass(frozen=True)
class _Options(Compressor):
    """The options of ``AttentionMatching``, described there."""

    preset: str = field(default="stable", compare=False)
    num_queries: int | None = None
    num_iters: int | None = None
    ridge: float | None = 0.05
    own_weight: float | None = None
    log_bias: bool = True
    budgets: str = "adaptive"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.budgets not in BUDGETS:
            _check_budget_file(self.budgets)
        _check_range("num_queries", self.num_queries, least=1)
        _check_range("num_iters", self.num_iters, least=0)
        _check_range("own_weight", self.own_weight, least=0)
        check_ridge(self.ridge)


class AttentionMatching(_Options):
    """Original keys by attention; a log-bias and values fitted so that attention equals the dense
    one.

    For every layer and KV head (``match_attention``): keep the keys with the largest
    root-mean-square attention weight over the queries; fit the log-bias beta so that sum_j
    exp(q.k_j + beta_j) over kept keys equals the sum over the whole prefix; fit values C so that
    softmax(q.K_kept + beta) C equals the dense attention output.

    Args:
        preset: values of the options that are not named. "stable" is for later text that is not
            known yet: it also fits to the prefix's own queries, and pulls each slot towards its
            original state, because few queries may attend to it. "known" is for the case that no
            queries other than the supervising ones will follow: it fits closely to these alone.
            "paper" is the paper's method: 256 queries, 2 steps for the log-bias, ridge 1e-4.
        num_queries: queries per KV head, drawn without replacement; None uses all.
        num_iters: None weighs a query's errors by the share of its attention that goes to the
            prefix, solves the log-bias to convergence, pulled to 0, and pulls values towards those
            of their keys. Both pulls are relative to the mean squared length of the columns without
            the longest one (``usual_column``). A number is the paper's form: all queries count
            alike, so many projected-gradient steps without a pull, values pulled towards 0.
        ridge: strength of the values' pull; in the paper's form relative to the squared spectral
            norm. None: minimum-norm least squares, and a log-bias without a pull.
        own_weight: weight of the prefix's own queries, moved after it (``fitted_queries``), all
            together and relative to the others; 0 leaves them out. They represent the queries of
            later text. None: 1 with a repetition of the document, 2 with other text.
        log_bias: False fits no log-bias; slots that have one from an earlier compression keep it.
        budgets: "equal", as many slots in every head. Otherwise every example allocates the same
            total so that the squared errors of the attention outputs, relative to the residual
            stream that they are added to, have a small sum: "adaptive", by errors that are measured
            on the document. A file of `kvcat budgets` (``CalibratedBudgets``) allocates by the
            errors of other documents, which saves the time of measuring this one's.
        seed: seed of the draw of queries.

    Raises:
        InputError: an unknown option, or one out of its range.

    References: KV-CAT, appendix "Attention-Matching"; Zweiger et al. 2026, arXiv:2602.16284
        (AM-HighestAttnKeys).
    """

    group_elements: ClassVar[int] = 2**24
    """Most numbers that heads solved together hold; no option, as the caches do not depend on it.
    """

    def __init__(self, preset: str = "stable", **options: Any) -> None:
        if preset not in PRESETS:
            raise InputError(f"preset must be one of {', '.join(PRESETS)}, not {preset!r}")
        check_options(_Options, options, "attention-matching")
        super().__init__(preset=preset, **{**PRESETS[preset], **options})

    @property
    def draws(self) -> bool:
        """Whether the result depends on the seed."""
        return self.num_queries is not None

    def compress(self, trace: Trace, sizes: Sequence[int]) -> Iterator[CompactCache]:
        """The caches; queries and dense attention are computed once for all sizes."""
        return self._compress(trace, sizes, None)

    def compress_quantized(
        self, trace: Trace, sizes: Sequence[int], bits: Bits
    ) -> Iterator[CompactCache]:
        """The caches in few bits.

        The keys are rounded first. Log-bias and values are fitted to the rounded keys, and then the
        values are rounded, each making up for the errors of those before.
        """
        check_dims(trace.keys[0].shape[-1], trace.values[0].shape[-1], bits)
        return self._compress(trace, sizes, bits)

    @torch.no_grad()
    def _compress(
        self, trace: Trace, sizes: Sequence[int], bits: Bits | None
    ) -> Iterator[CompactCache]:
        if not sizes:
            return
        heads = self._heads(trace)
        unprotected = heads.trace
        sizes = [size - trace.num_protected for size in sizes]
        calibrated = None if self.budgets in BUDGETS else load_budgets(self.budgets)
        dense, allocations = self._attention_and_slots(heads, sizes, calibrated)
        options = {option.name: getattr(self, option.name) for option in fields(self)}
        if self.own_weight is None:
            options["own_weight"] = usual_own_weight(trace)
        if calibrated is not None:
            options["budgets"] = f"{Path(self.budgets).name} {calibrated.digest[:12]}"
        if bits is not None:
            options["bits"] = bits
        for slots_of_heads in allocations:
            fits = self._fit(heads, dense, slots_of_heads, bits)
            layers = []
            for index in range(len(trace.keys)):
                layer = _layer(unprotected, index, fits, log_bias=self.log_bias, bits=bits)
                if not isinstance(layer, QuantizedLayer):
                    layer = behind_protected(trace, index, layer)
                layers.append(layer)
            if bits is not None and not trace.past_len:
                options |= _first_slots(trace, fits)
            yield compact_cache(trace, layers, "attention-matching", options)

    def _heads(self, trace: Trace) -> Heads:
        """The trace's heads with the queries to fit to."""
        fitted = fitted_queries(trace, self.own_weight, by_share=self.num_iters is None)
        drawn = None
        if self.num_queries is not None:
            drawn = draw_rows(trace, fitted, self.num_queries, self.seed)
        return Heads(trace.unprotected, fitted, drawn, self.group_elements)

    def _attention_and_slots(
        self, heads: Heads, sizes: Sequence[int], calibrated: CalibratedBudgets | None
    ) -> tuple[dict[HeadIndex, DenseAttention], list[dict[HeadIndex, int]]]:
        """Every head's attention over the prefix, and for each size the slots of every head."""
        prefix = heads.trace
        allocations: list[dict[HeadIndex, int]] = []
        if calibrated is not None:
            allocations = [calibrated.allocate(prefix, size) for size in sizes]
        is_measured = self.budgets == "adaptive"
        curve_sizes: set[int] = set()
        if is_measured:
            curve_sizes.update(*(slot_sizes(size, prefix.max_slots) for size in sizes))
        groups = _with_progress(heads.groups_for_scores(), "attention of the prefix")
        dense, curves = attention_and_curves(heads, groups, curve_sizes)
        if self.budgets == "equal":
            allocations = [dict.fromkeys(dense, size) for size in sizes]
        elif is_measured:
            allocations = [
                share_out(curves, size, prefix.max_slots, by_layer=False) for size in sizes
            ]
        return dense, allocations

    def _fit(
        self,
        heads: Heads,
        dense: Mapping[HeadIndex, DenseAttention],
        slots_of_heads: Mapping[HeadIndex, int],
        bits: Bits | None,
    ) -> dict[HeadIndex, SlotsOfHead]:
        """The slots that every head keeps."""
        fits: dict[HeadIndex, SlotsOfHead] = {}
        for group in _with_progress(heads.groups_for_fit(slots_of_heads), "attention matching"):
            group_fit, rounded = _match(
                heads.load_fitted(group),
                DenseAttention.stack([dense[head] for head in group]),
                slots_of_heads[group[0]],
                num_iters=self.num_iters,
                ridge=self.ridge,
                log_bias=self.log_bias,
                bits=bits,
            )
            packed = repeat(None, len(group)) if rounded is None else rounded.split()
            of_heads = map(SlotsOfHead, group_fit.split(), packed)
            fits.update(zip(group, of_heads, strict=True))
        return fits


def match_attention(
    batch: HeadBatch,
    dense: DenseAttention,
    num_slots: int,
    *,
    num_iters: int | None = None,
    ridge: float | None = 0.05,
    log_bias: bool = True,
) -> HeadFit:
    """Positions, values and log-bias of the slots of a batch of KV heads.

    Args:
        batch: keys, values, queries and their weights.
        dense: their attention over the whole prefix.
        num_slots: slots per head; heads that have no more slots keep all of them unchanged.
        num_iters, ridge, log_bias: as in ``AttentionMatching``; without log-bias it is 0.
    """
    fit, _ = _match(
        batch, dense, num_slots, num_iters=num_iters, ridge=ridge, log_bias=log_bias, bits=None
    )
    return fit


def _match(
    batch: HeadBatch,
    dense: DenseAttention,
    num_slots: int,
    *,
    num_iters: int | None,
    ridge: float | None,
    log_bias: bool,
    bits: Bits | None,
) -> tuple[HeadFit, RoundedHeads | None]:
    """As ``match_attention``; with ``bits``, keys and values in few bits as well.

    The keys are rounded before the fit and the values after it, also where all slots are kept.
    """
    num_heads, prefix_len, _ = batch.keys.shape
    if num_slots >= prefix_len and bits is None:
        every_slot = torch.arange(prefix_len, device=batch.keys.device).expand(num_heads, -1)
        return HeadFit(every_slot, batch.values, torch.zeros_like(batch.keys[..., 0])), None
    slots = dense.first_slots(num_slots)
    slot_values = take(batch.values, slots)
    rounded_keys = None
    if bits is not None:
        weighted_queries = batch.queries * dense.weights.unsqueeze(-1)
        rounded_keys = round_keys_together(take(batch.keys, slots), weighted_queries, bits)
    kept_keys = None if rounded_keys is None else rounded_keys.numbers
    scores = batch.scores(slots=slots, keys=kept_keys)  # (heads, fitted queries, slots)
    outputs = dense.outputs
    if batch.last_seen is not None:
        sees_a_slot = scores.amax(-1, keepdim=True) > -torch.inf
        outputs = outputs * sees_a_slot
    dense = dense._replace(outputs=outputs)
    bias, values, attention = fit_to_dense(
        scores, dense, slot_values, num_iters=num_iters, ridge=ridge, log_bias=log_bias
    )
    if bits is None or rounded_keys is None:
        return HeadFit(slots, values, bias), None
    rounded_values = round_values_together(values, attention, bits)
    fit = HeadFit(slots, rounded_values.numbers, bias)
    return fit, RoundedHeads(rounded_keys, rounded_values)


def _first_slots(trace: Trace, fits: Mapping[HeadIndex, SlotsOfHead]) -> dict[str, str]:
    """Which first tokens have a slot, for caches whose layers do not know positions."""
    layers = []
    for index, keys in enumerate(trace.keys):
        num_examples, num_heads = keys.shape[:2]
        by_example = [
            [fits[index, example, head].fit.slots for head in range(num_heads)]
            for example in range(num_examples)
        ]
        layers.append(by_example)
    return first_slots(layers)


def _layer(
    trace: Trace,
    index: int,
    fits: Mapping[HeadIndex, SlotsOfHead],
    *,
    log_bias: bool,
    bits: Bits | None,
) -> Layer | QuantizedLayer:
    """One layer's kept keys with the values and the log-bias that were fitted to them."""
    num_examples, num_heads = trace.keys[index].shape[:2]
    keys: list[list[Tensor]] = []
    values: list[list[Tensor]] = []
    biases: list[list[Tensor]] = []
    positions: list[list[Tensor]] = []
    for example in range(num_examples):
        for row in (keys, values, biases, positions):
            row.append([])
        for head in range(num_heads):
            fit = fits[index, example, head].fit
            head_keys, _, earlier_bias = trace.head(index, example, head)
            bias = fit.log_bias
            if earlier_bias is not None:
                bias = bias + earlier_bias[fit.slots]
            keys[-1].append(head_keys[fit.slots])
            values[-1].append(fit.values.to(head_keys.dtype))
            biases[-1].append(bias)
            positions[-1].append(fit.slots)
    has_bias = log_bias or trace.log_bias is not None
    if bits is not None:
        packed: Any = [
            [fits[index, example, head].packed for head in range(num_heads)]
            for example in range(num_examples)
        ]
        dtype = trace.keys[index].dtype
        return QuantizedLayer.of_heads(packed, biases if has_bias else None, bits, dtype)
    return CompactLayer.ragged(
        keys, values, biases if has_bias else None, None if trace.past_len else positions
    )


def _check_budget_file(budgets: str) -> None:
    """Reject a text that is no way to allocate slots, and a file that holds no budgets."""
    if not Path(budgets).expanduser().exists():
        choices = ", ".join(BUDGETS)
        raise InputError(
            f"budgets must be one of {choices}, or a file of `kvcat budgets`, not {budgets!r}"
        )
    load_budgets(budgets)


def _check_range(name: str, value: float | int | None, *, least: int) -> None:
    if value is not None and not least <= value < math.inf:
        raise InputError(f"{name} must be at least {least}, not {value}")


def _with_progress(groups: list[list[HeadIndex]], name: str) -> Iterator[list[HeadIndex]]:
    """The groups, with a progress bar in a terminal after two seconds; TQDM_DISABLE=1 hides it."""
    yield from tqdm(groups, name, delay=2.0, disable=None, leave=False)
