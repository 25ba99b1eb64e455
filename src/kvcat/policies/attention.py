"""The fixed policy that keeps the slots with the most attention."""

from typing import ClassVar, Literal

import torch

from kvcat.policies._base import ExactCount, Randomness
from kvcat.types import Float, Tensor

_CHUNK_ELEMENTS = 2**22


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
        return self.keep_largest(attention_mass(queries, keys, scale=scale, window=window).sum(1))


def attention_mass(
    queries: Float[Tensor, "batch heads queries head_dim"],
    keys: Float[Tensor, "batch kv_heads keys head_dim"],
    *,
    scale: float,
    window: int | None = None,
) -> Float[Tensor, "batch kv_heads keys"]:
    """Causal attention that each slot j receives, the sum over a KV head's queries t of softmax_j(scale q_t.k_j).

    The queries are those of the last keys; a sequence's masses sum to heads * queries. With a window a query sees
    itself and the window - 1 tokens before. At most about 2^22 weights are held at once.
    """
    (batch, kv_heads, num_keys, _), num_queries = keys.shape, queries.shape[2]
    dtype = torch.promote_types(queries.dtype, torch.float32)
    positions = torch.arange(num_keys, device=keys.device)
    mass = torch.zeros(batch, kv_heads, num_keys, dtype=dtype, device=keys.device)
    chunk = max(1, _CHUNK_ELEMENTS // (batch * queries.shape[1] * num_keys))
    with torch.autocast(queries.device.type, enabled=False):
        grouped, k = queries.to(dtype).unflatten(1, (kv_heads, -1)), keys.to(dtype).unsqueeze(2)
        for first in range(0, num_queries, chunk):
            stop = min(first + chunk, num_queries) + num_keys - num_queries
            own = grouped[:, :, :, first : first + chunk]
            distance = positions[stop - own.shape[3] : stop, None] - positions[:stop]
            hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            scores = (own @ k[..., :stop, :].mT) * scale
            mass[..., :stop] += scores.masked_fill(hidden, -torch.inf).softmax(-1).sum((2, 3))
    return mass


def make(*, target: float, **_: object) -> AttentionMassPolicy:
    """The policy with the target as its keep ratio."""
    return AttentionMassPolicy(target)
