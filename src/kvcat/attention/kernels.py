"""PyTorch's fused attention kernels with a bias per key, without a tensor of queries x keys."""

# pyright: reportIncompatibleMethodOverride=false

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import pad, scaled_dot_product_attention

from kvcat.types import Float, Tensor

EXTRA_CHANNELS = 8
_FLASH_HEAD_DIM = 256


def fused_attention(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    mask: Tensor | None,
    *,
    causal: bool,
    scale: float,
) -> Float[Tensor, "batch heads queries value_dim"]:
    """PyTorch's scaled dot-product attention; KV heads are repeated only if its kernels need it.

    ``mask`` is boolean or additive, broadcast to (batch, heads, queries, keys). If it is None,
    ``causal`` decides.
    """
    group = q.shape[1] // k.shape[1]
    value_dim = v.shape[-1]
    if q.device.type != "cpu":  # the fastest kernels need one width for keys and values
        v = _widened(v, max(k.shape[-1], value_dim))
    shares_heads = group > 1 and (
        q.device.type == "cpu" or (mask is None and k.shape[-1] == v.shape[-1] <= _FLASH_HEAD_DIM)
    )
    if group > 1 and not shares_heads:
        k = k.repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=shares_heads
    )
    return out[..., :value_dim]


def extend_keys(
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    log_bias: Float[Tensor, "batch kv_heads keys"],
    scale: float,
) -> Float[Tensor, "batch kv_heads keys extended_dim"]:
    """Keys with the log-bias in extra channels: [k, high, low, 0...].

    high + low = log_bias / scale.

    Two channels, because one bfloat16 number represents a bias of 3 nats only to about 0.01 nats.
    """
    exact = (log_bias / scale).unsqueeze(-1)
    high = exact.to(k.dtype)
    # what rounding high lost; without a gradient, which high carries alone
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
    value_dim = v.shape[-1]
    keys = extend_keys(k, log_bias, scale)
    values = _widened(v, max(keys.shape[-1], value_dim))
    out = fused_attention(_extend_queries(q), keys, values, mask, causal=causal, scale=scale)
    return out[..., :value_dim]


def attend_biased(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    log_bias: Float[Tensor, "batch kv_heads slots"] | None = None,
    *,
    scale: float,
    cpu_kernel: bool = True,
) -> Float[Tensor, "batch heads queries value_dim"]:
    """``attend_reference`` with all gradients, where every query sees all keys but later ones.

    The queries are those of the last keys. ``log_bias`` is finite and belongs to the first keys.

    On a CPU the kernel adds the bias to whole columns of scores. If the queries are fewer than the
    keys, one call attends to the keys before the queries, and a causal one to the keys at the
    queries' positions. Their normalisers merge the two: o = sum_p e^{l_p - l} o_p with l = log
    sum_p e^{l_p}, where l_p is the log of the attention mass of range p of the keys. The backward
    of each range, with the merged o and l, gives its share of the whole gradient. Elsewhere, and
    where ``cpu_kernel`` is False, extra channels carry the bias.
    """
    # one query sees all keys; in a compiled graph the comparison would be symbolic, which the
    # kernels reject
    causal = torch.compiler.is_compiling() or q.shape[2] > 1
    num_before = k.shape[2] - q.shape[2] if causal else 0
    if log_bias is None and num_before == 0:
        return fused_attention(q, k, v, None, causal=causal, scale=scale)
    if log_bias is not None:
        wide = torch.promote_types(q.dtype, torch.float32)  # a bfloat16 bias would lose 0.01 nats
        log_bias = pad(log_bias.to(wide), (0, k.shape[2] - log_bias.shape[-1]))
    if cpu_kernel and q.device.type == "cpu":
        if torch.is_autocast_enabled("cpu"):  # which knows the public function, not its kernel
            dtype = torch.get_autocast_dtype("cpu")
            q = q.to(dtype)
            k = k.to(dtype)
            v = v.to(dtype)
        return _CpuKernel.apply(q, k, v, log_bias, causal, scale)  # type: ignore[return-value]
    mask = None
    if num_before:
        mask = causal_lower_right(q.shape[2], k.shape[2])
        causal = False
    if log_bias is None:
        return fused_attention(q, k, v, mask, causal=causal, scale=scale)
    return attend_extended(q, k, v, log_bias, mask, causal=causal, scale=scale)


