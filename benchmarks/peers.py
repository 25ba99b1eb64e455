"""Other methods that compress a cache, for comparison: the original's code, KVSculpt and GRKV.

KVSculpt and GRKV are written in the manner of their papers and give each head its slots in float32.
"""

import importlib
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch

from kvcat.cache import CompactCache, CompactLayer, HeadSlots
from kvcat.compress import (
    AttentionMatching,
    Trace,
    compact_cache,
    make_compressor,
    parse_method,
    seeded_compressor,
)
from kvcat.compress.heads import Heads
from kvcat.compress.prefix import Prefix
from kvcat.compress.queries import fitted_queries
from kvcat.compress.refinement import refine_layers
from kvcat.errors import InputError
from kvcat.models.rotation import KeyRotation
from kvcat.types import Float, Tensor

ORIGINAL = "original-"
LEARNING = ("attention-matching", "refined", "gradient", "kvsculpt", ORIGINAL)
"""Beginnings of the names of methods that read what follows the prefix."""


class Method(Protocol):
    """What makes caches of several sizes."""

    def each(self, trace: Trace, keep_ratios: Sequence[float]) -> Iterator[CompactCache]:
        """The caches of several keep ratios, in their order."""
        ...


def method_of(spec: str, peer: Path | str | None = None) -> Method:
    """The method of a name with options, one of kvcat's or of this file's.

    Args:
        spec: as on kvcat's command line; "original-omp", "original-omp-fast" or "original-keys";
            "kvsculpt" or "kvsculpt-adaptive"; "grkv" or "grkv:" and the method that selects.
        peer: checkout of the original's code.
    """
    if spec.startswith(ORIGINAL):
        if peer is None:
            raise InputError(f"{spec} needs --peer, a checkout of adamzweiger/compaction")
        return Original(peer, spec.removeprefix(ORIGINAL))
    if spec in ("kvsculpt", "kvsculpt-adaptive"):
        return KVSculpt("adaptive" if spec.endswith("adaptive") else "equal")
    name, _, selection = spec.partition(":")
    if name == "grkv":
        return GRKV(selection) if selection else GRKV()
    return seeded_compressor(*parse_method(spec), seed=0)


class Original:
    """The authors' own code of Attention Matching, one head at a time, from a checkout of
    adamzweiger/compaction."""

    def __init__(self, folder: Path | str, name: str) -> None:
        sys.path.insert(0, str(folder))
        kind = "omp" if name.startswith("omp") else "highest_attention_keys"
        module = importlib.import_module(f"compaction.algorithms.{kind}")
        if kind == "omp":
            fast = {"k_choice": 4, "nnls_interval": 2} if name == "omp-fast" else {}
            self._solver = module.OMPCompaction(
                nnls_iters=0,
                nnls_upper_bound=math.exp(7),
                drop_key_beta_cutoff=-7,
                c2_method="lsq",
                **fast,
            )
        else:
            self._solver = module.HighestAttentionKeysCompaction(
                score_method="rms",
                nnls_iters=2,
                nnls_lower_bound=math.exp(-3),
                nnls_upper_bound=math.exp(3),
                c2_method="lsq",
            )

    def each(self, trace: Trace, keep_ratios: Sequence[float]) -> Iterator[CompactCache]:
        """The caches of several keep ratios, each computed alone."""
        for keep in keep_ratios:
            layers = []
            for every, values, queries in zip(trace.keys, trace.values, trace.queries, strict=True):
                heads = zip(every[0], values[0], queries[0].chunk(every.shape[1]), strict=True)
                fits = [
                    self._solver.compute_compacted_cache(
                        k, v, q.flatten(0, 1), math.ceil(keep * len(k))
                    )
                    for k, v, q in heads
                ]
                slots = [HeadSlots(keys, fitted, bias) for keys, bias, fitted, *_ in fits]
                layers.append(CompactLayer.of_heads([slots]))
            yield CompactCache(layers, trace.prefix_len, trace.fingerprint)


