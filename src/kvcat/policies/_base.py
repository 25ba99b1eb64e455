"""The base of sparsification policies, the gate made from scores, and the groups of layers."""

import math
from collections.abc import Iterable
from decimal import Decimal
from itertools import pairwise
from typing import ClassVar, Literal

import torch
from torch import nn

from kvcat.errors import InputError, check_in
from kvcat.types import Float, Tensor


class SparsificationPolicy(nn.Module):
    """A score in [0, 1] for every token: which KV slots the masked pass may see in some layers.

    A slot is visible if its score exceeds the threshold tau (``gate``). A policy is called once per
    forward pass, at the first layer of its group. Its scores serve all layers of the group.
    ``reads`` decides how it is called:

    - ``"hidden"``: ``policy(hidden, generators=None)`` with the hidden states of the masked pass
      before that layer, (batch, tokens, hidden);
    - ``"attention"``: ``policy(queries, keys, *, scale, window=None, generators=None)`` with the
      queries (batch, heads, tokens, head_dim) and keys (batch, kv_heads, tokens, head_dim) of the
      dense pass in that layer, after rotation; its scale; and its sliding window in tokens, if it
      has one. In models with attention sinks (gpt-oss) it also gets ``sinks``, the logits of the
      query heads' sinks; a policy without this argument is rejected there. Such a policy has no
      parameters.

    Both return (batch, tokens), float32 or wider. ``generators``, a list with one
    ``torch.Generator`` per sequence, is the only source of chance: a sequence's draw does not
    depend on the others in its batch. If a policy reads ``"hidden"`` and has parameters, its scores
    carry a gradient and the budget loss applies to them.
    """

    reads: ClassVar[Literal["hidden", "attention"]]


def gate(scores: Float[Tensor, "batch tokens"], tau: float = 0.5) -> Float[Tensor, "batch tokens"]:
    """The mask m_t = 1[p_t > tau], exactly 0 or 1, with dm/dp = 1 (straight through).

    Position 0 is always 1 and passes no gradient: its mask does not depend on its score.

    Args:
        scores: keep probabilities p, in [0, 1].
        tau: threshold, in (0, 1).

    References: KV-CAT, appendix "Router parameterization".
    """
    straight_through = scores - scores.detach()  # 0, with a gradient of 1
    hard = (scores.detach() > tau).to(scores.dtype) + straight_through
    return torch.cat([torch.ones_like(hard[:, :1]), hard[:, 1:]], dim=1)


class ExactCount(SparsificationPolicy):
    """A policy without parameters that keeps ``kept_count(keep_ratio, tokens)`` slots.

    Args:
        keep_ratio: in (0, 1].
    """

    def __init__(self, keep_ratio: float) -> None:
        super().__init__()
        check_in("(0, 1]", keep_ratio=keep_ratio)
        self.keep_ratio = float(keep_ratio)

    def keep_largest(self, values: Float[Tensor, "batch tokens"]) -> Float[Tensor, "batch tokens"]:
        """1 for position 0 and the largest values, 0 elsewhere; among equal values lower positions
        come first.
        """
        values = values.clone()
        values[:, 0] = torch.inf
        order = values.argsort(dim=1, descending=True, stable=True)
        num_kept = kept_count(self.keep_ratio, values.shape[1])
        return torch.zeros_like(values).scatter(1, order[:, :num_kept], 1.0)


def kept_count(keep_ratio: float, num_tokens: int) -> int:
    """Slots that an exact-count policy keeps: keep_ratio * num_tokens, halves rounded up.

    Position 0 is one of them, so it is at least 1. The decimal value as written counts: 0.29 of 50
    tokens is 14.5, hence 15.
    """
    exact = Decimal(repr(float(keep_ratio))) * num_tokens
    return max(1, math.floor(exact + Decimal("0.5")))


def check_group_starts(
    num_layers: int, group_starts: Iterable[int] | None = None, num_groups: int = 4
) -> list[int]:
    """First layers of the groups, ascending; layers before the first stay dense.

    Args:
        group_starts: the layers; None spaces groups evenly, floor(i L / G) for i < G: 0, 6, 12, 18
            of 24 layers.
        num_groups: G, in 1..num_layers.

    Raises:
        InputError: empty, unsorted, duplicated or outside the model; num_groups out of range.
    """
    if group_starts is None:
        check_in(f"[1, {num_layers}]", num_groups=num_groups)
        return [i * num_layers // num_groups for i in range(num_groups)]
    starts = list(group_starts)
    if not starts:
        raise InputError("group starts are empty: name at least one layer")
    for start in starts:
        is_number = isinstance(start, int) and not isinstance(start, bool)
        if not is_number or not 0 <= start < num_layers:
            layers = f"the model has layers 0..{num_layers - 1}"
            raise InputError(f"group start {start!r} does not exist: {layers}")
    for before, after in pairwise(starts):
        if before >= after:
            raise InputError(
                f"group starts must increase, but {after} follows {before} in {starts}"
            )
    return starts
