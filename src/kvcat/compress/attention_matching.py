"""Attention Matching: few slots fitted to the attention of the whole prefix."""

from dataclasses import dataclass
from typing import Literal

import torch

from kvcat.cache import CompactCache, CompactLayer
from kvcat.compress.common import compact_cache, slots_for, top_positions
from kvcat.compress.heads import Head, HeadBlock, draw_queries, head_groups, load_block, take
from kvcat.compress.solvers import check_log_bias_options, check_ridge, fit_values, solve_box, solve_ridge
from kvcat.compress.tracing import Trace
from kvcat.errors import InputError
from kvcat.types import Float, Int, Tensor

_TOLERANCE = 1e-10
_PRESETS: dict[str, tuple[int | None, int | None, float]] = {"stable": (None, None, 1e-6), "paper": (256, 2, 1e-4)}


@dataclass(frozen=True)
class AttentionMatching:
    """Kept keys by attention, then a log-bias and values fitted so that attention over them equals the dense one.

    For every layer and KV head: keep the keys with the largest root-mean-square attention weight over the queries; fit
    the log-bias beta so that sum_j exp(q.k_j + beta_j) over kept keys equals the sum over the whole prefix; fit values
    C so that softmax(q.K_kept + beta) C equals the dense attention output. All heads are solved together.

    Args:
        preset: "stable": all queries, log-bias solved to convergence, ridge 1e-6; a head for which this fit loses to
            its kept keys and values unchanged is fitted without log-bias, so that none ever does. "paper": 256
            queries per KV head, 2 projected-gradient steps, ridge 1e-4. The options below override the preset's.
        num_queries: queries per KV head, drawn without replacement; None takes all.
        num_iters: projected-gradient steps of the log-bias fit; None solves to convergence.
        ridge: of the value fit, relative to the squared spectral norm; None for minimum-norm least squares.
        bounds: box on the log-bias, nats.
        seed: of the draw of queries.

    Raises:
        InputError: an option out of its range.

    References: KV-CAT, appendix "Attention-Matching"; Zweiger et al. 2026, arXiv:2602.16284 (AM-HighestAttnKeys).
    """

    preset: str = "stable"
    num_queries: int | Literal["preset"] | None = "preset"
    num_iters: int | Literal["preset"] | None = "preset"
    ridge: float | Literal["preset"] | None = "preset"
    bounds: tuple[float, float] = (-3.0, 3.0)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.preset not in _PRESETS:
            raise InputError(f"preset must be one of {', '.join(_PRESETS)}, not {self.preset!r}")
        num_queries, num_iters, ridge = self.options()
        if num_queries is not None and num_queries < 1:
            raise InputError(f"num_queries must be at least 1, not {num_queries}")
        check_log_bias_options(self.bounds, num_iters)
        check_ridge(ridge)

    def options(self) -> tuple[int | None, int | None, float | None]:
        """num_queries, num_iters and ridge, the preset's where not given."""
        num_queries, num_iters, ridge = _PRESETS[self.preset]
        return (
            num_queries if self.num_queries == "preset" else self.num_queries,
            num_iters if self.num_iters == "preset" else self.num_iters,
            ridge if self.ridge == "preset" else self.ridge,
        )

    @torch.no_grad()
    def __call__(
        self, trace: Trace, *, keep_ratio: float | int | None = None, num_slots: int | None = None
    ) -> CompactCache:
        """The compact cache with ceil(keep_ratio * prefix_len) or num_slots slots per layer and head.

        Args:
            trace: of the windows to compress; its dense attention is computed once and shared between keep ratios.
            keep_ratio: fraction kept, in (0, 1]; 1 returns the dense cache.
            num_slots: number kept, in [1, prefix_len].

        Raises:
            InputError: keep_ratio or num_slots out of range.
        """
        slots = slots_for(trace.prefix_len, keep_ratio, num_slots)
        if slots == trace.prefix_len:
            return trace.dense_cache()
        num_queries, num_iters, ridge = self.options()
        options = FitOptions(self.bounds, num_iters, ridge, guard=self.preset == "stable")
        groups, drawn = head_groups(trace), draw_queries(trace, num_queries, self.seed)
        summaries = trace.memo(
            ("dense attention", num_queries, self.seed),
            lambda: [summarise(load_block(trace, heads, drawn)) for heads in groups],
        )
        fitted: dict[Head, tuple[Tensor, Tensor, Tensor]] = {}
        for heads, summary in zip(groups, summaries, strict=True):
            fit = fit_slots(load_block(trace, heads, drawn), summary, slots, options)
            fitted.update(zip(heads, zip(*fit, strict=True), strict=True))
        layers = [_assemble(trace, index, fitted) for index in range(len(trace.keys))]
        return compact_cache(trace, layers, "attention-matching", {"preset": self.preset})