class KVSculpt:
    """Free keys by L-BFGS and values by least squares, from keys with the most attention; no
    log-bias.

    The error counts outputs and the prefix's share of each query's attention, as kvcat's refinement
    does, without a pull. With a prefix alone the queries are those of kvcat's default, moved after
    the prefix.

    Args:
        budgets: "equal", or "adaptive": slots allocated to heads as kvcat's default does. (The
            paper allocates them by the error of a pilot run.)
        num_steps: of L-BFGS; every step solves for the values again.

    References: Jiang and Jin 2026, arXiv:2603.27819.
    """

    def __init__(self, budgets: str = "equal", num_steps: int = 40) -> None:
        self._budgets = budgets
        self._num_steps = num_steps

    def each(self, trace: Trace, keep_ratios: Sequence[float]) -> Iterator[CompactCache]:
        """The caches of several keep ratios."""
        own_weight = 1.0 if trace.text.supervision == "self" else 0.0
        prefix = Prefix.of(trace)
        heads = Heads(prefix, fitted_queries(prefix, own_weight, by_share=True))
        selection = AttentionMatching(
            num_iters=0,
            ridge=1e-4,
            log_bias=False,
            own_weight=own_weight,
            budgets=self._budgets,
        )
        for start in selection.each(trace, keep_ratios):
            layers = refine_layers(
                heads, start.layers, self._num_steps, pull=0.0, ridge=1e-6, log_bias=False
            )
            yield compact_cache(trace, layers, "kvsculpt", {"budgets": self._budgets})


