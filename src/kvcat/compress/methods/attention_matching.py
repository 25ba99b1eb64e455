"""Attention Matching: few slots fitted to the attention of the whole prefix."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from tqdm.auto import tqdm

from kvcat.cache import CompactCache, CompactLayer, Layer
from kvcat.compress.base import Compressor, compact_cache, top_positions
from kvcat.compress.budgets import Curve, error_curves, share_out, slot_sizes
from kvcat.compress.queries import (
    DenseAttention,
    HeadBatch,
    HeadIndex,
    dense_attention,
    draw_queries,
    fitted_queries,
    head_groups,
    load_heads,
    take,
)
from kvcat.compress.solvers import check_ridge, fit_log_bias, fit_values
from kvcat.compress.trace import Trace
from kvcat.errors import InputError
from kvcat.models import output_gains
from kvcat.options import check_options
from kvcat.types import Float, Int, Tensor

BOUNDS = (-3.0, 3.0)
BUDGETS = ("equal", "adaptive", "layers")
PRESETS: dict[str, dict[str, Any]] = {
    "stable": {},
    "known": {"own_weight": 0.0, "ridge": 1e-5},
    "paper": {"num_queries": 256, "num_iters": 2, "ridge": 1e-4, "own_weight": 0.0, "budgets": "equal"},
}


@dataclass(frozen=True, init=False)
class AttentionMatching(Compressor):
    """Kept keys by attention, then a log-bias and values fitted so that attention over them equals the dense one.

    For every layer and KV head (``match_attention``): keep the keys with the largest root-mean-square attention weight
    over the queries; fit the log-bias beta so that sum_j exp(q.k_j + beta_j) over kept keys equals the sum over the
    whole prefix; fit values C so that softmax(q.K_kept + beta) C equals the dense attention output.

    Args:
        preset: values of the options below that are not given. "stable" for text that is not known yet: it also fits
            what the prefix itself asks for, and pulls each slot to what it was, which few queries determine badly.
            "known" where the supervising queries are all that will ever be asked: it fits these alone, closely.
            "paper" is the paper's method: 256 queries, 2 steps for the log-bias, ridge 1e-4.
        num_queries: queries per KV head, drawn without replacement; None takes all.
        num_iters: None weighs a query's errors by the part of its attention that goes to the prefix, solves the
            log-bias to convergence, pulled to 0 (``fit_log_bias`` with a pull of the root of ``ridge``), pulls values
            towards those of their keys. A number is the paper's form: all queries count alike, so many
            projected-gradient steps without a pull, values pulled towards 0.
        ridge: strength of the values' pull, relative to the squared spectral norm; None for minimum-norm least squares.
        own_weight: of the prefix's own queries, moved behind it (``fitted_queries``), all together and relative to the
            others; 0: none. They stand for what later text may look for.
        log_bias: False fits no log-bias; slots that carry one from an earlier compression keep it.
        budgets: "equal", as many slots in every head; or every example shares out the same total so that the squared
            errors of the attention outputs, relative to the residual stream that they are added to, sum to little:
            "adaptive" among the heads of all layers, "layers" among the layers, whose heads then have equally many.
        seed: of the draw of queries.

    Raises:
        InputError: an unknown option, or one out of its range.

    References: KV-CAT, appendix "Attention-Matching"; Zweiger et al. 2026, arXiv:2602.16284 (AM-HighestAttnKeys).
    """

    preset: str = field(default="stable", compare=False)
    num_queries: int | None = None
    num_iters: int | None = None
    ridge: float | None = 1e-4
    own_weight: float = 1.0
    log_bias: bool = True
    budgets: str = "adaptive"
    seed: int = 0

    def __init__(self, preset: str = "stable", **options: Any) -> None:
        if preset not in PRESETS:
            raise InputError(f"preset must be one of {', '.join(PRESETS)}, not {preset!r}")
        check_options(AttentionMatching, options, "attention-matching")
        given = {"preset": preset, **PRESETS[preset], **options}
        for option in fields(self):
            object.__setattr__(self, option.name, given.get(option.name, option.default))
        if self.budgets not in BUDGETS:
            raise InputError(f"budgets must be one of {', '.join(BUDGETS)}, not {self.budgets!r}")
        for name, least in (("num_queries", 1), ("num_iters", 0), ("own_weight", 0)):
            value = getattr(self, name)
            if value is not None and not least <= value < math.inf:
                raise InputError(f"{name} must be at least {least}, not {value}")
        check_ridge(self.ridge)

    @property
    def draws(self) -> bool:
        """Whether the result depends on the seed."""
        return self.num_queries is not None

    @torch.no_grad()
    def compress(self, trace: Trace, sizes: Sequence[int]) -> Iterator[CompactCache]:
        """The caches; queries and dense attention are worked out once for all sizes."""
        if not sizes:
            return
        fitted = fitted_queries(trace, self.own_weight, by_share=self.num_iters is None)
        drawn = None if self.num_queries is None else draw_queries(trace, fitted, self.num_queries, self.seed)
        load = partial(load_heads, trace, fitted, drawn=drawn)
        dense, curves = self._attention_and_errors(trace, head_groups(trace, fitted), load, sizes)
        options = {option.name: getattr(self, option.name) for option in fields(self)}
        for size in sizes:
            plan, found = dict.fromkeys(dense, size), {}
            if curves:
                plan = share_out(curves, size, trace.num_slots, by_layer=self.budgets == "layers")
            for heads in _with_progress(head_groups(trace, fitted, plan), "attention matching"):
                attention = DenseAttention(*map(torch.stack, zip(*(dense[head] for head in heads), strict=True)))
                batch = load(heads, only_fitted=True)
                fit = match_attention(
                    batch, attention, plan[heads[0]], num_iters=self.num_iters, ridge=self.ridge, log_bias=self.log_bias
                )
                found |= dict(zip(heads, zip(*fit, strict=True), strict=True))
            layers = [_layer(trace, index, found, log_bias=self.log_bias) for index in range(len(trace.keys))]
            yield compact_cache(trace, layers, "attention-matching", options)

    def _attention_and_errors(
        self, trace: Trace, groups: list[list[HeadIndex]], load: Callable[..., HeadBatch], sizes: Sequence[int]
    ) -> tuple[dict[HeadIndex, DenseAttention], dict[HeadIndex, Curve]]:  # fmt: skip
        """Every head's attention over the prefix and, where slots go by need, its errors by their number."""
        dense, curves = {}, {}
        wanted = {number for size in sizes for number in slot_sizes(size, trace.num_slots)}
        # an error counts relative to the stream that it is added to
        gains = output_gains(trace.model, [keys.shape[1] for keys in trace.keys])
        for group in _with_progress(groups, "attention of the prefix"):
            batch = load(group)
            attention = dense_attention(batch)
            dense |= zip(group, map(DenseAttention._make, zip(*attention, strict=True)), strict=True)
            if self.budgets == "equal":
                continue
            errors = error_curves(batch, attention, wanted, self.ridge or 0.0)
            for (layer, example, head), curve in zip(group, errors, strict=True):
                gain = gains[layer][head].item() / trace.stream[layer][example].item()
                curves[layer, example, head] = {size: gain * error for size, error in curve.items()}
        return dense, curves


