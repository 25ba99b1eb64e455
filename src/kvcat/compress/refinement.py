"""The slots of attention heads refined: keys, log-bias and values together, by L-BFGS."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from tqdm.auto import tqdm

from kvcat.cache import CompactLayer, HeadSlots, Layer
from kvcat.compress.head_attention import DenseAttention, HeadBatch
from kvcat.compress.heads import HeadIndex, Heads
from kvcat.compress.lbfgs import minimise
from kvcat.errors import InputError
from kvcat.progress import disable_bar
from kvcat.types import Float, Tensor

_LEAST_SHARE = 1e-6
_TINY = 1e-30
# relative to the mean variance of the queries' directions
_LEAST_VARIANCE = 1e-2
# of a slot's curvature, relative to the mean of the head's slots
_LEAST_CURVATURE = 0.3
# relative to the slots' squares; keeps the factorisation in single precision possible
_LEAST_RIDGE = 1e-6


class Evaluation(NamedTuple):
    """The objective at a point.

    Args:
        value: of every head.
        gradient: by the point.
        values: of the slots, the best ones for the point's scores.
    """

    value: Float[Tensor, " heads"]
    gradient: Float[Tensor, "heads slots features"]
    values: Float[Tensor, "heads slots value_dim"]


@dataclass(frozen=True)
class Objective:
    """Squared error of a head's attention as a function of its slots' scores.

    A point x changes the scores of the slots from those of the start S^0 to S^0 + F (x s)^T, with F
    the features of the queries and s a scale per slot. Features are affine in the query, so that a
    change of the scores is a change of key and log-bias (``slots_at``). They are whitened: over the
    queries they have mean 0 and variance at most 1, and the last one is 1. Without log-bias they
    are linear in the query. With softmax weights A_ij of the scores, w_i the queries' weights and
    o_i the dense outputs, a head's value is, divided by sum_i w_i^2 |o_i|^2,

        sum_i w_i^2 |sum_j A_ij v_j - o_i|^2 + c^2 sum_i f_i^2 (p_i(x) - p_i)^2 + mu |V - V^0|^2
        + pull |x|^2,

    where V is the minimiser for these scores. p_i is the share of query i's attention that goes to
    the prefix, p_i(x) the same with the mass of the slots, f_i = w_i / p_i, and c^2 the mean of
    |o_i|^2 with weights w_i^2. mu is ``ridge`` times the mean over all slots except the largest of
    sum_i w_i^2 A_ij^2 at the start.

    Args:
        start: the slots to begin with.
        features: of each query.
        whitening: maps a change of score per feature to a change of key.
        mean_query: what is subtracted before the whitening; None: nothing, and no log-bias.
        start_scores: scores of the start.
        weights, outputs, log_elsewhere: of each query, the outputs times their weights.
        share: p_i.
        share_weights: c f_i.
        scale: s.
        norm: the divisor.
        value_pull: mu.
        pull: weight of |x|^2.
    """

    start: HeadSlots
    features: Float[Tensor, "heads queries features"]
    whitening: Float[Tensor, "heads head_dim directions"]
    mean_query: Float[Tensor, "heads 1 head_dim"] | None
    start_scores: Float[Tensor, "heads queries slots"]
    weights: Float[Tensor, "heads queries"]
    outputs: Float[Tensor, "heads queries value_dim"]
    log_elsewhere: Float[Tensor, "heads queries"]
    share: Float[Tensor, "heads queries"]
    share_weights: Float[Tensor, "heads queries"]
    scale: Float[Tensor, "heads slots 1"]
    norm: Float[Tensor, " heads"]
    value_pull: Float[Tensor, " heads"]
    pull: float

    @classmethod
    def of(
        cls,
        batch: HeadBatch,
        dense: DenseAttention,
        start: HeadSlots,
        *,
        pull: float,
        ridge: float,
        log_bias: bool = True,
    ) -> "Objective":
        """The objective of a batch of heads on their fitted queries.

        Args:
            batch: keys, values, queries and their weights; every query sees the whole prefix.
            dense: their attention over the whole prefix.
            start: slots to begin with.
            pull: towards the scores of the start.
            ridge: pull of the values towards those of the start.
            log_bias: False: the log-bias stays as it is.
        """
        queries = batch.queries
        share = (dense.log_mass - batch.log_elsewhere).sigmoid()  # p_i: the rest goes elsewhere
        squares = dense.weights.square()
        norm = dense.outputs.square().sum((1, 2)).clamp_min(_TINY)
        mean_output = (norm / squares.sum(1).clamp_min(_TINY)).sqrt()
        factors = dense.weights / share.clamp_min(_LEAST_SHARE)

        # whitened: |x s|^2 of a slot is the mean square of its change of score over the queries
        query_weights = squares / squares.sum(1, keepdim=True).clamp_min(_TINY)
        mean_query = (query_weights.unsqueeze(-1) * queries).sum(1, keepdim=True)
        centred = queries - mean_query
        whitening = _whitening(centred, query_weights)
        if log_bias:
            features = centred @ whitening
            features = torch.cat([features, torch.ones_like(features[..., :1])], -1)
        else:
            features = queries @ whitening

        start_scores = queries @ start.keys.mT + start.bias_or_zeros().unsqueeze(1)
        attention = torch.softmax(start_scores, -1)
        # s: slots whose scores matter little may move further
        curvature = _curvature(attention, dense, start.values) / norm.unsqueeze(1)
        floor = _LEAST_CURVATURE * curvature.mean(1, keepdim=True)
        scale = (curvature + floor).clamp_min(_TINY).rsqrt().unsqueeze(-1)
        # without the largest column, the attention sink's, which would set the pull of all others
        slot_squares = (attention * dense.weights.unsqueeze(-1)).square().sum(1)
        num_others = max(1, slot_squares.shape[1] - 1)
        mean_of_others = (slot_squares.sum(1) - slot_squares.amax(1)) / num_others
        return cls(
            start=start,
            features=features,
            whitening=whitening,
            mean_query=mean_query if log_bias else None,
            start_scores=start_scores,
            weights=dense.weights,
            outputs=dense.outputs,
            log_elsewhere=batch.log_elsewhere,
            share=share,
            share_weights=mean_output.unsqueeze(1) * factors,
            scale=scale,
            norm=norm,
            value_pull=ridge * mean_of_others.clamp_min(_TINY),
            pull=pull,
        )

    def origin(self) -> Float[Tensor, "heads slots features"]:
        """The point of the start."""
        num_heads, num_slots, _ = self.start.keys.shape
        return self.features.new_zeros(num_heads, num_slots, self.features.shape[-1])

    def __call__(self, point: Float[Tensor, "heads slots features"]) -> Evaluation:
        """Value, gradient and the best values at a point; value infinite where no factorisation
        exists.
        """
        scores = torch.baddbmm(self.start_scores, self.features, (point * self.scale).mT)
        log_mass = scores.logsumexp(-1)
        attention = scores.sub_(log_mass.unsqueeze(-1)).exp_()
        change, residual, is_solved = self._best_change(attention * self.weights.unsqueeze(-1))
        values = self.start.values + change
        share = (log_mass - self.log_elsewhere).sigmoid()
        share_error = self.share_weights * (share - self.share)
        value = residual.square().sum((1, 2)) + share_error.square().sum(1)
        value = value + self.value_pull * change.square().sum((1, 2))

        # half of the derivative by the scores; the values are optimal, so theirs is 0
        by_score = (residual * self.weights.unsqueeze(-1)) @ values.mT
        # of a softmax: dL/ds_j = A_j (dL/dA_j - sum_k A_k dL/dA_k); the factor A_j follows below
        by_score -= (attention * by_score).sum(-1, keepdim=True)
        by_mass = share_error * self.share_weights * share * (1 - share)
        by_score = by_score.add_(by_mass.unsqueeze(-1)).mul_(attention)
        gradient = 2 * self.scale * (by_score.mT @ self.features)

        value = value / self.norm + self.pull * point.square().sum((1, 2))
        gradient = gradient / self.norm.view(-1, 1, 1) + 2 * self.pull * point
        return Evaluation(value.masked_fill(~is_solved, torch.inf), gradient, values)

    def slots_at(self, point: Float[Tensor, "heads slots features"]) -> HeadSlots:
        """Keys, values and log-bias of a point."""
        by_feature = point * self.scale
        values = self(point).values
        if self.mean_query is None:
            keys = self.start.keys + by_feature @ self.whitening.mT
            return HeadSlots(keys, values, self.start.log_bias)
        key_change = by_feature[..., :-1] @ self.whitening.mT
        at_mean = (key_change * self.mean_query).sum(-1)
        log_bias = self.start.bias_or_zeros() + by_feature[..., -1] - at_mean
        return HeadSlots(self.start.keys + key_change, values, log_bias)

    def _best_change(
        self, weighted: Float[Tensor, "heads queries slots"]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The best change of the start's values, the residuals, and where they exist.

        Args:
            weighted: attention weights times the queries' weights.
        """
        error = torch.baddbmm(self.outputs, weighted, self.start.values, alpha=-1)
        gram = weighted.mT @ weighted
        squares = gram.diagonal(dim1=-2, dim2=-1)
        # columns of equal length: the sink's is far longer than the others
        lengths = (squares + self.value_pull.unsqueeze(-1)).sqrt()
        gram = gram / (lengths.unsqueeze(-1) * lengths.unsqueeze(-2))
        # (A^T A + mu I) has these lengths in its diagonal, which is therefore 1
        gram.diagonal(dim1=-2, dim2=-1).fill_(1 + _LEAST_RIDGE)
        factor, info = torch.linalg.cholesky_ex(gram)
        # (A^T A + mu I) change = A^T error, with columns A of length 1
        right = (weighted.mT @ error) / lengths.unsqueeze(-1)
        change = torch.cholesky_solve(right, factor) / lengths.unsqueeze(-1)
        is_solved = (info == 0) & change.isfinite().all(-1).all(-1)
        change = torch.where(is_solved.view(-1, 1, 1), change, 0.0)
        # w (A V - o): the error that is left, with the opposite sign
        return change, torch.baddbmm(error, weighted, change, beta=-1), is_solved


