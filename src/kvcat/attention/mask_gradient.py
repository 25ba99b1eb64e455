"""The gradient of the mask: how the loss of the masked pass reaches the policy."""

# pyright: reportIncompatibleMethodOverride=false

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from kvcat.attention.chunks import score_chunks
from kvcat.attention.kernels import attend_biased, attend_extended
from kvcat.memory import rows_per_chunk
from kvcat.types import Bool, Float, Tensor, at_least_float32

_LEAST_QUERIES = 16


class KeepGradient(torch.autograd.Function):
    """``out`` unchanged, with a gradient to ``keep``; the other gradients pass through ``out``.

    dL/dm_j = sum_{h,i} P_ij (dO_i . v_j - dO_i . o_i) over the reachable pairs, where P and o are
    the dense attention. The derivative of the masked pass itself, at the visible slots alone, would
    give a dropped slot an unbounded weight. The terms of a query sum to 0 over its slots: the loss
    can re-order slots, but never asks for more of them. The forward pass costs nothing. The
    backward pass computes the scores again: in bfloat16 on a GPU by ``fused_keep_gradient``,
    elsewhere by ``keep_gradient``. ``apply`` takes out, keep, q, k, v, reach and scale, as in
    ``attend``.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        """``out`` itself."""
        out, *tensors, scale = inputs
        ctx.save_for_backward(*tensors)
        ctx.scale = scale
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        """The gradient of ``out`` as it arrives, and that of ``keep``."""
        grad_out = grad_outputs[0]
        keep, q, k, v, reach = ctx.saved_tensors
        grad_keep = _gradient_of_keep(grad_out, q, k, v, reach, ctx.scale)
        no_gradient = [None] * 5  # q, k, v, reach and scale: theirs pass through out
        return grad_out, grad_keep.to(keep.dtype), *no_gradient


# One operator in a compiled graph: a graph of all chunks would take long to compile, and after a
# break of the graph a layer under activation checkpointing would not be compiled at all.
@torch.library.custom_op(
    "kvcat::gradient_of_keep",
    mutates_args=(),
    schema="(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor? reach, float scale) -> Tensor",
)
def _gradient_of_keep(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, reach: Tensor | None, scale: float
) -> Tensor:
    """The gradient of ``KeepGradient`` by ``keep``, in the way that suits the device."""
    # autocast leaves rotated queries and keys in float32
    if v.device.type == "cuda" and v.dtype == torch.bfloat16:
        return fused_keep_gradient(grad_out, q, k, v, reach, scale)
    return keep_gradient(grad_out, q, k, v, reach, scale)


@_gradient_of_keep.register_fake
def _(_grad_out: Tensor, q: Tensor, k: Tensor, *_: Any) -> Tensor:
    """A tensor of its shape and type."""
    wide = torch.promote_types(q.dtype, torch.float32)
    return k.new_empty(k.shape[0], k.shape[2], dtype=wide)


def keep_gradient(
    grad_out: Float[Tensor, "batch heads queries value_dim"],
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    reach: Bool[Tensor, "#batch queries keys"] | None,
    scale: float,
    *,
    cpu_elements: int = 2**17,
) -> Float[Tensor, "batch keys"]:
    """The gradient of ``KeepGradient`` by ``keep``, in at least float32, a few queries at a time.

    Args:
        grad_out: gradient by the attention's output.
        q, k, v, reach, scale: as in ``attend``.
        cpu_elements: most scores that exist at once on a CPU, if 16 queries have no more. The
            default stays in its cache, and short causal chunks skip more keys.
    """
    batch, num_heads, num_queries, _ = q.shape
    kv_heads, num_keys = k.shape[1:3]
    grouped_q = q.to(k.dtype).unflatten(1, (kv_heads, -1))
    grouped_grad = grad_out.to(v.dtype).unflatten(1, (kv_heads, -1))
    row_elements = batch * num_heads * num_keys
    rows_at_once = rows_per_chunk(
        row_elements, q.device, cpu_elements=cpu_elements, least=_LEAST_QUERIES
    )
    # causal: chunks of early queries skip the keys after them
    last_seen = torch.arange(num_keys - num_queries, num_keys)
    if reach is not None:
        last_seen = torch.full([num_queries], num_keys - 1)
    wide = torch.promote_types(q.dtype, torch.float32)
    gradient = torch.zeros(batch, num_keys, dtype=wide, device=k.device)
    for rows, scores in score_chunks(grouped_q, k, scale, last_seen, rows_at_once):
        if reach is not None:
            scores.masked_fill_(~reach[:, None, None, rows], -torch.inf)
        num_seen = scores.shape[-1]
        gradient[:, :num_seen] += _chunk_gradient(
            grouped_grad[:, :, :, rows], scores.softmax(-1), v[:, :, :num_seen]
        )
    return gradient


def fused_keep_gradient(
    grad_out: Float[Tensor, "batch heads queries value_dim"],
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    reach: Bool[Tensor, "#batch queries keys"] | None,
    scale: float,
) -> Float[Tensor, "batch keys"]:
    """``keep_gradient`` by a forward and a backward of PyTorch's fused attention.

    The sum over heads and queries of P_ij (dO_i . v_j - dO_i . o_i) is also the gradient of a
    log-bias of key j, at a bias of 0. There is no tensor of queries x keys, whose reading and
    writing takes most of the time of ``keep_gradient`` on a GPU. On a CPU the five products of the
    kernels' backward take three times as long as the two of ``keep_gradient``. Queries and keys are
    rounded to the dtype of the values, as the masked pass itself rounds them.
    """
    wide = torch.promote_types(v.dtype, torch.float32)
    no_bias = torch.zeros(k.shape[:3], dtype=wide, device=k.device)
    q = q.to(v.dtype)
    k = k.to(v.dtype)

    def dense_attention(log_bias: Tensor) -> Tensor:
        if reach is None:
            return attend_biased(q, k, v, log_bias, scale=scale, cpu_kernel=False)
        return attend_extended(q, k, v, log_bias, reach[:, None], causal=False, scale=scale)

    # torch.autograd.grad records nothing within an operator
    gradient_of_bias = torch.func.vjp(dense_attention, no_bias)[1]
    (grad_bias,) = gradient_of_bias(grad_out.to(v.dtype))
    return grad_bias.sum(1)


def _chunk_gradient(
    grad_out: Float[Tensor, "batch kv_heads group queries value_dim"],
    weights: Float[Tensor, "batch kv_heads group queries keys"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
) -> Float[Tensor, "batch keys"]:
    """sum_i P_ij dO_i.v_j - sum_i P_ij c_i, where c_i = dO_i.o_i = sum_j P_ij dO_i.v_j."""
    # the query heads of a KV head as one matrix: (batch, kv_heads, group * queries, keys)
    weights = weights.flatten(2, 3)
    products = at_least_float32(grad_out.flatten(2, 3) @ v.mT)
    products.mul_(weights)
    # subtracting c_i makes the gradient that of a normalised attention: a value that equals the
    # output changes nothing
    centre = products.sum(-1, keepdim=True).mT  # (batch, kv_heads, 1, group * queries)
    gradient = torch.ones_like(centre) @ products - centre @ weights
    return gradient.sum((1, 2))
