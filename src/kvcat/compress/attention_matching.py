"""Attention Matching: few slots fitted to the attention of the whole prefix."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import torch

from kvcat.cache import CompactCache, Layer
from kvcat.compress.asking import Asked, LayerKeys, ask, own_queries
from kvcat.compress.budgets import HeadFit, share_out
from kvcat.compress.common import Fit, compact_cache, fitted_layer, slots_for
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
        num_queries, num_iters, ridge, bias_ridge, towards, weights, own_weight: as in ``AttentionMatching``.
    """

    num_queries: int | None
    num_iters: int | None
    ridge: float | None
    bias_ridge: float
    towards: str
    weights: str
    own_weight: float


_PRESETS = {
    "stable": FitSettings(None, None, 1e-2, 0.1, "kept", "share", 1.0),
    "paper": FitSettings(256, 2, 1e-4, 0.0, "zero", "equal", 0.0),
}


@dataclass(frozen=True)
class AttentionMatching:
    """Kept keys by attention, then a log-bias and values fitted so that attention over them equals the dense one.

    For every layer and KV head: keep some of the keys, by default those with the largest root-mean-square attention
    weight over the queries; fit the log-bias beta so that sum_j exp(q.k_j + beta_j) over kept keys equals the sum over
    the whole prefix; fit values C so that softmax(q.K_kept + beta) C equals the dense attention output. All heads of a
    layer are solved together, and off policy those of all layers.

    Args:
        preset: "stable": all queries by their share and the prefix's own (own_weight 1), log-bias solved to
            convergence and pulled to 0 (bias_ridge 0.1), values pulled towards those of their keys (ridge 1e-2), so
            that what few queries say of a slot does not carry it away; a head for which this fit loses to its kept keys
            and values unchanged is fitted without log-bias, so that none ever does. "paper": 256 queries per KV head,
            all equal and none the prefix's own, 2 projected-gradient steps, ridge 1e-4 towards 0. The options below
            override the preset's.
        num_queries: queries per KV head, drawn without replacement; None takes all.
        num_iters: projected-gradient steps of the log-bias fit; None solves to convergence.
        ridge: of the value fit, relative to the squared spectral norm; None for minimum-norm least squares.
        bias_ridge: adds bias_ridge |A|^2 |w - 1|^2 to the log-bias fit |A w - b|^2, w = exp(log-bias), A the attention
            masses of the kept keys; at least 0.
        towards: what the ridge pulls the values to, "zero" or "kept": the values of the kept keys.
        weights: "share": a query's errors count by the part of its attention that goes to the prefix, the rest going to
            what stands behind it, and the log-bias is fitted to relative masses; or "equal": all alike, and masses
            relative to the largest term.
        own_weight: of the prefix's own queries, moved behind it (``own_queries``), all together and relative to the
            others; 0: none. They stand for what later text may ask, and need a model whose positions can be turned.
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
        budgets: "equal", as many slots in every head; or every example shares out the same total so that the squared
            errors of the attention outputs sum to little: "adaptive" among the heads of all layers, "layers" among the
            layers, whose heads then have equally many; both ours.
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
    weights: str = "preset"
    own_weight: float | Literal["preset"] = "preset"
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
        if self.budgets not in ("equal", "adaptive", "layers"):
            raise InputError(f"budgets must be 'equal', 'adaptive' or 'layers', not {self.budgets!r}")
        if self.budgets != "equal" and self.on_policy:
            raise InputError(f"budgets {self.budgets!r} compare all layers at once: they cannot be had with on_policy")
        settings = self.options()
        if settings.num_queries is not None and settings.num_queries < 1:
            raise InputError(f"num_queries must be at least 1, not {settings.num_queries}")
        if settings.towards not in ("zero", "kept"):
            raise InputError(f"towards must be 'zero' or 'kept', not {settings.towards!r}")
        if settings.weights not in ("share", "equal"):
            raise InputError(f"weights must be 'share' or 'equal', not {settings.weights!r}")
        if not 0 <= settings.own_weight < math.inf:
            raise InputError(f"own_weight must be at least 0 and finite, not {settings.own_weight}")
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
        if self.on_policy:

            def fit(seen: Trace, keys: LayerKeys) -> Layer:
                (layer,) = self._fit_layers(self._asked(seen, trace, keys), list(keys), slots)
                return layer

            layers = fit_on_policy(trace, slots, fit)
        else:
            asked = self._asked(trace, trace)
            if self.budgets == "equal":
                layers = self._fit_layers(asked, list(range(len(trace.keys))), slots)
            else:
                by_layer = self.budgets == "layers"
                layers = share_out(trace, slots, lambda size: self._fit_heads(asked, size), by_layer=by_layer)
        told = {field.name: getattr(self, field.name) for field in fields(self)} | self.options()._asdict()
        return compact_cache(trace, layers, "attention-matching", told)

    def _asked(self, trace: Trace, source: Trace, later_keys: LayerKeys | None = None) -> Asked:
        """The queries of a trace, and the source's own, worked out once."""
        settings = self.options()
        own, by_share = None, settings.weights == "share"
        if settings.own_weight:
            own = source.memo("own queries", lambda: own_queries(source))

        def make() -> Asked:
            return ask(trace, own, settings.own_weight, by_share=by_share, later_keys=later_keys)

        return trace.memo(("asked", settings.weights, settings.own_weight), make)

    def _fit_layers(self, asked: Asked, layers: list[int], num_slots: int) -> list[Layer]:
        fitted: dict[Head, Fit] = {}
        for heads, block, summary in self._blocks(asked, layers):
            slots, values, log_bias = fit_slots(block, summary, num_slots, self.fit_options())
            fitted.update(
                zip(heads, zip(slots, values, self._biases(block, slots, log_bias), strict=True), strict=True)
            )
        return [fitted_layer(asked.trace, index, fitted) for index in layers]

    def _fit_heads(self, asked: Asked, num_slots: int) -> dict[Head, HeadFit]:
        fitted: dict[Head, HeadFit] = {}
        for heads, block, summary in self._blocks(asked, list(range(len(asked.trace.keys)))):
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

    def _blocks(self, asked: Asked, layers: list[int]) -> Iterator[tuple[list[Head], HeadBlock, DenseAttention]]:
        """Heads in groups, with their tensors and their dense attention, which is computed once."""
        trace, settings = asked.trace, self.options()
        drawn, groups = draw_queries(trace, settings.num_queries, self.seed), head_groups(trace, layers)
        relative = settings.weights == "share" and asked.weights is not None

        def make() -> list[DenseAttention]:
            blocks = (load_block(trace, heads, drawn, asked.weights) for heads in groups)
            return [summarise(block, self.selection, relative=relative) for block in blocks]

        key = "dense attention", *layers, settings.num_queries, self.seed, self.selection, relative
        summaries = trace.memo(key, make)
        for heads, summary in zip(groups, summaries, strict=True):
            yield heads, load_block(trace, heads, drawn, asked.weights), summary
