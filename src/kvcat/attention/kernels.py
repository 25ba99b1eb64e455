"""PyTorch's fused attention, and keys that carry a bias through it."""

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from kvcat.types import Float, Tensor

EXTRA_CHANNELS = 8
_FLASH_HEAD_DIM = 256


def extend_keys(
    k: Float[Tensor, "batch kv_heads keys head_dim"], log_bias: Float[Tensor, "batch kv_heads keys"], scale: float
) -> Float[Tensor, "batch kv_heads keys extended_dim"]:
    """Keys with the log-bias in extra channels: [k, high, low, 0...], high + low = log_bias / scale.

    Two channels, because one bfloat16 number holds a bias of 3 nats only to about 0.01 nats.

    Args:
        k: keys, after rotation.
        log_bias: nats added to the scores of each slot.
        scale: factor on q.k, larger than 0.
    """
    exact = (log_bias / scale)[..., None]
    high = exact.to(k.dtype)
    low = (exact - high.detach().to(exact.dtype)).detach().to(k.dtype)
    return torch.cat([k, high, pad(low, (0, EXTRA_CHANNELS - 2))], dim=-1)


def extend_queries(
    q: Float[Tensor, "batch heads queries head_dim"],
) -> Float[Tensor, "batch heads queries extended_dim"]:
    """Queries for extended keys: [q, 1...]. Ones in every channel add up whatever the keys hold there.

    Args:
        q: queries, after rotation.
    """
    return torch.cat([q, q.new_ones(*q.shape[:-1], EXTRA_CHANNELS)], dim=-1)


def attend_extended(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys extended_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    mask: Tensor | None,
    *,
    causal: bool,
    scale: float,
    dropout: float = 0.0,
) -> Float[Tensor, "batch heads queries value_dim"]:
    """Attention over keys that carry a log-bias in their extra channels.

    Args:
        q: queries, as wide as the keys were before.
        k: keys with extra channels (``extend_keys``).
        v: values.
        mask: boolean or additive mask, broadcast to (batch, heads, queries, keys); None leaves it to ``causal``.
        causal: whether later positions are hidden.
        scale: factor on q.k that the bias was divided by.
        dropout: probability that an attention weight is dropped.
    """
    padded = pad(v, (0, max(0, k.shape[-1] - v.shape[-1])))
    out = fused_attention(extend_queries(q), k, padded, mask, causal=causal, scale=scale, dropout=dropout)
    return out[..., : v.shape[-1]]


def fused_attention(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    mask: Tensor | None,
    *,
    causal: bool,
    scale: float,
    dropout: float = 0.0,
) -> Float[Tensor, "batch heads queries value_dim"]:
    """PyTorch's scaled dot-product attention; key-value heads are repeated only where its kernels need it.

    Args:
        q, k, v: queries, keys, values; heads is a multiple of kv_heads.
        mask: boolean or additive mask, broadcast to (batch, heads, queries, keys); None leaves it to ``causal``.
        causal: whether later positions are hidden.
        scale: factor on q.k.
        dropout: probability that an attention weight is dropped.
    """
    num_groups = q.shape[1] // k.shape[1]
    shared = num_groups > 1 and (
        q.device.type == "cpu" or (mask is None and k.shape[-1] == v.shape[-1] <= _FLASH_HEAD_DIM)
    )
    if num_groups > 1 and not shared:
        k, v = k.repeat_interleave(num_groups, dim=1), v.repeat_interleave(num_groups, dim=1)
    return scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=shared
    )
