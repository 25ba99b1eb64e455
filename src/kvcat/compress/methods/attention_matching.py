"""Attention Matching: few slots fitted to the attention of the whole prefix."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from tqdm.auto import tqdm

from kvcat.cache import (
    CompactLayer,
    HeadGrid,
    HeadSlots,
    Layer,
)
from kvcat.compress.base import Compressor
from kvcat.compress.budgets import (
    Curve,
    attention_and_curves,
    share_out_parts,
    slot_sizes,
)
from kvcat.compress.calibration import load_budgets
from kvcat.compress.fitting import fit_to_dense
from kvcat.compress.head_attention import DenseAttention, HeadBatch, dense_attention, take
from kvcat.compress.heads import HeadIndex, Heads, draw_rows
from kvcat.compress.prefix import Prefix
from kvcat.compress.queries import PartQueries, fitted_queries, usual_own_weight
from kvcat.compress.rounding import RoundedHeads, round_keys_together, round_values_together
from kvcat.compress.solvers import check_ridge
from kvcat.errors import InputError, check_one_of, did_you_mean
from kvcat.options import check_options
from kvcat.types import Tensor

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

PART_TOKENS = 4096
"""Most tokens of a long document whose slots are fitted together: up to here one fit is faster."""
_SAMPLED = 0.5  # queries of other parts, relative to those of a part
_LEAST_SLOTS = 4  # of a part, on average


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
        check_one_of("preset", preset, PRESETS)
        check_options(_Options, options, "attention-matching")
        super().__init__(preset=preset, **{**PRESETS[preset], **options})

    @property
    def draws(self) -> bool:
        """Whether the result depends on the seed."""
        return self.num_queries is not None

    def facts(self, prefix: Prefix) -> dict[str, object]:
        """The options, those that depend on the trace filled in, and the digest of the budgets."""
        facts = super().facts(prefix)
        if self.own_weight is None:
            facts["own_weight"] = usual_own_weight(prefix.trace)
        if self.budgets not in BUDGETS:
            digest = load_budgets(self.budgets).digest
            facts["budgets"] = f"{Path(self.budgets).name} {digest[:12]}"
        return facts

    def fit(self, prefix: Prefix, sizes: Sequence[int]) -> Iterator[Sequence[Layer]]:
        """The layers; queries and dense attention are computed once for all sizes."""
        for grids in self._fitted_heads(prefix, sizes, None):
            yield [CompactLayer.of_heads(grid) for grid in grids]

    def fit_codes(
        self, prefix: Prefix, sizes: Sequence[int], bits: int
    ) -> Iterator[Sequence[HeadGrid]]:
        """The heads with their codes.

        The keys are rounded first. Log-bias and values are fitted to the rounded keys, and then the
        values are rounded, each making up for the errors of those before.
        """
        return self._fitted_heads(prefix, sizes, bits)

    @torch.no_grad()
    def _fitted_heads(
        self, prefix: Prefix, sizes: Sequence[int], bits: int | None
    ) -> Iterator[list[HeadGrid]]:
        """For every size, the heads of every layer; quantised with ``bits``.

        A long prefix is fitted part by part, so that the cost is linear in the number of parts. Of
        a part's attention only the order of its slots is kept until its slots are fitted.
        """
        queries = fitted_queries(prefix, self.own_weight, by_share=self.num_iters is None)
        drawn = None
        if self.num_queries is not None:
            drawn = draw_rows(prefix.trace, queries, self.num_queries, self.seed)
        segments = self._segments(prefix, sizes, bits)
        part_queries = PartQueries.of(prefix, len(segments), queries, sampled=_SAMPLED)
        choices = [self._slots_to_choose(segments, size) for size in sizes]
        curves: list[dict[HeadIndex, Curve]] = []
        attentions: list[dict[HeadIndex, DenseAttention]] = []
        for segment in segments:
            heads = Heads(segment, part_queries.part(segment), drawn, self.group_elements)
            groups = _with_progress(heads.groups_for_scores(), "attention of the prefix")
            dense, of_part = attention_and_curves(heads, groups, set().union(*choices))
            curves.append(of_part)
            if len(segments) > 1:
                dense = {head: attention.order_alone() for head, attention in dense.items()}
            attentions.append(dense)
        for size, choice in zip(sizes, choices, strict=True):
            fits: dict[HeadIndex, list[HeadSlots]] = defaultdict(list)
            slots_of_parts = self._slots_of_parts(prefix, attentions, curves, size, choice)
            for segment, dense, slots in zip(segments, attentions, slots_of_parts, strict=True):
                heads = Heads(segment, part_queries.part(segment), drawn, self.group_elements)
                for head, fit in self._fit_heads(heads, dense, slots, bits).items():
                    fits[head].append(fit)
            joined = {head: _joined(pieces) for head, pieces in fits.items()}
            yield [
                self._of_prefix(layer, index, joined) for index, layer in enumerate(prefix.layers)
            ]

    def _segments(self, prefix: Prefix, sizes: Sequence[int], bits: int | None) -> list[Prefix]:
        """The parts of a prefix whose slots are fitted together.

        There is one if the options do not allow to fit parts, and for few slots, which are soon
        fitted, and may be fewer than there are parts.
        """
        if self.num_queries is not None or self.budgets not in BUDGETS or bits is not None:
            return [prefix]
        segments = prefix.parts(PART_TOKENS)
        return segments if min(sizes) >= _LEAST_SLOTS * len(segments) else [prefix]

    def _slots_to_choose(self, segments: Sequence[Prefix], size: int) -> list[int]:
        """The numbers of slots that a head of a part may get, if errors decide."""
        if self.budgets != "adaptive" and len(segments) == 1:
            return []
        longest = max(segment.max_slots for segment in segments)
        return slot_sizes(size / len(segments), longest)

    def _slots_of_parts(
        self,
        prefix: Prefix,
        attentions: Sequence[Mapping[HeadIndex, DenseAttention]],
        curves: Sequence[Mapping[HeadIndex, Curve]],
        size: int,
        choice: list[int],
    ) -> list[dict[HeadIndex, int]]:
        """For every part, the number of slots of each head."""
        if choice:
            return share_out_parts(curves, size, choice, by_head=self.budgets == "equal")
        if self.budgets == "equal":
            return [dict.fromkeys(attentions[0], size)]
        return [load_budgets(self.budgets).allocate(prefix, size)]

    def _fit_heads(
        self,
        heads: Heads,
        dense: Mapping[HeadIndex, DenseAttention],
        slots_of_heads: Mapping[HeadIndex, int],
        bits: int | None,
    ) -> dict[HeadIndex, HeadSlots]:
        """The fitted slots of all heads of a part; positions are those in the prefix.

        Args:
            heads: with the queries to fit to.
            dense: their attention over the part; where only the order was kept, the rest is
                computed again.
            slots_of_heads: number of slots of each.
            bits: as in ``match_attention``.
        """
        fits: dict[HeadIndex, HeadSlots] = {}
        groups = heads.groups_for_fit(slots_of_heads)
        for group in _with_progress(groups, "attention matching"):
            batch = heads.load_fitted(group)
            attention = DenseAttention.stack([dense[head] for head in group])
            if not attention.weights.shape[1]:
                attention = dense_attention(batch)._replace(order=attention.order)
            slots = match_attention(
                batch,
                attention,
                slots_of_heads[group[0]],
                num_iters=self.num_iters,
                ridge=self.ridge,
                log_bias=self.log_bias,
                bits=bits,
            )
            positions: Tensor = slots.positions  # type: ignore[assignment]
            slots = replace(slots, positions=positions + heads.prefix.first_slot)
            fits.update(zip(group, slots.split(), strict=True))
        return fits

    def _of_prefix(
        self, layer: CompactLayer, index: int, fits: Mapping[HeadIndex, HeadSlots]
    ) -> HeadGrid:
        """The fitted heads of one layer of the prefix, in its number type and with its positions.

        Slots that have a log-bias from an earlier compression keep it, and the fit's comes on top.
        """
        num_examples, num_heads = layer.keys.shape[:2]
        grid: HeadGrid = []
        for example in range(num_examples):
            of_example = []
            for head in range(num_heads):
                fit = fits[index, example, head]
                before = layer.present_head(example, head)
                bias = fit.log_bias if self.log_bias else None
                if before.log_bias is not None:
                    bias = fit.bias_or_zeros() + before.log_bias[fit.positions]
                positions = before.positions
                positions = None if positions is None else positions[fit.positions]
                slots = replace(fit.to(layer.keys.dtype), log_bias=bias, positions=positions)
                of_example.append(slots)
            grid.append(of_example)
        return grid


def match_attention(
    batch: HeadBatch,
    dense: DenseAttention,
    num_slots: int,
    *,
    num_iters: int | None = None,
    ridge: float | None = 0.05,
    log_bias: bool = True,
    bits: int | None = None,
) -> HeadSlots:
    """The slots of a batch of KV heads, in at least float32; positions are those in the prefix.

    Args:
        batch: keys, values, queries and their weights.
        dense: their attention over the whole prefix.
        num_slots: slots per head; heads that have no more slots keep all of them unchanged.
        num_iters, ridge, log_bias: as in ``AttentionMatching``; without log-bias it is 0.
        bits: with codes, also where all slots are kept: the keys are rounded before the fit and the
            values after it. None: without.
    """
    num_heads, prefix_len, _ = batch.keys.shape
    if num_slots >= prefix_len and bits is None:
        every_slot = torch.arange(prefix_len, device=batch.keys.device).expand(num_heads, -1)
        no_bias = torch.zeros_like(batch.keys[..., 0])
        return HeadSlots(batch.keys, batch.values, no_bias, every_slot)
    slots = dense.first_slots(num_slots)
    keys = take(batch.keys, slots)
    slot_values = take(batch.values, slots)
    rounded_keys = None
    if bits is not None:
        weighted_queries = batch.queries * dense.weights.unsqueeze(-1)
        rounded_keys = round_keys_together(keys, weighted_queries, bits)
        keys = rounded_keys.numbers
    scores = batch.scores(slots=slots, keys=keys)  # (heads, fitted queries, slots)
    outputs = dense.outputs
    if batch.last_seen is not None:
        sees_a_slot = scores.amax(-1, keepdim=True) > -torch.inf
        outputs = outputs * sees_a_slot
    dense = dense._replace(outputs=outputs)
    bias, values, attention = fit_to_dense(
        scores, dense, slot_values, num_iters=num_iters, ridge=ridge, log_bias=log_bias
    )
    if bits is None or rounded_keys is None:
        return HeadSlots(keys, values, bias, slots)
    rounded_values = round_values_together(values, attention, bits)
    codes = list(RoundedHeads(rounded_keys, rounded_values).split())
    return HeadSlots(keys, rounded_values.numbers, bias, slots, codes)


def _joined(pieces: list[HeadSlots]) -> HeadSlots:
    """The slots of a head's parts; those of one part may have codes."""
    return pieces[0] if len(pieces) == 1 else HeadSlots.joined(pieces)


def _check_budget_file(budgets: str) -> None:
    """Reject a text that is no way to allocate slots, and a file that holds no budgets."""
    if not Path(budgets).expanduser().exists():
        choices = ", ".join(BUDGETS)
        raise InputError(
            f"budgets must be one of {choices}, or a file of `kvcat budgets`, not {budgets!r}"
            f"{did_you_mean(budgets, BUDGETS)}"
        )
    load_budgets(budgets)


def _check_range(name: str, value: float | int | None, *, least: int) -> None:
    if value is not None and not least <= value < math.inf:
        raise InputError(f"{name} must be at least {least}, not {value}")


def _with_progress(groups: list[list[HeadIndex]], name: str) -> Iterator[list[HeadIndex]]:
    """The groups, with a progress bar in a terminal after two seconds; TQDM_DISABLE=1 hides it."""
    yield from tqdm(groups, name, delay=2.0, disable=None, leave=False)
