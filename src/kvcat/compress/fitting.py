"""Log-bias and values of given slots, fitted to attention over the whole prefix."""

import torch

from kvcat.compress.head_attention import DenseAttention
from kvcat.compress.solvers import fit_log_bias, fit_values
from kvcat.types import Float, Tensor

BOUNDS = (-3.0, 3.0)
PULL = 0.15  # of the log-bias, relative to the usual column


def fit_to_dense(
    scores: Float[Tensor, "heads fitted slots"],
    dense: DenseAttention,
    slot_values: Float[Tensor, "heads slots value_dim"],
    *,
    num_iters: int | None = None,
    ridge: float | None = 0.05,
    log_bias: bool = True,
) -> tuple[
    Float[Tensor, "heads slots"],
    Float[Tensor, "heads slots value_dim"],
    Float[Tensor, "heads fitted slots"],
]:
    """Log-bias and values of given slots, and the weighted attention that they get.

    Args:
        scores: of the fitted queries against the slots' keys; overwritten by the attention.
        dense: their attention over the whole prefix.
        slot_values: values to which the fitted ones are pulled.
        num_iters, ridge, log_bias: as in ``AttentionMatching``; without log-bias it is 0.
    """
    is_paper_form = num_iters is not None
    bias = torch.zeros_like(slot_values[..., 0])
    if log_bias:
        # a query's equation is divided by its whole mass, except in the paper's form
        weights = dense.weights * dense.mass if is_paper_form else dense.weights
        bias = fit_log_bias(
            scores,
            dense.log_mass.unsqueeze(-1),
            bounds=BOUNDS,
            num_iters=num_iters,
            pull=0.0 if is_paper_form or ridge is None else PULL,
            relative_to="columns",
            weights=weights,
        )
    attention = torch.softmax(scores.add_(bias.unsqueeze(1)), -1, out=scores)
    # 0 where a query sees no slot
    attention.nan_to_num_(0.0).mul_(dense.weights.unsqueeze(-1))
    if is_paper_form:
        values = fit_values(attention, dense.outputs, ridge=ridge)
    else:
        values = fit_values(
            attention, dense.outputs, ridge=ridge, towards=slot_values, relative_to="columns"
        )
    return bias, values, attention
