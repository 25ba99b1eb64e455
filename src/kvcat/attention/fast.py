"""Attention over visible slots on PyTorch's fused kernels, with a chosen gradient for the mask."""

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from kvcat.attention.coupling import COUPLINGS, couple
from kvcat.attention.reference import reachable, visible
from kvcat.types import Bool, Float, Tensor

EXTRA_CHANNELS = 8
DROPPED = -1e4  # nats: exp(DROPPED) is 0 in every dtype, and finite scores keep gradients free of NaN
_FLASH_HEAD_DIM = 256


def attend(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    keep: Float[Tensor, "batch keys"] | Bool[Tensor, "batch keys"] | None = None,
    log_bias: Float[Tensor, "batch kv_heads keys"] | None = None,
    causal: bool = True,
    *,
    scale: float | None = None,
    window: int | None = None,
    coupling: str = "surrogate",
    keep_self: bool = False,
    path: str = "auto",
) -> Float[Tensor, "batch heads queries value_dim"]:
    """``attend_reference`` on fused kernels; gradients to q, k, v are exact for the hard mask.

    ``keep`` gets the gradient of ``attend_coupled_reference`` where it requires one.

    Args:
        q, k, v, keep, log_bias, causal, scale, window, keep_self: as in ``attend_reference``.
        coupling: gradient of the mask, one of ``COUPLINGS``.
        path: "channels" (the bias rides in extra head channels: no queries x keys tensor, flash kernels), "mask" (an
            explicit additive mask) or "auto" (the faster one that applies).

    Raises:
        ValueError: no such coupling or path, or "channels" with a window, ``keep_self`` or causal queries fewer than
            keys, which need a mask per query.
    """
    if coupling not in COUPLINGS:
        raise ValueError(f"coupling must be one of {', '.join(COUPLINGS)}, got {coupling!r}")
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    num_queries, num_keys = q.shape[2], k.shape[2]
    reach = None
    if window is not None or (causal and 1 < num_queries < num_keys):
        reach = reachable(num_queries, num_keys, causal=causal, window=window, device=q.device)[None]
    return attend_within(
        q, k, v, keep, log_bias, reach, causal and num_queries > 1,
        scale=factor, coupling=coupling, keep_self=keep_self, path=path,
    )  # fmt: skip


def attend_within(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    keep: Float[Tensor, "batch keys"] | Bool[Tensor, "batch keys"] | None,
    log_bias: Float[Tensor, "batch kv_heads keys"] | None,
    reach: Bool[Tensor, "#batch queries keys"] | None,
    causal: bool,
    *,
    scale: float,
    coupling: str = "surrogate",
    keep_self: bool = False,
    path: str = "auto",
    dropout: float = 0.0,
) -> Float[Tensor, "batch heads queries value_dim"]:
    """``attend`` with what queries may look at given as a matrix.

    Args:
        q, k, v, keep, log_bias, scale, coupling, keep_self, path: as in ``attend``.
        reach: True where a query may look at a key; None leaves it to ``causal``.
        causal: with ``reach`` None, whether later positions are hidden (queries and keys are then equally many).
        dropout: probability that an attention weight is dropped.
    """
    path = _choose(path, q, log_bias, keep, reach, keep_self)
    hard_keep = None if keep is None else keep.detach() > 0
    if path == "channels":
        out = _through_channels(q, k, v, hard_keep, log_bias, causal, scale, dropout)
    else:
        out = _through_mask(q, k, v, hard_keep, log_bias, reach, causal, scale, keep_self, dropout)
    if keep is None or coupling == "none" or not keep.requires_grad:
        return out
    return couple(
        out, q, k, v, keep, log_bias, reach, causal=causal, scale=scale, coupling=coupling, keep_self=keep_self
    )


