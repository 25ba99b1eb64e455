"""The gradient of the mask: how the loss of the masked pass reaches the policy."""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from kvcat.attention.reference import reachable
from kvcat.types import Bool, Float, Tensor

_CPU_ELEMENTS, _DEVICE_ELEMENTS = 2**20, 2**26  # scores held at once in the backward


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
        step = max(1, min(num_queries, budget // (batch * num_heads * num_keys)))
        for start in range(0, num_queries, step):
            stop = min(start + step, num_queries)
            # later keys are out of reach of every query of the chunk
            limit = num_keys - num_queries + stop if ctx.causal and reach is None else num_keys
            if reach is None:
                pairs = reachable(stop - start, limit, causal=ctx.causal, device=q.device)[None]
            else:
                pairs = reach[:, start:stop]
            grad_keep[:, :limit] += _chunk_gradient(
                grad_out[:, :, start:stop], q[:, :, start:stop], k[:, :, :limit], v[:, :, :limit],
                keep[:, :limit] > 0, None if log_bias is None else log_bias[:, :, :limit], pairs,
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
    pairs: Bool[Tensor, "#batch queries keys"],
    *,
    scale: float,
    coupling: str,
) -> Float[Tensor, "batch keys"]:
    scores = _grouped_product(q, k) * scale
    value_gradient = _grouped_product(grad_out, v)
    if log_bias is not None:
        scores += log_bias[:, :, None, None, :]
    if coupling == "surrogate":
        weights = scores.masked_fill_(~pairs[:, None, None], -torch.inf).softmax(-1)
        centre = (weights * value_gradient).sum(-1, keepdim=True)
    else:
        seen = pairs & kept[:, None]
        blind = ~seen.any(-1, keepdim=True)
        hard = scores.masked_fill(~(seen | blind)[:, None, None], -torch.inf)
        log_mass = hard.logsumexp(-1, keepdim=True)
        centre = ((hard - log_mass).exp() * value_gradient).sum(-1, keepdim=True)
        pairs = pairs & ~blind
        weights = (scores.masked_fill_(~pairs[:, None, None], -torch.inf) - log_mass).exp()
    per_pair = value_gradient.sub_(centre).mul_(weights).sum((1, 2))
    return (per_pair * pairs).sum(1)


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