def refine_slots(objective: Objective, num_steps: int) -> HeadSlots:
    """The slots after some steps of L-BFGS from the start of an objective."""

    def value_and_gradient(point: Tensor) -> tuple[Tensor, Tensor]:
        evaluation = objective(point)
        return evaluation.value, evaluation.gradient

    return objective.slots_at(minimise(value_and_gradient, objective.origin(), num_steps))


@torch.no_grad()
def refine_layers(
    heads: Heads,
    start: Sequence[Layer],
    num_steps: int,
    *,
    pull: float,
    ridge: float,
    log_bias: bool = True,
) -> list[Layer]:
    """The layers of a cache with refined slots, as many in every head as before.

    Heads that hold the whole prefix stay as they are.

    Args:
        heads: of the cache's trace, with the queries to fit to.
        start: layers of a cache of this trace.
        num_steps: as in ``refine_slots``.
        pull, ridge: as in ``Objective.of``.
        log_bias: False: the log-bias stays as it is. A cache without one gets none.

    Raises:
        InputError: queries of the prefix at their original positions, which do not see all of it.
    """
    if heads.is_causal:
        raise InputError(
            "refinement needs queries at positions after the prefix. A prefix alone has them with "
            "preset=stable, if the model's keys rotate with their position: use attention-matching"
        )
    slots_of_heads = _slots_of_heads(start)
    sizes = {index: len(slots) for index, slots in slots_of_heads.items()}
    groups = heads.groups_for_fit(sizes)
    for group in tqdm(groups, "refinement", delay=2.0, disable=disable_bar(), leave=False):
        layer, example, head = group[0]
        whole = heads.prefix.layers[layer].present_head(example, head)
        if sizes[group[0]] == len(whole):
            continue
        batch, dense = heads.fitted_attention(group)
        before = [slots_of_heads[index] for index in group]
        has_bias = any(slots.log_bias is not None for slots in before)
        objective = Objective.of(
            batch,
            dense,
            HeadSlots.stacked(before),
            pull=pull,
            ridge=ridge,
            log_bias=log_bias and has_bias,
        )
        refined = refine_slots(objective, num_steps)
        for index, slots in zip(group, refined.split(), strict=True):
            slots = slots.to(before[0].keys.dtype)
            slots_of_heads[index] = slots if has_bias else replace(slots, log_bias=None)
    return [_layer(slots_of_heads, index, layer) for index, layer in enumerate(start)]


