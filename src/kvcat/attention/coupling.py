"""The gradient of the mask: how the loss of the masked pass reaches the policy."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from kvcat.attention.reference import COUPLINGS, reachable
from kvcat.types import Bool, Float, Tensor

_CPU_ELEMENTS, _DEVICE_ELEMENTS = 2**20, 2**26  # scores held at once in the backward


@dataclass(frozen=True)
class _Rule:
    causal: bool
    scale: float
    coupling: str
    keep_self: bool


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
    keep_self: bool,
) -> Float[Tensor, "batch heads queries value_dim"]:
    """``out`` unchanged, with a gradient to ``keep``; gradients to everything else pass through ``out``.

    dL/dm_j = sum_{h,i} P_ij (dO_i . v_j - dO_i . o_i) over the pairs that m_j decides, where P and o are the dense
    attention (surrogate), or e^{s_ij} / Z_i with Z_i and o_i over the visible slots (exact: all reachable j;
    kept-only: the kept ones). The forward costs nothing; the backward makes the scores again, a few queries at a time.

    Args:
        out: attention over the visible slots.
        q, k, v, keep, log_bias, reach, causal, scale, coupling, keep_self: as in ``attend_within``.
    """
    return _KeepGradient.apply(out, keep, q, k, v, log_bias, reach, _Rule(causal, scale, coupling, keep_self))  # type: ignore[return-value]


class _KeepGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        out, keep, q, k, v, log_bias, reach, rule = inputs
        ctx.save_for_backward(keep, q, k, v, log_bias, reach)
        ctx.rule = rule
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad_out,) = grad_outputs
        keep, q, k, v, log_bias, reach = ctx.saved_tensors
        grad_keep = _keep_gradient(grad_out, keep, q, k, v, log_bias, reach, ctx.rule)
        return grad_out, grad_keep.to(keep.dtype), *[None] * 6


def _keep_gradient(
    grad_out: Float[Tensor, "batch heads queries value_dim"],
    keep: Float[Tensor, "batch keys"],
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    log_bias: Float[Tensor, "batch kv_heads keys"] | None,
    reach: Bool[Tensor, "#batch queries keys"] | None,
    rule: _Rule,
) -> Float[Tensor, "batch keys"]:
    batch, num_heads, num_queries, _ = q.shape
    num_keys = k.shape[2]
    grad_keep = torch.zeros(batch, num_keys, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    budget = _CPU_ELEMENTS if q.device.type == "cpu" else _DEVICE_ELEMENTS
    step = max(1, min(num_queries, budget // (batch * num_heads * num_keys)))
    offset = num_keys - num_queries
    for start in range(0, num_queries, step):
        stop = min(start + step, num_queries)
        # later keys are out of reach of every query of the chunk
        limit = offset + stop if rule.causal and reach is None else num_keys
        if reach is None:
            pairs = reachable(stop - start, limit, causal=rule.causal, device=q.device)[None]
        else:
            pairs = reach[:, start:stop]
        decided = pairs
        if rule.keep_self:
            own = torch.ones(stop - start, limit, dtype=torch.bool, device=q.device)
            decided = pairs & (own.triu(offset + start + 1) | own.tril(offset + start - 1))
        grad_keep[:, :limit] += _chunk_gradient(
            grad_out[:, :, start:stop], q[:, :, start:stop], k[:, :, :limit], v[:, :, :limit], keep[:, :limit] > 0,
            None if log_bias is None else log_bias[:, :, :limit], pairs, decided, rule,
        )  # fmt: skip
    return grad_keep


def _chunk_gradient(
    grad_out: Float[Tensor, "batch heads queries value_dim"],
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    kept: Bool[Tensor, "batch keys"],
    log_bias: Float[Tensor, "batch kv_heads keys"] | None,
    pairs: Bool[Tensor, "#batch queries keys"],
    decided: Bool[Tensor, "#batch queries keys"],
    rule: _Rule,
) -> Float[Tensor, "batch keys"]:
    scores = _grouped_product(q, k) * rule.scale
    value_gradient = _grouped_product(grad_out, v)
    if log_bias is not None:
        scores += log_bias[:, :, None, None, :]
    if rule.coupling == "surrogate":
        weights = scores.masked_fill_(~pairs[:, None, None], -torch.inf).softmax(-1)
        centre = (weights * value_gradient).sum(-1, keepdim=True)
    else:
        seen = pairs & (kept[:, None] | ~decided)
        blind = ~seen.any(-1, keepdim=True)
        hard = scores.masked_fill(~(seen | blind)[:, None, None], -torch.inf)
        log_mass = hard.logsumexp(-1, keepdim=True)
        centre = ((hard - log_mass).exp() * value_gradient).sum(-1, keepdim=True)
        decided = decided & ~blind & (kept[:, None] | (rule.coupling == "exact"))
        weights = (scores.masked_fill_(~decided[:, None, None], -torch.inf) - log_mass).exp()
    per_pair = value_gradient.sub_(centre).mul_(weights).sum((1, 2))
    return (per_pair * decided).sum(1)


def _grouped_product(
    a: Float[Tensor, "batch heads queries channels"], b: Float[Tensor, "batch kv_heads keys channels"]
) -> Float[Tensor, "batch kv_heads group queries keys"]:
    """a.b for every query head with its key-value head, in at least float32, without repeating b."""
    batch, num_heads, num_queries, channels = a.shape
    kv_heads, num_keys = b.shape[1], b.shape[2]
    rows = a.to(b.dtype).reshape(batch, kv_heads, num_heads // kv_heads * num_queries, channels)
    product = rows @ b.transpose(-1, -2)
    product = product.to(torch.promote_types(product.dtype, torch.float32))
    return product.view(batch, kv_heads, num_heads // kv_heads, num_queries, num_keys)


__all__ = ["COUPLINGS", "couple"]
