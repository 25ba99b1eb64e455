"""Causal linear attention: in chunks, and the naive twin."""

import torch
from torch.nn import functional

from kvcat.errors import InputError
from kvcat.types import Float, Tensor


def linear_attention(
    queries: Float[Tensor, "batch tokens features"],
    keys: Float[Tensor, "batch tokens features"],
    values: Float[Tensor, "batch tokens channels"],
    *,
    chunk: int = 64,
    eps: float = 1e-6,
) -> Float[Tensor, "batch tokens channels"]:
    """Weighted mean of the values so far, q_t^T S_t / (q_t^T z_t + eps).

    S_t = sum_{j<=t} k_j v_j^T and z_t = sum_{j<=t} k_j.

    Within a chunk the products q_t.k_j are formed, across chunks only the sums S and z are carried: memory grows as
    tokens * chunk + tokens / chunk * features * channels.

    Args:
        queries: non-negative features phi(W_Q h).
        keys: non-negative features phi(W_K h).
        values: r = W_V h.
        chunk: tokens of a chunk.
        eps: added to the normaliser, positive.

    Raises:
        InputError: chunk below 1.

    References: KV-CAT, appendix "Router parameterization"; Katharopoulos et al. 2020, arXiv:2006.16236.
    """
    if chunk < 1:
        raise InputError(f"chunk must be at least 1 token, got {chunk}")
    num_tokens = queries.shape[1]
    chunk = min(chunk, max(num_tokens, 1))
    padding = -num_tokens % chunk
    q, k, v = (functional.pad(x, (0, 0, 0, padding)).unflatten(1, (-1, chunk)) for x in (queries, keys, values))
    sums = (k.transpose(-1, -2) @ v).cumsum(1)
    key_sums = k.sum(2).cumsum(1)
    earlier = functional.pad(sums[:, :-1], (0, 0, 0, 0, 1, 0))
    earlier_keys = functional.pad(key_sums[:, :-1], (0, 0, 1, 0))
    within = (q @ k.transpose(-1, -2)).tril()
    numerator = within @ v + q @ earlier
    normaliser = within.sum(-1) + (q * earlier_keys[:, :, None]).sum(-1)
    return (numerator / (normaliser + eps)[..., None]).flatten(1, 2)[:, :num_tokens]


def linear_attention_naive(
    queries: Float[Tensor, "batch tokens features"],
    keys: Float[Tensor, "batch tokens features"],
    values: Float[Tensor, "batch tokens channels"],
    *,
    eps: float = 1e-6,
) -> Float[Tensor, "batch tokens channels"]:
    """The same as ``linear_attention``, token by token as the paper writes it: the oracle of its tests."""
    S = queries.new_zeros(queries.shape[0], queries.shape[2], values.shape[2])
    z = queries.new_zeros(queries.shape[0], queries.shape[2])
    outputs = []
    for q, k, v in zip(queries.unbind(1), keys.unbind(1), values.unbind(1), strict=True):
        S = S + k[:, :, None] * v[:, None, :]
        z = z + k
        outputs.append((q[:, :, None] * S).sum(1) / ((q * z).sum(-1) + eps)[:, None])
    return torch.stack(outputs, dim=1)