def _slots_of_heads(layers: Sequence[Layer]) -> dict[HeadIndex, HeadSlots]:
    """The slots of every head."""
    return {
        (index, example, head): slots
        for index, layer in enumerate(layers)
        for example, row in enumerate(layer.heads())
        for head, slots in enumerate(row)
    }


def _layer(slots_of_heads: Mapping[HeadIndex, HeadSlots], index: int, start: Layer) -> Layer:
    """One layer from the slots of its heads."""
    num_examples, num_heads = start.counts.shape
    return CompactLayer.of_heads(
        [
            [slots_of_heads[index, example, head] for head in range(num_heads)]
            for example in range(num_examples)
        ]
    )


def _whitening(
    centred: Float[Tensor, "heads queries head_dim"], weights: Float[Tensor, "heads queries"]
) -> Float[Tensor, "heads head_dim directions"]:
    """Matrices W so that the rows of centred W have a weighted covariance of at most the identity.

    Directions without variance are divided by a tenth of the root of the mean variance.
    """
    covariance = (centred * weights.unsqueeze(-1)).mT @ centred
    variances, directions = torch.linalg.eigh(covariance.double())
    variances = variances.clamp_min(0.0)
    floor = _LEAST_VARIANCE * variances.mean(-1, keepdim=True)
    lengths = (variances + floor).clamp_min(_TINY).rsqrt()
    return (directions * lengths.unsqueeze(-2)).to(centred.dtype)


def _curvature(
    attention: Float[Tensor, "heads queries slots"],
    dense: DenseAttention,
    values: Float[Tensor, "heads slots value_dim"],
) -> Float[Tensor, "heads slots"]:
    """Sum over the queries of w^2 A^2 |v - o|^2: how much each slot's score changes the outputs."""
    weights = dense.weights.unsqueeze(-1)
    squares = (attention * weights).square()
    outputs = dense.outputs / weights.clamp_min(_TINY)
    of_slots = squares.sum(1) * values.square().sum(-1)
    products = (squares.mT @ outputs * values).sum(-1)
    of_outputs = (squares.mT @ outputs.square().sum(-1, keepdim=True)).squeeze(-1)
    return (of_slots - 2 * products + of_outputs).clamp_min(0.0)
