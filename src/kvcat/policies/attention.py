"""The fixed policy that keeps the slots with the most attention."""

from typing import ClassVar, Literal

import torch

from kvcat.policies._base import ExactCount, Randomness
from kvcat.types import Float, Tensor

_QUERY_CHUNK = 128


class AttentionMassPolicy(ExactCount):
    """Scores 1 for position 0 and the slots that receive the most dense attention, an exact count, and 0 for the rest.

    Equal masses go to the lower position. No gradient.

    References: KV-CAT, appendix "Method ablation" (Attn).
    """

    reads: ClassVar[Literal["hidden", "attention"]] = "attention"

    @torch.no_grad()
    def forward(
        self,
        queries: Float[Tensor, "batch heads tokens head_dim"],
        keys: Float[Tensor, "batch kv_heads tokens head_dim"],
        *,
        scale: float,
        window: int | None = None,
        generator: Randomness | None = None,  # noqa: ARG002 (the protocol's)
    ) -> Float[Tensor, "batch tokens"]:
        """Scores, 0 or 1, float32 (float64 where the queries are)."""
        return self.keep_largest(attention_mass(queries, keys, scale=scale, window=window))


def attention_mass(
    queries: Float[Tensor, "batch heads tokens head_dim"],
    keys: Float[Tensor, "batch kv_heads tokens head_dim"],
    *,
    scale: float,
    window: int | None = None,
) -> Float[Tensor, "batch tokens"]:
    """Causal attention that each slot j receives, the sum over heads and queries t of softmax_j(scale q_t.k_j).

    A sequence's masses sum to heads * tokens. With a window a query sees itself and the window - 1 tokens before. The
    weights of 128 queries are held at once.
    """
    batch, heads, num_tokens, head_dim = queries.shape
    kv_heads = keys.shape[1]
    dtype = torch.promote_types(queries.dtype, torch.float32)
    positions = torch.arange(num_tokens, device=queries.device)
    mass = torch.zeros(batch, num_tokens, dtype=dtype, device=queries.device)
    with torch.autocast(queries.device.type, enabled=False):
        k = keys.to(dtype)[:, :, None]
        for start in range(0, num_tokens, _QUERY_CHUNK):
            stop = min(start + _QUERY_CHUNK, num_tokens)
            q = queries[:, :, start:stop].to(dtype).reshape(batch, kv_heads, heads // kv_heads, stop - start, head_dim)
            distance = positions[start:stop, None] - positions[None, :stop]
            hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            scores = (q @ k[..., :stop, :].transpose(-1, -2)) * scale
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            mass[:, :stop] += weights.sum((1, 2, 3))
    return mass


def make(*, target: float, **_: object) -> AttentionMassPolicy:
    """The policy with the target as its keep ratio."""
    return AttentionMassPolicy(target)
