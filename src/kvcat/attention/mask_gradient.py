"""The gradient of the mask: how the loss of the masked pass reaches the policy."""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from kvcat.attention.reference import reachable
from kvcat.types import Bool, Float, Tensor

# scores held at once in the backward: on a CPU they stay in its cache, and short causal chunks skip more keys
_CPU_ELEMENTS, _DEVICE_ELEMENTS = 2**17, 2**26
_LEAST_QUERIES = 16


def couple(
    out: Float[Tensor, "batch heads queries value_dim"],
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    keep: Float[Tensor, "batch keys"],
    log_bias: Float[Tensor, "batch kv_heads keys"] | None,
    reach: Bool[Tensor, "#batch queries keys"] | None,
    *,
    causal: bool,
    scale: float,
    coupling: str,
) -> Float[Tensor, "batch heads queries value_dim"]:
    """``out`` unchanged, with a gradient to ``keep``; gradients to the rest pass through ``out``.

    dL/dm_j = sum_{h,i} P_ij (dO_i . v_j - dO_i . o_i) over the reachable pairs, where P and o are the
    dense attention (surrogate), or e^{s_ij} / Z_i with Z_i and o_i over the visible slots (exact).
    The forward costs nothing. The backward makes the scores again, a few queries at a time.

    Args:
        out: attention over the visible slots.
        q, k, v, keep, log_bias, reach, causal, scale, coupling: as in ``attend``.
    """
    return _KeepGradient.apply(out, keep, q, k, v, log_bias, reach, causal, scale, coupling)  # type: ignore[return-value]


class _KeepGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        out, *tensors, causal, scale, coupling = inputs
        ctx.save_for_backward(*tensors)
        ctx.causal, ctx.scale, ctx.coupling = causal, scale, coupling
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad_out,) = grad_outputs
        keep, q, k, v, log_bias, reach = ctx.saved_tensors
        batch, num_heads, num_queries, _ = q.shape
        num_keys = k.shape[2]
        grad_keep = keep.new_zeros(keep.shape, dtype=torch.promote_types(q.dtype, torch.float32))
        budget = _CPU_ELEMENTS if q.device.type == "cpu" else _DEVICE_ELEMENTS
        step = max(_LEAST_QUERIES, budget // (batch * num_heads * num_keys))
        for start in range(0, num_queries, step):
            stop = min(start + step, num_queries)
            own = slice(start, stop)
            limit = num_keys
            if reach is not None:
                hidden = ~reach[:, own]
            elif ctx.causal:  # only the last keys of a chunk are later than some of its queries
                limit = num_keys - num_queries + stop
                hidden = ~reachable(stop - start, stop - start, device=q.device)[None]
            else:
                hidden = keep.new_zeros(1, 1, 1, dtype=torch.bool)
            grad_keep[:, :limit] += _chunk_gradient(
                grad_out[:, :, own], q[:, :, own], k[:, :, :limit], v[:, :, :limit],
                keep[:, :limit] > 0, None if log_bias is None else log_bias[:, :, :limit], hidden,
                scale=ctx.scale, coupling=ctx.coupling,
            )  # fmt: skip
        return grad_out, grad_keep.to(keep.dtype), *[None] * 8


def _chunk_gradient(
    grad_out: Float[Tensor, "batch heads queries value_dim"],
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    kept: Bool[Tensor, "batch keys"],
    log_bias: Float[Tensor, "batch kv_heads keys"] | None,
    hidden: Bool[Tensor, "#batch #queries last_keys"],
    *,
    scale: float,
    coupling: str,
) -> Float[Tensor, "batch keys"]:
    """sum_i P_ij dO_i.v_j - sum_i P_ij c_i with c_i = dO_i.o_i; ``hidden`` speaks of the last keys."""
    scores = _grouped_product(q, k).mul_(scale)
    if log_bias is not None:
        scores += log_bias[:, :, None, None, :]
    scores[..., -hidden.shape[-1] :].masked_fill_(hidden[:, None, None], -torch.inf)
    if coupling == "surrogate":
        weights = scores.softmax(-1)
        products = _grouped_product(grad_out, v).mul_(weights)
        centre = products.sum(-1)
    else:
        dropped = ~kept[:, None, None, None]
        log_mass = scores.masked_fill(dropped, -torch.inf).logsumexp(-1, keepdim=True)
        blind = log_mass == -torch.inf  # such a query sees itself, whatever the mask
        weights = scores.sub_(log_mass.masked_fill_(blind, torch.inf)).exp_()
        products = _grouped_product(grad_out, v).mul_(weights)
        centre = products.masked_fill(dropped, 0).sum(-1)
    centred = centre.flatten(1).unsqueeze(1) @ weights.flatten(1, 3)
    return products.sum((1, 2, 3)) - centred.squeeze(1)


def _grouped_product(
    a: Float[Tensor, "batch heads queries channels"], b: Float[Tensor, "batch kv_heads keys channels"]
) -> Float[Tensor, "batch kv_heads group queries keys"]:
    """a.b for every query head with its KV head, in at least float32, without repeating b."""
    batch, num_heads, num_queries, channels = a.shape
    kv_heads, num_keys = b.shape[1], b.shape[2]
    rows = a.to(b.dtype).reshape(batch, kv_heads, num_heads // kv_heads * num_queries, channels)
    product = rows @ b.transpose(-1, -2)
    product = product.to(torch.promote_types(product.dtype, torch.float32))
    return product.view(batch, kv_heads, num_heads // kv_heads, num_queries, num_keys)
