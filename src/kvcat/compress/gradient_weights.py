"""Weights of queries by how much the model's predictions depend on their attention's outputs."""

from collections.abc import Sequence

import torch

from kvcat.compress.trace import Trace
from kvcat.errors import InputError
from kvcat.models import output_gradients
from kvcat.types import Float, Int, Tensor

HeadWeights = Sequence[Float[Tensor, "batch heads queries"]]
"""Per layer, the weight of each query head's error at each query."""


def gradient_weights(trace: Trace, groups: Sequence[Int[Tensor, " group"]]) -> HeadWeights:
    """Factors of the errors of each query head's outputs, by the gradient at each query.

    The norm n of the gradient of the text's log-likelihood by an output (``output_gradients``) says
    how much a small error of this output changes the predictions. With the mean m over a group of
    queries the factor is sqrt((1 + n / m) / 2). So half of the squared weight is equal for all
    queries: where the model is certain, the gradient is near 0 and a large error still changes the
    prediction. The squares average to 1 over each group, so that neither the groups nor the heads
    change their weights relative to each other.

    Args:
        trace: of the whole text; its model runs once more, with a backward pass.
        groups: positions of the queries in the text, group by group.

    Raises:
        InputError: part of the prefix is already compact.
    """
    if trace.past_len:
        raise InputError(
            "gradient_weights=true needs the whole text, part of which is already compact: leave "
            "the option out"
        )
    norms = output_gradients(
        trace.model, trace.input_ids, rope=trace.rope, layers=trace.layer_numbers
    )
    return [torch.cat([_scaled(of_layer, group) for group in groups], dim=2) for of_layer in norms]


def _scaled(
    norms: Float[Tensor, "batch heads tokens"], positions: Int[Tensor, " group"]
) -> Float[Tensor, "batch heads group"]:
    """The factors at some positions; 1 at all of them in a head that no prediction depends on."""
    of_group = norms.index_select(2, positions.to(norms.device))
    mean = of_group.mean(2, keepdim=True)
    relative = torch.where(mean > 0, of_group / mean, torch.ones_like(of_group))
    return ((1 + relative) / 2).sqrt()