def with_sinks(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    sinks: Float[Tensor, " heads"],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values whose first key has the score ``sinks`` and a value of 0.

    Extra channels hold the score of each query head: [q, high, low, 0...] . [0, 1, 1, 0...] = high
    + low = sinks / scale. The other keys have zeros there. As in ``extend_keys``, two channels keep
    the precision.

    Args:
        q, k, v: after rotation.
        sinks: finite, nats.
        scale: factor on q.k.
    """
    exact = sinks.to(torch.promote_types(q.dtype, torch.float32)) / scale
    high = exact.to(q.dtype)
    low = (exact - high.detach().to(exact.dtype)).detach().to(q.dtype)
    channels = pad(torch.stack([high, low], dim=-1), (0, EXTRA_CHANNELS - 2))  # (heads, extra)
    channels = channels[None, :, None].expand(*q.shape[:3], -1)
    sink_key = k.new_zeros(*k.shape[:2], 1, k.shape[3] + EXTRA_CHANNELS)
    # the sink differs per query head, and heads of a group share keys: so the queries hold it
    sink_key[..., k.shape[3] : k.shape[3] + 2] = 1.0
    keys = torch.cat([sink_key, pad(k, (0, EXTRA_CHANNELS))], dim=2)
    return torch.cat([q, channels], dim=-1), keys, pad(v, (0, 0, 1, 0))


class _KeyRange(NamedTuple):
    """A range of keys, and whether the queries see each of them causally."""

    keys: slice
    causal: bool


class _CpuKernel(torch.autograd.Function):
    """``attend_biased`` on a CPU, by two operators that PyTorch does not document.

    ``apply`` takes q, k, v, the bias of all keys or None, causal and scale.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        q, k, v, bias, causal, scale = inputs
        outs, log_masses = _over_ranges(q, k, v, bias, causal=causal, scale=scale)
        out = outs[0]
        log_mass = log_masses[0]
        if len(outs) > 1:
            # out = (e^l0 out0 + e^l1 out1) / (e^l0 + e^l1), with the larger exponent taken out
            log_mass = torch.logaddexp(*log_masses)
            before = outs[0] * (log_masses[0] - log_mass).exp().unsqueeze(-1)
            causal_out = outs[1] * (log_masses[1] - log_mass).exp().unsqueeze(-1)
            out = (before + causal_out).to(v.dtype)
        ctx.save_for_backward(q, k, v, bias, out, log_mass)
        ctx.causal = causal
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        q, k, v, bias, out, log_mass = ctx.saved_tensors
        head_dim = q.shape[-1]
        value_dim = v.shape[-1]
        bias_learns = ctx.needs_input_grad[3]
        kernel_q = q
        kernel_k = k
        kernel_bias = bias
        if bias_learns:  # the kernel has no gradient for a bias, but one for the channels of keys
            kernel_q = _extend_queries(q)
            kernel_k = extend_keys(k, bias, ctx.scale)
            kernel_bias = None
        wide_q, wide_k, wide_v = _of_one_width(kernel_q, kernel_k, v)
        wide_grad = _widened(grad_outputs[0], wide_v.shape[-1])
        wide_out = _widened(out, wide_v.shape[-1])
        grads_q = []
        grads_k = []
        grads_v = []
        for keys, is_causal in _key_ranges(q, k, ctx.causal):
            grad_q, grad_k, grad_v = (
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    wide_grad,
                    wide_q,
                    wide_k[:, :, keys],
                    wide_v[:, :, keys],
                    wide_out,
                    log_mass,
                    0.0,  # dropout
                    is_causal,
                    attn_mask=_by_query_head(kernel_bias, keys, q),
                    scale=ctx.scale,
                )
            )
            grads_q.append(grad_q)
            grads_k.append(grad_k)
            grads_v.append(grad_v)
        grad_q = grads_q[0] if len(grads_q) == 1 else grads_q[0] + grads_q[1]
        grad_k = grads_k[0] if len(grads_k) == 1 else torch.cat(grads_k, dim=2)
        grad_v = grads_v[0] if len(grads_v) == 1 else torch.cat(grads_v, dim=2)
        # the first extra channel of a key is log_bias / scale, so that its gradient is scaled alike
        grad_bias = grad_k[..., head_dim] / ctx.scale if bias_learns else None
        grads = [grad_q[..., :head_dim], grad_k[..., :head_dim], grad_v[..., :value_dim], grad_bias]
        no_gradient = [None, None]  # causal, scale
        return *grads, *no_gradient


def log_mass_on_cpu(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    *,
    causal: bool,
    scale: float,
) -> Float[Tensor, "batch heads queries"]:
    """The log of sum_j exp(scale q.k_j), nats, over all keys, or up to that of each query.

    Causal queries are those of the last keys.
    """
    _, log_masses = _over_ranges(q, k, k, None, causal=causal, scale=scale)
    return log_masses[0] if len(log_masses) == 1 else torch.logaddexp(*log_masses)


def _over_ranges(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, causal: bool, scale: float
) -> tuple[list[Tensor], list[Tensor]]:
    """The attention over each of ``_key_ranges``, and its log mass, (batch, heads, queries)."""
    wide_q, wide_k, wide_v = _of_one_width(q, k, v)
    outs = []
    log_masses = []
    for keys, is_causal in _key_ranges(q, k, causal):
        wide_out, log_mass = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            wide_q,
            wide_k[:, :, keys],
            wide_v[:, :, keys],
            is_causal=is_causal,
            attn_mask=_by_query_head(bias, keys, q),
            scale=scale,
        )
        outs.append(wide_out[..., : v.shape[-1]])
        log_masses.append(log_mass)
    return outs, log_masses


def _key_ranges(q: Tensor, k: Tensor, causal: bool) -> list[_KeyRange]:
    """The keys before those of causal queries, if there are any, and the others."""
    num_before = k.shape[2] - q.shape[2] if causal else 0
    ranges = [_KeyRange(slice(num_before, None), causal)]
    if num_before:
        ranges.insert(0, _KeyRange(slice(0, num_before), False))
    return ranges


def _by_query_head(bias: Tensor | None, keys: slice, q: Tensor) -> Tensor | None:
    """The bias of some keys for every query head, to be broadcast over the queries."""
    if bias is None:
        return None
    group = q.shape[1] // bias.shape[1]
    return bias[:, :, keys].repeat_interleave(group, dim=1).unsqueeze(2)


def _extend_queries(q: Tensor) -> Tensor:
    """[q, 1...]: ones in every extra channel add up whatever the keys have there."""
    return torch.cat([q, q.new_ones(*q.shape[:-1], EXTRA_CHANNELS)], dim=-1)


def _of_one_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three tensors with zeros in added channels, because the CPU kernels need one width for
    all.
    """
    width = max(q.shape[-1], k.shape[-1], v.shape[-1])
    return _widened(q, width), _widened(k, width), _widened(v, width)


def _widened(states: Tensor, width: int) -> Tensor:
    missing = width - states.shape[-1]
    return pad(states, (0, missing)) if missing else states
