"""The gradient of the mask: how the loss of the masked pass reaches the policy."""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from kvcat.attention.reference import reachable
from kvcat.types import Bool, Float, Tensor

# scores held at once in the backward: on a CPU they stay in its cache, and short causal chunks skip more keys
_CPU_ELEMENTS, _DEVICE_ELEMENTS = 2**17, 2**26
_LEAST_QUERIES = 16


class KeepGradient(torch.autograd.Function):
    """``out`` unchanged, with a gradient to ``keep``; gradients to the rest pass through ``out``.

    dL/dm_j = sum_{h,i} P_ij (dO_i . v_j - dO_i . o_i) over the reachable pairs, where P and o are the dense attention.
    At the visible slots alone (the derivative of the masked pass itself) a dropped slot's weight would be unbounded.
    The forward costs nothing. The backward makes the scores again, a few queries at a time.
    ``apply`` takes out, keep, q, k, v, reach, scale, as in ``attend``.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        """``out`` itself."""
        out, *tensors, ctx.scale = inputs
        ctx.save_for_backward(*tensors)
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The gradient of ``out`` as it arrives, and that of ``keep``."""
        (grad_out,) = grad_outputs
        keep, q, k, v, reach = ctx.saved_tensors
        batch, num_heads, num_queries, _ = q.shape
        kv_heads, num_keys = k.shape[1:3]
        wide = torch.promote_types(q.dtype, torch.float32)
        grad_keep = keep.new_zeros(keep.shape, dtype=wide)
        budget = _CPU_ELEMENTS if q.device.type == "cpu" else _DEVICE_ELEMENTS
        step = min(num_queries, max(_LEAST_QUERIES, budget // (batch * num_heads * num_keys)))
        rows_q, rows_grad = _by_query(q.to(k.dtype), kv_heads), _by_query(grad_out.to(v.dtype), kv_heads)
        later = ~reachable(step, step, device=q.device)[None]
        for start in range(0, num_queries, step):
            own = slice(start, min(start + step, num_queries))
            if reach is not None:
                limit, hidden = num_keys, ~reach[:, own]
            else:  # only the last keys of a chunk are later than some of its queries
                limit = num_keys - num_queries + own.stop
                hidden = later[:, : own.stop - start, : own.stop - start]
            grad_keep[:, :limit] += _chunk_gradient(
                rows_grad[:, :, own], rows_q[:, :, own], k[:, :, :limit], v[:, :, :limit], hidden,
                scale=ctx.scale,
            )  # fmt: skip
        return grad_out, grad_keep.to(keep.dtype), *[None] * 5


def _chunk_gradient(
    grad_out: Float[Tensor, "batch kv_heads queries group value_dim"],
    q: Float[Tensor, "batch kv_heads queries group head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    hidden: Bool[Tensor, "#batch queries last_keys"],
    *,
    scale: float,
) -> Float[Tensor, "batch keys"]:
    """sum_i P_ij dO_i.v_j - sum_i P_ij c_i with c_i = dO_i.o_i; ``hidden`` is about the last keys."""
    scores = _product(q, k).mul_(scale)
    by_query = scores.view(*q.shape[:4], -1)[..., -hidden.shape[-1] :]
    by_query.masked_fill_(hidden[:, None, :, None], -torch.inf)
    weights = scores.softmax(-1)
    products = _product(grad_out, v).mul_(weights)
    centre = products.sum(-1, keepdim=True).transpose(-1, -2)
    return (torch.ones_like(centre) @ products - centre @ weights).sum((1, 2))


def _by_query(
    x: Float[Tensor, "batch heads queries channels"], kv_heads: int
) -> Float[Tensor, "batch kv_heads queries group channels"]:
    """Query heads of one KV head next to each other, so that a chunk of queries is one matrix."""
    return x.unflatten(1, (kv_heads, -1)).transpose(2, 3).contiguous()


def _product(
    rows: Float[Tensor, "batch kv_heads queries group channels"], keys: Float[Tensor, "batch kv_heads keys channels"]
) -> Float[Tensor, "batch kv_heads rows keys"]:
    """Dot products, handed on in at least float32."""
    product = rows.flatten(2, 3) @ keys.transpose(-1, -2)
    return product.to(torch.promote_types(product.dtype, torch.float32))
