"""Attention Matching: few slots fitted to the attention of the whole prefix."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from kvcat.cache import CompactLayer, HeadGrid, Layer
from kvcat.compress.base import Compressor
from kvcat.compress.budgets import (
    add_peaks,
    measure_segments,
    num_peaks,
    share_out_segments,
    slot_sizes,
)
from kvcat.compress.calibration import load_budgets
from kvcat.compress.drawn import DrawnHeads
from kvcat.compress.fitting import RIDGE, fit_segments
from kvcat.compress.heads import Heads
from kvcat.compress.prefix import Prefix
from kvcat.compress.queries import fitted_queries, usual_own_weight
from kvcat.compress.query_set import QuerySet
from kvcat.compress.segments import Segments, is_split_for, split_prefix
from kvcat.compress.solvers import check_ridge
from kvcat.errors import InputError, check_in, check_one_of, did_you_mean
from kvcat.files import expanded
from kvcat.options import check_options

BUDGETS = ("equal", "adaptive")
_LEAST_ROUNDED_AFTER = 8  # bits from which on a fit is rounded at its end
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


@dataclass(frozen=True)
class _Options(Compressor):
    """The options of ``AttentionMatching``, described there."""

    fits_queries: ClassVar[bool] = True

    preset: str = field(default="stable", compare=False)
    num_queries: int | None = None
    num_iters: int | None = None
    ridge: float | None = RIDGE
    own_weight: float | None = None
    log_bias: bool = True
    budgets: str = "adaptive"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.budgets not in BUDGETS:
            _check_budget_file(self.budgets)
        least = {"num_queries": 1, "num_iters": 0, "own_weight": 0}
        for name, number in least.items():
            if getattr(self, name) is not None:
                check_in(f"[{number}, inf)", **{name: getattr(self, name)})
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
            on the document; next to a repetition some slots go to the tokens that any head attends
            to most (``add_peaks``), except in the paper's form and with ``num_queries``. A file of
            `kvcat budgets` (``CalibratedBudgets``) allocates by the errors of other documents,
            which saves the time of measuring this one's.
        seed: seed of the draw of queries.

    Raises:
        InputError: an unknown option, or one out of its range.

    References: KV-CAT, appendix "Attention-Matching"; Zweiger et al. 2026, arXiv:2602.16284
        (AM-HighestAttnKeys).
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

        In 4 bits the keys are rounded first. Log-bias and values are fitted to the rounded keys,
        and then the values are rounded, each making up for the errors of those before. In 8 bits
        the steps are so small that this gains nothing: the fit is rounded at its end.
        """
        if bits >= _LEAST_ROUNDED_AFTER:
            return super().fit_codes(prefix, sizes, bits)
        return self._fitted_heads(prefix, sizes, bits)

    @torch.no_grad()
    def _fitted_heads(
        self, prefix: Prefix, sizes: Sequence[int], bits: int | None
    ) -> Iterator[list[HeadGrid]]:
        """For every size, the heads of every layer; quantised with ``bits``.

        Whether the prefix is split depends on a size alone, so that a cache is the same with other
        sizes and without them.
        """
        queries = fitted_queries(prefix, self.own_weight, by_share=self.num_iters is None)
        split = [prefix]
        if self.num_queries is None and self.budgets in BUDGETS and bits is None:
            split = split_prefix(prefix, queries)
        is_split = [is_split_for(split, size) for size in sizes]
        fits = {}
        for kind, prefixes in ((False, [prefix]), (True, split)):
            of_kind = [size for size, each in zip(sizes, is_split, strict=True) if each == kind]
            fits[kind] = self._fitted_to(prefix, prefixes, queries, of_kind, bits)
        for kind in is_split:
            yield next(fits[kind])

    @torch.no_grad()
    def _fitted_to(
        self,
        prefix: Prefix,
        prefixes: Sequence[Prefix],
        queries: Sequence[QuerySet],
        sizes: Sequence[int],
        bits: int | None,
    ) -> Iterator[list[HeadGrid]]:
        """As ``_fitted_heads``, of a prefix that is split into ``prefixes`` for all sizes."""
        segments: Sequence[Heads] = Segments.of(prefix, prefixes, queries)
        if self.num_queries is not None:
            segments = [DrawnHeads(prefix, queries, self.num_queries, self.seed)]

        # segments share their slots by errors, also where all heads of a segment get equally many
        by_errors = self.budgets == "adaptive" or len(prefixes) > 1
        # where few queries are drawn, most tokens have no peak
        fits_all = self.num_iters is None and self.num_queries is None
        keeps_peaks = prefix.trace.is_repeated and fits_all and self.budgets == "adaptive"
        num_tokens = prefix.trace.prefix_len - prefix.num_protected
        longest = max(segment.max_slots for segment in prefixes)
        choices = [slot_sizes(size / len(prefixes), longest) if by_errors else [] for size in sizes]
        attentions, curves = measure_segments(segments, set().union(*choices))
        for size, choice in zip(sizes, choices, strict=True):
            fitted = attentions
            if choice:
                peaks = num_peaks(size, num_tokens) if keeps_peaks else 0
                by_head = self.budgets == "equal"
                slots = share_out_segments(curves, size - peaks, choice, by_head=by_head)
                if peaks:
                    fitted, slots = add_peaks(attentions, slots, peaks)
            elif self.budgets == "equal":
                slots = [dict.fromkeys(attentions[0], size)]
            else:
                slots = [load_budgets(self.budgets).allocate(prefix, size)]
            yield fit_segments(
                prefix,
                segments,
                fitted,
                slots,
                num_iters=self.num_iters,
                ridge=self.ridge,
                log_bias=self.log_bias,
                bits=bits,
            )


def _check_budget_file(budgets: str) -> None:
    """Reject a text that is no way to allocate slots, and a file that holds no budgets."""
    if not expanded(budgets).is_file():
        choices = ", ".join(BUDGETS)
        raise InputError(
            f"budgets must be one of {choices}, or a file of `kvcat budgets`, not {budgets!r}, "
            "which is no file"
            f"{did_you_mean(budgets, BUDGETS)}"
        )
    load_budgets(budgets)