@dataclass(frozen=True)
class FitOptions:
    """How log-bias and values are fitted.

    Args:
        bounds: box on the log-bias, nats.
        num_iters: projected-gradient steps of the log-bias; None solves to convergence.
        ridge: relative to the squared spectral norm; None for minimum-norm least squares.
        guard: heads that the fit leaves with a larger output error than their kept keys and values unchanged are
            fitted again without log-bias, the ridge pulling towards the unchanged values.
    """

    bounds: tuple[float, float] = (-3.0, 3.0)
    num_iters: int | None = None
    ridge: float | None = 1e-6
    guard: bool = True


@dataclass(frozen=True)
class DenseAttention:
    """What is kept of the dense attention of a block of heads.

    Args:
        top: largest score of each query, nats.
        mass: sum over the prefix of exp(score - top).
        outputs: attention over the prefix.
        importance: sum over queries of the squared attention weight of each position.
    """

    top: Float[Tensor, "heads queries one"]
    mass: Float[Tensor, "heads queries"]
    outputs: Float[Tensor, "heads queries value_dim"]
    importance: Float[Tensor, "heads prefix"]

    def select(self, rows: Int[Tensor, " rows"]) -> "DenseAttention":
        """Some of the heads."""
        return DenseAttention(self.top[rows], self.mass[rows], self.outputs[rows], self.importance[rows])


def summarise(block: HeadBlock) -> DenseAttention:
    """Dense attention of a block of heads, in chunks of queries.

    Args:
        block: heads with their queries.
    """
    tops, masses, outputs, importance = [], [], [], torch.zeros_like(block.keys[..., 0])
    for chunk in block.query_chunks():
        weights = block.scores(chunk)
        tops.append(weights.amax(-1, keepdim=True))
        weights = weights.sub_(tops[-1]).exp_()
        masses.append(weights.sum(-1))
        weights = weights.div_(masses[-1].unsqueeze(-1))
        outputs.append(weights @ block.values)
        importance += weights.square_().sum(-2)
    return DenseAttention(torch.cat(tops, 1), torch.cat(masses, 1), torch.cat(outputs, 1), importance)


def fit_slots(
    block: HeadBlock, dense: DenseAttention, num_slots: int, options: FitOptions
) -> tuple[Int[Tensor, "heads slots"], Float[Tensor, "heads slots value_dim"], Float[Tensor, "heads slots"]]:
    """Positions, values and log-bias of the slots of a block of heads.

    Args:
        block: heads with their queries.
        dense: their dense attention.
        num_slots: slots per head.
        options: of the fits.
    """
    slots = top_positions(dense.importance, num_slots)
    log_bias = _fit_bias(block, dense, slots, options)
    values = _fit_values(block, dense, slots, log_bias, options.ridge)
    if options.guard:
        kept, none = take(block.values, slots), torch.zeros_like(log_bias)
        error = output_error(block, dense, slots, values, log_bias)
        worse = (error > output_error(block, dense, slots, kept, none)).nonzero().flatten()
        if len(worse):
            part = block.select(worse), dense.select(worse), slots[worse], none[worse]
            values[worse] = _fit_values(*part, options.ridge, towards=kept[worse])
            log_bias[worse] = 0.0
    return slots, values, log_bias


