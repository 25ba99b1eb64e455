"""Attention Matching: few slots fitted to the attention of the whole prefix."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import torch

from kvcat.cache import CompactCache, CompactLayer
from kvcat.compress.budgets import HeadFit, share_out
from kvcat.compress.common import compact_cache, slots_for, take_slots
from kvcat.compress.fitting import FitOptions, KeptKeys, fit_slots, output_error
from kvcat.compress.heads import Head, HeadBlock, draw_queries, head_groups, load_block
from kvcat.compress.on_policy import fit_on_policy
from kvcat.compress.selection import DenseAttention, KeySelection, summarise
from kvcat.compress.solvers import check_log_bias_options, check_ridge
from kvcat.compress.tracing import Trace
from kvcat.errors import InputError
from kvcat.types import Float, Int, Tensor


class FitSettings(NamedTuple):
    """What a preset decides.

    Args:
        num_queries, num_iters, ridge, bias_ridge, towards: as in ``AttentionMatching``.
    """

    num_queries: int | None
    num_iters: int | None
    ridge: float | None
    bias_ridge: float
    towards: str


_PRESETS = {
    "stable": FitSettings(None, None, 1e-2, 0.1, "kept"),
    "paper": FitSettings(256, 2, 1e-4, 0.0, "zero"),
}
_Drawn = dict[Head, Int[Tensor, " drawn"]] | None
_Fit = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True)
class AttentionMatching:
    """Kept keys by attention, then a log-bias and values fitted so that attention over them equals the dense one.

    For every layer and KV head: keep some of the keys, by default those with the largest root-mean-square attention
    weight over the queries; fit the log-bias beta so that sum_j exp(q.k_j + beta_j) over kept keys equals the sum over
    the whole prefix; fit values C so that softmax(q.K_kept + beta) C equals the dense attention output. All heads of a
    layer are solved together, and off policy those of all layers.

    Args:
        preset: "stable": all queries, log-bias solved to convergence and pulled to 0 (bias_ridge 0.1), values pulled
            towards those of their keys (ridge 1e-2), so that what few queries say of a slot does not carry it away; a
            head for which this fit loses to its kept keys and values unchanged is fitted without log-bias, so that
            none ever does. "paper": 256 queries per KV head, 2 projected-gradient steps, ridge 1e-4 towards 0. The
            options below override the preset's.
        num_queries: queries per KV head, drawn without replacement; None takes all.
        num_iters: projected-gradient steps of the log-bias fit; None solves to convergence.
        ridge: of the value fit, relative to the squared spectral norm; None for minimum-norm least squares.
        bias_ridge: adds bias_ridge |A|^2 |w - 1|^2 to the log-bias fit |A w - b|^2, w = exp(log-bias), A the attention
            masses of the kept keys; at least 0.
        towards: what the ridge pulls the values to, "zero" or "kept": the values of the kept keys.
        bounds: box on the log-bias, nats.
        log_bias: False fits no log-bias; slots that carry one from an earlier compression keep it.
        values: "fitted", or "original": slots keep the values of their keys.
        selection: keys with the largest attention over the queries, "rms", "mean" or "max" of its weights, or "omp":
            orthogonal matching pursuit on the attention mass.
        kernel_size: positions over which attention is pooled before keys are chosen, odd; 1 does not pool.
        pooling: "avg" or "max".
        picks: keys that "omp" adds between two fits of their weights, at least 1; more are faster.
        on_policy: fit layer by layer, each to its queries over the compact layers below, in one further forward of
            the suffix; needs a suffix or a reconstruction sequence.
        budgets: "equal", as many slots in every head, or "adaptive": every example shares out the same total among
            the heads of all layers so that the squared errors of their attention outputs sum to little; ours.
        seed: of the draw of queries.

    Raises:
        InputError: an option out of its range.

    References: KV-CAT, appendix "Attention-Matching"; Zweiger et al. 2026, arXiv:2602.16284 (AM-HighestAttnKeys and
    AM-OMP).
    """

    preset: str = "stable"
    num_queries: int | Literal["preset"] | None = "preset"
    num_iters: int | Literal["preset"] | None = "preset"
    ridge: float | Literal["preset"] | None = "preset"
    bias_ridge: float | Literal["preset"] = "preset"
    towards: str = "preset"
    bounds: tuple[float, float] = (-3.0, 3.0)
    log_bias: bool = True
    values: str = "fitted"
    selection: str = "rms"
    kernel_size: int = 1
    pooling: str = "avg"
    picks: int = 1
    on_policy: bool = False
    budgets: str = "equal"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.preset not in _PRESETS:
            raise InputError(f"preset must be one of {', '.join(_PRESETS)}, not {self.preset!r}")
        if self.values not in ("fitted", "original"):
            raise InputError(f"values must be 'fitted' or 'original', not {self.values!r}")
        if self.budgets not in ("equal", "adaptive"):
            raise InputError(f"budgets must be 'equal' or 'adaptive', not {self.budgets!r}")
        if self.budgets == "adaptive" and self.on_policy:
            raise InputError("budgets 'adaptive' compare all layers at once: they cannot be had with on_policy")
        settings = self.options()
        if settings.num_queries is not None and settings.num_queries < 1:
            raise InputError(f"num_queries must be at least 1, not {settings.num_queries}")
        if settings.towards not in ("zero", "kept"):
            raise InputError(f"towards must be 'zero' or 'kept', not {settings.towards!r}")
        if not settings.bias_ridge >= 0:
            raise InputError(f"bias_ridge must be at least 0, not {settings.bias_ridge}")
        check_log_bias_options(self.bounds, settings.num_iters)
        check_ridge(settings.ridge)
        self.fit_options()

    def options(self) -> FitSettings:
        """The preset's settings, and those that were given in place of its."""
        preset = _PRESETS[self.preset]
        given = {name: getattr(self, name) for name in preset._fields if getattr(self, name) != "preset"}
        return preset._replace(**given)

    def fit_options(self) -> FitOptions:
        """How one block of heads is solved."""
        settings = self.options()
        return FitOptions(
            KeySelection(self.selection, self.kernel_size, self.pooling, self.picks),
            log_bias=self.log_bias,
            bounds=self.bounds,
            num_iters=settings.num_iters,
            original_values=self.values == "original",
            ridge=settings.ridge,
            bias_ridge=settings.bias_ridge,
            towards_kept=settings.towards == "kept",
            guard=self.preset == "stable",
        )

    @torch.no_grad()
    def __call__(
        self, trace: Trace, *, keep_ratio: float | int | None = None, num_slots: int | None = None
    ) -> CompactCache:
        """The compact cache with ceil(keep_ratio * prefix_len) or num_slots slots per layer and head.

        Args:
            trace: of the windows to compress; its dense attention is computed once and shared between keep ratios,
                except on policy.
            keep_ratio: fraction kept, in (0, 1]; 1 returns the dense cache.
            num_slots: number kept, in [1, prefix_len].

        Raises:
            InputError: keep_ratio or num_slots out of range, or on_policy for a trace that supervises itself.
        """
        slots = slots_for(trace.prefix_len, keep_ratio, num_slots)
        if slots >= trace.num_slots:
            return trace.dense_cache()
        drawn = draw_queries(trace, self.options().num_queries, self.seed)
        if self.budgets == "adaptive":
            layers = share_out(trace, slots, lambda size: self._fit_heads(trace, size, drawn))
        elif self.on_policy:
            layers = fit_on_policy(trace, slots, lambda seen, layer: self._fit_layers(seen, [layer], slots, drawn)[0])
        else:
            layers = self._fit_layers(trace, list(range(len(trace.keys))), slots, drawn)
        told = {field.name: getattr(self, field.name) for field in fields(self)} | self.options()._asdict()
        return compact_cache(trace, layers, "attention-matching", told)

    def _fit_layers(self, trace: Trace, layers: list[int], num_slots: int, drawn: _Drawn) -> list[CompactLayer]:
        fitted: dict[Head, _Fit] = {}
        for heads, block, summary in self._blocks(trace, layers, drawn):
            slots, values, log_bias = fit_slots(block, summary, num_slots, self.fit_options())
            fitted.update(
                zip(heads, zip(slots, values, self._biases(block, slots, log_bias), strict=True), strict=True)
            )
        return [_assemble(trace, index, fitted) for index in layers]

    def _fit_heads(self, trace: Trace, num_slots: int, drawn: _Drawn) -> dict[Head, HeadFit]:
        fitted: dict[Head, HeadFit] = {}
        for heads, block, summary in self._blocks(trace, list(range(len(trace.keys))), drawn):
            slots, values, log_bias = fit_slots(block, summary, num_slots, self.fit_options())
            errors = output_error(KeptKeys(block, summary, slots), values, log_bias).tolist()
            biases = self._biases(block, slots, log_bias)
            for row, head in enumerate(heads):
                fitted[head] = HeadFit(slots[row], values[row], biases[row], errors[row])
        return fitted

    def _biases(
        self, block: HeadBlock, slots: Int[Tensor, "heads slots"], fitted: Float[Tensor, "heads slots"]
    ) -> list[Tensor] | list[None]:
        """Per head, what the slots carried already and what was fitted on top; None where there is neither."""
        if block.log_bias is not None:
            fitted = fitted + block.log_bias.gather(1, slots)
        elif not self.log_bias:
            return [None] * len(fitted)
        return list(fitted)

    def _blocks(
        self, trace: Trace, layers: list[int], drawn: _Drawn
    ) -> Iterator[tuple[list[Head], HeadBlock, DenseAttention]]:
        """Heads in groups, with their tensors and their dense attention, which is computed once."""
        groups = head_groups(trace, layers)
        summaries = trace.memo(
            ("dense attention", *layers, self.options().num_queries, self.seed, self.selection),
            lambda: [summarise(load_block(trace, heads, drawn), self.selection) for heads in groups],
        )
        for heads, summary in zip(groups, summaries, strict=True):
            yield heads, load_block(trace, heads, drawn), summary


def _assemble(trace: Trace, index: int, fitted: dict[Head, _Fit]) -> CompactLayer:
    keys, values = trace.keys[index], trace.values[index]
    batch, kv_heads = keys.shape[:2]
    slots, own, biases = zip(*(fitted[index, b, h] for b in range(batch) for h in range(kv_heads)), strict=True)

    def stacked(parts: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(parts)).unflatten(0, (batch, kv_heads))

    kept = stacked(slots)
    known = [bias for bias in biases if bias is not None]
    return CompactLayer(
        take_slots(keys, kept),
        stacked(own).to(values.dtype),
        stacked(known) if known else None,
        None if trace.past_len else kept,
    )
