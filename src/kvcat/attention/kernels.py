"""PyTorch's fused attention kernels with a bias per key, without a tensor of queries x keys."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import pad, scaled_dot_product_attention

from kvcat.types import Float, Tensor

EXTRA_CHANNELS = 8
_FLASH_HEAD_DIM = 256
_KERNEL_DEVICE = "cpu"  # whose kernel takes a bias per key


def fused_attention(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    mask: Tensor | None,
    *,
    causal: bool,
    scale: float,
) -> Float[Tensor, "batch heads queries value_dim"]:
    """PyTorch's scaled dot-product attention; KV heads are repeated only where its kernels need it.

    ``mask`` is boolean or additive, broadcast to (batch, heads, queries, keys); None leaves it to ``causal``.
    """
    num_groups = q.shape[1] // k.shape[1]
    shared = num_groups > 1 and (
        q.device.type == "cpu" or (mask is None and k.shape[-1] == v.shape[-1] <= _FLASH_HEAD_DIM)
    )
    if num_groups > 1 and not shared:
        k, v = k.repeat_interleave(num_groups, dim=1), v.repeat_interleave(num_groups, dim=1)
    return scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=shared
    )


def extend_keys(
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    log_bias: Float[Tensor, "batch kv_heads keys"],
    scale: float,
) -> Float[Tensor, "batch kv_heads keys extended_dim"]:
    """Keys with the log-bias in extra channels: [k, high, low, 0...], high + low = log_bias / scale.

    Two channels, because one bfloat16 number holds a bias of 3 nats only to about 0.01 nats.
    """
    exact = (log_bias / scale)[..., None]
    high = exact.to(k.dtype)
    low = (exact - high.detach().to(exact.dtype)).detach().to(k.dtype)
    return torch.cat([k, high, pad(low, (0, EXTRA_CHANNELS - 2))], dim=-1)


def attend_extended(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    log_bias: Float[Tensor, "batch kv_heads keys"],
    mask: Tensor | None,
    *,
    causal: bool,
    scale: float,
) -> Float[Tensor, "batch heads queries value_dim"]:
    """``fused_attention`` with a log-bias, which the keys carry in extra channels."""
    keys = extend_keys(k, log_bias, scale)
    padded = _widened(v, max(keys.shape[-1], v.shape[-1]))
    out = fused_attention(_extend_queries(q), keys, padded, mask, causal=causal, scale=scale)
    return out[..., : v.shape[-1]]


def attend_biased(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    log_bias: Float[Tensor, "batch kv_heads slots"] | None = None,
    *,
    scale: float,
) -> Float[Tensor, "batch heads queries value_dim"]:
    """``attend_reference`` where every query, of the last keys, sees all but later ones; with all gradients.

    ``log_bias`` is finite and of the first keys.

    On a CPU the kernel adds the bias to whole columns of scores. Causal queries that are fewer than the keys take one
    call over the keys before theirs and a causal one over their own, merged by their normalisers: o = sum_p e^{l_p - l}
    o_p with l = log sum_p e^{l_p}, l_p the log of part p's attention mass. The backward of each part, given the merged
    o and l, is its share of the whole gradient. Elsewhere the bias takes extra channels.
    """
    # one query sees all keys; in a compiled graph the comparison would be symbolic, which the kernels refuse
    causal = torch.compiler.is_compiling() or q.shape[2] > 1
    first = k.shape[2] - q.shape[2] if causal else 0
    if log_bias is None and first == 0:
        return fused_attention(q, k, v, None, causal=causal, scale=scale)
    if log_bias is not None:
        wide = torch.promote_types(q.dtype, torch.float32)  # a bfloat16 bias would lose 0.01 nats
        log_bias = pad(log_bias.to(wide), (0, k.shape[2] - log_bias.shape[-1]))
    if q.device.type == _KERNEL_DEVICE:
        if torch.is_autocast_enabled(
            "cpu"
        ):  # it knows the public function, not the kernel behind it
            q, k, v = (x.to(torch.get_autocast_dtype("cpu")) for x in (q, k, v))
        return _CpuKernel.apply(q, k, v, log_bias, causal, scale)  # type: ignore[return-value]
    mask = None
    if first:
        mask, causal = causal_lower_right(q.shape[2], k.shape[2]), False
    if log_bias is None:
        return fused_attention(q, k, v, mask, causal=causal, scale=scale)
    return attend_extended(q, k, v, log_bias, mask, causal=causal, scale=scale)


class _CpuKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        q, k, v, bias, causal, scale = inputs
        wide_q, wide_k, wide_v = _of_one_width(q, k, v)
        outs, masses = [], []
        for part, is_causal in _parts(q, k, causal):
            out, mass = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                wide_q, wide_k[:, :, part], wide_v[:, :, part],
                is_causal=is_causal, attn_mask=_by_head(bias, part, q), scale=scale,
            )  # fmt: skip
            outs.append(out[..., : v.shape[-1]])
            masses.append(mass)
        out, mass = outs[0], masses[0]
        if len(outs) > 1:
            mass = torch.logaddexp(*masses)
            shares = [
                x * (own - mass).exp().unsqueeze(-1) for x, own in zip(outs, masses, strict=True)
            ]
            out = (shares[0] + shares[1]).to(v.dtype)
        ctx.save_for_backward(q, k, v, bias, out, mass)
        ctx.causal, ctx.scale = causal, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, bias, out, mass = ctx.saved_tensors
        learned = ctx.needs_input_grad[3]
        wide_q, wide_k, fixed = q, k, bias
        if learned:  # the kernel has no gradient for a bias, but one for the channels of keys
            wide_q, wide_k, fixed = _extend_queries(q), extend_keys(k, bias, ctx.scale), None
        wide_q, wide_k, wide_v = _of_one_width(wide_q, wide_k, v)
        grad, out = (_widened(x, wide_v.shape[-1]) for x in (grad_outputs[0], out))
        found = []
        for part, is_causal in _parts(q, k, ctx.causal):
            found.append(
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    grad, wide_q, wide_k[:, :, part], wide_v[:, :, part], out, mass, 0.0, is_causal,
                    attn_mask=_by_head(fixed, part, q), scale=ctx.scale,
                )
            )  # fmt: skip
        (grad_q, *more), *grads = zip(*found, strict=True)
        grad_q = grad_q + more[0] if more else grad_q
        grad_k, grad_v = (x[0] if len(x) == 1 else torch.cat(x, dim=2) for x in grads)
        dim = q.shape[-1]
        grad_bias = grad_k[..., dim] / ctx.scale if learned else None
        return (
            grad_q[..., :dim],
            grad_k[..., :dim],
            grad_v[..., : v.shape[-1]],
            grad_bias,
            None,
            None,
        )


def _parts(q: Tensor, k: Tensor, causal: bool) -> Iterator[tuple[slice, bool]]:
    """Ranges of keys, and whether the queries see each of them causally."""
    first = k.shape[2] - q.shape[2] if causal else 0
    if first:
        yield slice(0, first), False
    yield slice(first, None), causal


def _by_head(bias: Tensor | None, part: slice, q: Tensor) -> Tensor | None:
    """A part's bias for every query head, to be broadcast over the queries."""
    if bias is None:
        return None
    return bias[:, :, part].repeat_interleave(q.shape[1] // bias.shape[1], dim=1).unsqueeze(2)


def _extend_queries(q: Tensor) -> Tensor:
    """[q, 1...]: ones in every extra channel add up whatever the keys hold there."""
    return torch.cat([q, q.new_ones(*q.shape[:-1], EXTRA_CHANNELS)], dim=-1)


def _of_one_width(*states: Tensor) -> list[Tensor]:
    """With zeros in further channels: the CPU kernels need queries, keys and values of one width."""
    width = max(x.shape[-1] for x in states)
    return [_widened(x, width) for x in states]


def _widened(states: Tensor, width: int) -> Tensor:
    missing = width - states.shape[-1]
    return pad(states, (0, missing)) if missing else states