class GRKV:
    """Slots of an eviction method whose values and then keys are updated by ridge regression.

    The regression minimises the squared error of the attention outputs of 32 queries of the
    prefix, one from the middle of each of as many equal parts, moved to the last position: first by
    values, then by a Gauss-Newton step for keys (16 steps of conjugate gradients). An update is
    shortened to a tenth of the norm of a head's values, a fortieth of that of its keys. Slots of
    the last 32 positions do not change. Of a head's states before and after the updates the best
    one counts.

    Args:
        selection: the method whose slots are updated.

    References: Peng et al. 2026, arXiv:2605.31105; settings of version 0.3.0 of the authors' code.
    """

    NUM_QUERIES = 32
    TOTAL_WEIGHT = 6.0
    RIDGE = 0.01
    VALUE_CAP = 0.1
    KEY_CAP = 0.025
    FIXED = 32
    CG_STEPS = 16

    def __init__(self, selection: str = "snapkv,window=32,kernel_size=5,pooling=average") -> None:
        name, options = parse_method(selection)
        self._selection = make_compressor(name, **options)

    @torch.no_grad()
    def each(self, trace: Trace, keep_ratios: Sequence[float]) -> Iterator[CompactCache]:
        """The caches of several keep ratios; of one example."""
        queries = self._queries(trace)
        for start in self._selection.each(trace, keep_ratios):
            layers = []
            for index, layer in enumerate(start.layers):
                updated = [
                    self._update(trace, queries[index][head], index, head, slots.keys, slots.values)
                    for head, slots in enumerate(layer.heads()[0])
                ]
                layers.append(CompactLayer.of_heads([[HeadSlots(*states) for states in updated]]))
            yield compact_cache(trace, layers, "grkv", {})

    def _queries(self, trace: Trace) -> list[Float[Tensor, "kv_heads queries head_dim"]]:
        """Per layer, the scaled queries of every KV head at the last position."""
        length = trace.prefix_len
        edges = torch.arange(self.NUM_QUERIES + 1) * length // self.NUM_QUERIES
        positions = (edges[:-1] + edges[1:] - 1) // 2
        rows = torch.isin(trace.prefix_positions, positions).nonzero().squeeze(1)
        rotation = KeyRotation(trace.model, max(1, length // 2))
        by_layer = []
        for index, of_layer in enumerate(trace.layers):
            moved = rotation(of_layer.prefix_queries[:1, :, rows], index, length - 1 - positions)[0]
            group = of_layer.query_heads
            by_head = moved.unflatten(0, (-1, group)).flatten(1, 2)
            by_layer.append(by_head * trace.scales[index])
        return by_layer

    def _update(
        self,
        trace: Trace,
        queries: Float[Tensor, "queries head_dim"],
        layer: int,
        head: int,
        keys: Float[Tensor, "slots head_dim"],
        values: Float[Tensor, "slots value_dim"],
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of one head after the regression."""
        whole = trace.layers[layer].slots.present_head(0, head)
        all_keys, all_values = whole.keys, whole.values
        targets = torch.softmax(queries @ all_keys.T, -1) @ all_values
        weight = self.TOTAL_WEIGHT / self.NUM_QUERIES
        is_last_key = (keys.unsqueeze(1) == all_keys[-self.FIXED :]).all(-1)  # (slots, FIXED)
        mutable = (~is_last_key.any(1, keepdim=True)).to(keys)

        def outputs(some_keys: Tensor, some_values: Tensor) -> Tensor:
            return torch.softmax(queries @ some_keys.T, -1) @ some_values

        def objective(some_keys: Tensor, some_values: Tensor) -> float:
            error = (outputs(some_keys, some_values) - targets).square().sum()
            moved = (some_keys - keys).square().sum() + (some_values - values).square().sum()
            return float(weight * error + self.RIDGE * moved)

        attention = torch.softmax(queries @ keys.T, -1) * mutable.T
        gram = weight * attention @ attention.T
        gram.diagonal().add_(self.RIDGE)
        residual = targets - outputs(keys, values)
        change = weight * attention.T @ torch.linalg.solve(gram, residual)
        new_values = values + _capped(change, values * mutable, self.VALUE_CAP)

        # derivative of the outputs by the keys, and its adjoint, at these attention weights
        all_weights = torch.softmax(queries @ keys.T, -1)

        def derivative(direction: Tensor) -> Tensor:
            by_score = queries @ direction.T
            centred = by_score - (all_weights * by_score).sum(-1, keepdim=True)
            return (all_weights * centred) @ new_values

        def adjoint(error: Tensor) -> Tensor:
            by_score = error @ new_values.T
            centred = by_score - (all_weights * by_score).sum(-1, keepdim=True)
            return mutable * ((all_weights * centred).T @ queries)

        def times_hessian(direction: Tensor) -> Tensor:
            moved = derivative(direction * mutable)
            return weight * adjoint(moved) + self.RIDGE * direction

        residual = targets - outputs(keys, new_values)
        key_change = _conjugate_gradients(times_hessian, weight * adjoint(residual), self.CG_STEPS)
        new_keys = keys + _capped(key_change, keys * mutable, self.KEY_CAP)
        states = [(keys, values), (keys, new_values), (new_keys, new_values)]
        return min(states, key=lambda state: objective(*state))


def _capped(change: Tensor, states: Tensor, cap: float) -> Tensor:
    """A change, shortened to a share of the norm of what it changes."""
    longest = cap * states.norm()
    return change * (longest / change.norm().clamp_min(1e-30)).clamp(max=1.0)


def _conjugate_gradients(times_matrix, right: Tensor, num_steps: int) -> Tensor:
    """The solution of a positive definite system, approximately."""
    solution = torch.zeros_like(right)
    residual = right
    direction = residual
    square = residual.square().sum()
    for _ in range(num_steps):
        product = times_matrix(direction)
        length = square / (direction * product).sum().clamp_min(1e-30)
        solution = solution + length * direction
        residual = residual - length * product
        new_square = residual.square().sum()
        direction = residual + new_square / square.clamp_min(1e-30) * direction
        square = new_square
    return solution