def _fit_bias(
    block: HeadBlock, dense: DenseAttention, slots: Int[Tensor, "heads slots"], options: FitOptions
) -> Float[Tensor, "heads slots"]:
    gram, target, size = torch.zeros(()), torch.zeros(()), torch.zeros(())
    for chunk in block.query_chunks():
        design = (block.scores(chunk, slots) - dense.top[:, chunk]).exp().double()
        mass = dense.mass[:, chunk].double().unsqueeze(-1)
        gram, target, size = gram + design.mT @ design, target + design.mT @ mass, size + mass.square().sum((1, 2))
    weights = solve_box(
        gram, target.squeeze(-1), size, bounds=options.bounds, num_iters=options.num_iters, tolerance=_TOLERANCE
    )
    return weights.log().to(block.keys.dtype)


def _fit_values(
    block: HeadBlock,
    dense: DenseAttention,
    slots: Int[Tensor, "heads slots"],
    log_bias: Float[Tensor, "heads slots"],
    ridge: float | None,
    towards: Float[Tensor, "heads slots value_dim"] | None = None,
) -> Float[Tensor, "heads slots value_dim"]:
    """Ridge least squares on the attention outputs; the ridge pulls towards 0, or towards given values."""
    base = torch.zeros_like(take(block.values, slots)) if towards is None else towards
    chunks = list(block.query_chunks())
    if ridge is None or len(chunks) == 1 or block.queries.shape[1] < slots.shape[1]:
        attention, outputs = kept_attention(block, dense, slots, log_bias, slice(None))
        return base + fit_values(attention, outputs - attention @ base, ridge=ridge)
    gram, target = torch.zeros(()), torch.zeros(())
    for chunk in chunks:
        attention, outputs = kept_attention(block, dense, slots, log_bias, chunk)
        residual = (outputs - attention @ base).double()
        attention = attention.double()
        gram, target = gram + attention.mT @ attention, target + attention.mT @ residual
    return base + solve_ridge(gram, target, ridge).to(block.values.dtype)


def output_error(
    block: HeadBlock,
    dense: DenseAttention,
    slots: Int[Tensor, "heads slots"],
    values: Float[Tensor, "heads slots value_dim"],
    log_bias: Float[Tensor, "heads slots"],
) -> Float[Tensor, " heads"]:
    """Squared error of the attention output over the slots, summed over queries.

    Args:
        block: heads with their queries.
        dense: their dense attention.
        slots: positions of the kept keys.
        values: of the slots.
        log_bias: of the slots, nats.
    """
    error = values.new_zeros(len(slots))
    for chunk in block.query_chunks():
        attention, outputs = kept_attention(block, dense, slots, log_bias, chunk)
        error += (attention @ values - outputs).square().sum((1, 2))
    return error


def kept_attention(
    block: HeadBlock,
    dense: DenseAttention,
    slots: Int[Tensor, "heads slots"],
    log_bias: Float[Tensor, "heads slots"],
    chunk: slice,
) -> tuple[Float[Tensor, "heads queries slots"], Float[Tensor, "heads queries value_dim"]]:
    """Attention over the kept slots and the dense outputs it should give; both 0 for queries that see no slot."""
    scores = block.scores(chunk, slots) + log_bias.unsqueeze(1)
    outputs = dense.outputs[:, chunk]
    if block.positions is None:
        return scores.softmax(-1), outputs
    sees = (scores > -torch.inf).any(-1, keepdim=True)
    return torch.where(sees, scores, 0.0).softmax(-1) * sees, outputs * sees


def _assemble(trace: Trace, index: int, fitted: dict[Head, tuple[Tensor, Tensor, Tensor]]) -> CompactLayer:
    keys, values = trace.keys[index], trace.values[index]
    batch, kv_heads = keys.shape[:2]

    def stacked(part: int) -> Tensor:
        return torch.stack([fitted[index, b, h][part] for b in range(batch) for h in range(kv_heads)])

    slots = stacked(0)
    return CompactLayer(
        take(keys.flatten(0, 1), slots).unflatten(0, (batch, kv_heads)),
        stacked(1).unflatten(0, (batch, kv_heads)).to(values.dtype),
        stacked(2).unflatten(0, (batch, kv_heads)),
    )
