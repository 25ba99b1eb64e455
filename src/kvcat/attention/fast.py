"""Attention over visible slots on PyTorch's fused kernels, with a chosen gradient for the mask."""

import torch

from kvcat.attention.biased import attend_biased
from kvcat.attention.coupling import COUPLINGS, couple
from kvcat.attention.kernels import fused_attention
from kvcat.attention.reference import reachable, visible
from kvcat.types import Bool, Float, Tensor

DROPPED = -1e4  # nats: exp(DROPPED) is 0 in every dtype, and finite scores keep gradients free of NaN


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
        path: "bias" (a number per key, ``attend_biased``: no queries x keys tensor, flash kernels), "mask" (an explicit
            additive mask) or "auto": the bias wherever it applies.

    Raises:
        ValueError: no such coupling or path, or "bias" with a window or ``keep_self``, which need a mask per query.
    """
    if coupling not in COUPLINGS:
        raise ValueError(f"coupling must be one of {', '.join(COUPLINGS)}, got {coupling!r}")
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    num_queries, num_keys = q.shape[2], k.shape[2]
    reach = None
    if window is not None:
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
        causal: with ``reach`` None, whether later positions are hidden; the queries are those of the last keys.
        dropout: probability that an attention weight is dropped.
    """
    path = _choose(path, keep, reach, keep_self)
    hard_keep = None if keep is None else keep.detach() > 0
    if path == "bias":
        out = _through_bias(q, k, v, hard_keep, log_bias, causal, scale, dropout)
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
    if reach is not None:
        reach = reachable(num_tokens - prefix_len, num_tokens, window=window, device=q.device)[None]
    masked = attend_within(
        q[:, :, num_tokens:], keys, values, seen, None, reach, True, scale=scale, coupling=coupling, dropout=dropout
    )
    return torch.cat([dense, masked], dim=2)


def _choose(path: str, keep: Tensor | None, reach: Tensor | None, keep_self: bool) -> str:
    needs_mask = reach is not None or (keep_self and keep is not None)
    if path == "auto":
        return "mask" if needs_mask else "bias"
    if path not in ("bias", "mask"):
        raise ValueError(f"path must be auto, bias or mask, got {path!r}")
    if path == "bias" and needs_mask:
        raise ValueError("path 'bias' cannot serve windows or keep_self")
    return path


def _through_bias(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Bool[Tensor, "batch keys"] | None,
    log_bias: Float[Tensor, "batch kv_heads keys"] | None,
    causal: bool,
    scale: float,
    dropout: float,
) -> Tensor:
    if keep is None:
        return attend_biased(q, k, v, log_bias, causal=causal, scale=scale, dropout=dropout)
    lowest = max(DROPPED, 0.5 * scale * torch.finfo(k.dtype).min)
    bias = torch.where(keep[:, None], q.new_zeros(k.shape[:3]) if log_bias is None else log_bias, lowest)
    out = attend_biased(q, k, v, bias, causal=causal, scale=scale, dropout=dropout)
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