def attend_twice(
    q: Float[Tensor, "batch heads twice head_dim"],
    k: Float[Tensor, "batch kv_heads twice head_dim"],
    v: Float[Tensor, "batch kv_heads twice value_dim"],
    keep: Float[Tensor, "batch prefix"],
    prefix_len: int,
    *,
    scale: float,
    window: int | None = None,
    coupling: str = "surrogate",
    dropout: float = 0.0,
) -> Float[Tensor, "batch heads twice value_dim"]:
    """Attention of sequences and, behind each, of its suffix once more, which sees only the kept slots of the prefix.

    Of the T + S positions the first T are a sequence that attends densely, the last S its tokens prefix_len..T-1 again:
    these see the sequence's own slots before prefix_len where ``keep`` is 1, and the slots of their kind up to
    themselves. Everything before the split is thus computed once for both.

    Args:
        q, k, v: of all T + S positions, after rotation; S = T - prefix_len.
        keep: 1 for kept slots of the prefix, 0 for dropped ones; gradient as in ``attend``.
        prefix_len: tokens before the split, in 1..T-1.
        scale, window, coupling: as in ``attend``.
        dropout: probability that an attention weight is dropped.
    """
    num_tokens = (q.shape[2] + prefix_len) // 2
    reach = None
    if window is not None and window < num_tokens:
        reach = reachable(num_tokens, num_tokens, window=window, device=q.device)[None]
    dense = attend_within(
        q[:, :, :num_tokens], k[:, :, :num_tokens], v[:, :, :num_tokens], None, None, reach, True,
        scale=scale, dropout=dropout,
    )  # fmt: skip
    keys, values = (torch.cat([x[:, :, :prefix_len], x[:, :, num_tokens:]], dim=2) for x in (k, v))
    seen = torch.cat([keep, keep.new_ones(len(keep), num_tokens - prefix_len)], dim=1)
    reach = reachable(num_tokens - prefix_len, num_tokens, window=window, device=q.device)[None]
    masked = attend_within(
        q[:, :, num_tokens:], keys, values, seen, None, reach, True, scale=scale, coupling=coupling, dropout=dropout
    )
    return torch.cat([dense, masked], dim=2)


def _choose(
    path: str,
    q: Tensor,
    log_bias: Tensor | None,
    keep: Tensor | None,
    reach: Tensor | None,
    keep_self: bool,
) -> str:
    needs_mask = reach is not None or (keep_self and keep is not None)
    if path == "auto":
        # measured on CPU (benchmarks/attention.py): in short, narrow heads eight more channels cost more than a mask
        narrow = q.device.type == "cpu" and q.shape[-1] <= 32 and q.shape[2] <= 512
        return "mask" if needs_mask or (narrow and log_bias is None) else "channels"
    if path not in ("channels", "mask"):
        raise ValueError(f"path must be auto, channels or mask, got {path!r}")
    if path == "channels" and needs_mask:
        raise ValueError("path 'channels' cannot serve windows, keep_self or causal queries fewer than keys")
    return path


def _through_channels(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Bool[Tensor, "batch keys"] | None,
    log_bias: Float[Tensor, "batch kv_heads keys"] | None,
    causal: bool,
    scale: float,
    dropout: float,
) -> Tensor:
    if keep is None and log_bias is None:
        return fused_attention(q, k, v, None, causal=causal, scale=scale, dropout=dropout)
    bias = q.new_zeros(k.shape[:3]) if log_bias is None else log_bias
    if keep is not None:
        lowest = max(DROPPED, 0.5 * scale * torch.finfo(k.dtype).min)
        bias = torch.where(keep[:, None], bias, lowest)
    out = attend_extended(q, extend_keys(k, bias, scale), v, None, causal=causal, scale=scale, dropout=dropout)
    if keep is None:
        return out
    num_queries = q.shape[2]
    seen = keep.cumsum(-1) > 0 if causal else keep.any(-1, keepdim=True)
    blind = ~seen[:, None, -num_queries:, None]
    own = v[:, :, -num_queries:].repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return torch.where(blind, own, out)


def _through_mask(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Bool[Tensor, "batch keys"] | None,
    log_bias: Float[Tensor, "batch kv_heads keys"] | None,
    reach: Bool[Tensor, "#batch queries keys"] | None,
    causal: bool,
    scale: float,
    keep_self: bool,
    dropout: float,
) -> Tensor:
    if reach is None:
        reach = reachable(q.shape[2], k.shape[2], causal=causal, device=q.device)[None]
    seen = (reach if keep is None else visible(keep, reach, keep_self=keep_self))[:, None]
    if log_bias is None:
        mask = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(~seen, -torch.inf)
    else:
        bias = log_bias.to(q.dtype).repeat_interleave(q.shape[1] // k.shape[1], dim=1)[:, :, None]
        mask = torch.where(seen, bias, -torch.inf)
    return fused_attention(q, k, v, mask, causal=False, scale=scale, dropout=dropout)


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
    """Attention over keys that carry a log-bias in their extra channels: the query is padded with ones.

    Ones in every extra channel add up whatever the keys hold there, so a bias may be split over several channels.

    Args:
        q: queries, narrower than the keys.
        k: keys with extra channels (``extend_keys``).
        v: values.
        mask: boolean or additive mask, broadcast to (batch, heads, queries, keys); None leaves it to ``causal``.
        causal: whether later positions are hidden.
        scale: factor on q.k that the bias was divided by.
        dropout: probability that an attention weight is dropped.
    """
    wide = torch.cat([q, q.new_ones(*q.shape[:-1], k.shape[-1] - q.shape[-1])], dim=-1)
    padded = pad(v, (0, k.shape[-1] - v.shape[-1]))
    out = fused_attention(wide, k, padded, mask, causal=causal, scale=scale, dropout=dropout)
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