def match_attention(
    batch: HeadBatch,
    dense: DenseAttention,
    num_slots: int,
    *,
    num_iters: int | None = None,
    ridge: float | None = 1e-4,
    log_bias: bool = True,
) -> tuple[Int[Tensor, "heads slots"], Float[Tensor, "heads slots value_dim"], Float[Tensor, "heads slots"]]:
    """Positions, values and log-bias of the slots of a batch of KV heads; without log-bias this is 0.

    Args:
        batch: keys, values, queries and their weights.
        dense: their attention over the whole prefix.
        num_slots: slots per head; heads that have no more keep all as they are.
        num_iters, ridge, log_bias: as in ``AttentionMatching``.
    """
    heads, prefix, _ = batch.keys.shape
    if num_slots >= prefix:
        every = torch.arange(prefix, device=batch.keys.device).expand(heads, -1)
        return every, batch.values, torch.zeros_like(batch.keys[..., 0])
    stable = num_iters is None
    # relative masses: a query's equation is divided by its whole mass, unless it is the paper's
    weights = dense.weights if stable else dense.weights * dense.mass
    slots = top_positions(dense.importance, num_slots)
    scores, own = batch.scores(slots=slots), take(batch.values, slots)
    outputs = dense.outputs
    if batch.last is not None:
        outputs = outputs * (scores.amax(-1, keepdim=True) > -torch.inf)
    bias = torch.zeros_like(own[..., 0])
    if log_bias:
        pull, mass = math.sqrt(ridge or 0.0) if stable else 0.0, dense.log_mass.unsqueeze(-1)
        bias = fit_log_bias(scores, mass, bounds=BOUNDS, num_iters=num_iters, pull=pull, weights=weights)
    attention = torch.softmax(scores.add_(bias.unsqueeze(1)), -1, out=scores)
    # 0 where a query sees no slot
    attention.nan_to_num_(0.0).mul_(dense.weights.unsqueeze(-1))
    return slots, fit_values(attention, outputs, ridge=ridge, towards=own if stable else None), bias


def _layer(trace: Trace, index: int, fits: dict[HeadIndex, tuple[Tensor, ...]], *, log_bias: bool) -> Layer:
    """One layer's kept keys with the values and the log-bias that were fitted to them."""
    examples, heads = trace.keys[index].shape[:2]
    keys, values, biases, positions = ([[] for _ in range(examples)] for _ in range(4))
    for example in range(examples):
        for head in range(heads):
            (slots, fitted, bias), (own_keys, _, before) = fits[index, example, head], trace.head(index, example, head)
            keys[example].append(own_keys[slots])
            values[example].append(fitted.to(own_keys.dtype))
            biases[example].append(bias if before is None else bias + before[slots])
            positions[example].append(slots)
    has_bias = log_bias or trace.log_bias is not None
    return CompactLayer.ragged(keys, values, biases if has_bias else None, None if trace.past_len else positions)


def _with_progress(groups: list[list[HeadIndex]], name: str) -> Iterator[list[HeadIndex]]:
    """The groups, with a bar in a terminal once they take more than two seconds; TQDM_DISABLE=1 hides it."""
    yield from tqdm(groups, name, delay=2.0, disable=None, leave=False)
