"""Sparsification policies: which KV slots the masked pass of training sees. One file each, one row in ``POLICIES``."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from kvcat.errors import InputError
from kvcat.policies.attention_mass import AttentionMassPolicy, attention_mass, attention_mass_naive
from kvcat.policies.base import (
    Randomness,
    SparsificationPolicy,
    check_group_starts,
    default_group_starts,
    gate,
    gate_share,
    kept_count,
)
from kvcat.policies.linear_attention import linear_attention, linear_attention_naive
from kvcat.policies.random import RandomPolicy
from kvcat.policies.router import Router

__all__ = [
    "POLICIES",
    "AttentionMassPolicy",
    "PolicyOptions",
    "RandomPolicy",
    "Randomness",
    "Router",
    "SparsificationPolicy",
    "attention_mass",
    "attention_mass_naive",
    "build_policies",
    "check_group_starts",
    "default_group_starts",
    "gate",
    "gate_share",
    "kept_count",
    "linear_attention",
    "linear_attention_naive",
]


@dataclass(frozen=True)
class PolicyOptions:
    """What a factory of ``POLICIES`` may use; each policy takes what it needs.

    Args:
        hidden_size: width of the model's hidden states.
        target: keep ratio rho aimed at, in (0, 1); the exact count of the fixed policies.
        feature_dim: width of the router's linear attention.
        noise: standard deviation of the noise on the router's W_P.
        generator: source of initial weights, shared by all groups, so that each starts differently.
    """

    hidden_size: int
    target: float
    feature_dim: int
    noise: float
    generator: torch.Generator


class PolicyFactory(Protocol):
    """Makes the policy of one group of layers."""

    def __call__(self, options: PolicyOptions, /) -> SparsificationPolicy:
        """A new policy."""
        ...


POLICIES: dict[str, PolicyFactory] = {
    "router": lambda o: Router(o.hidden_size, o.feature_dim, noise=o.noise, generator=o.generator),
    "random": lambda o: RandomPolicy(o.target),
    "attention": lambda o: AttentionMassPolicy(o.target),
}


def build_policies(
    name: str,
    *,
    num_layers: int,
    hidden_size: int,
    group_starts: Iterable[int] | None = None,
    num_groups: int = 4,
    target: float = 0.5,
    feature_dim: int = 64,
    noise: float = 0.0,
    seed: int = 0,
) -> dict[int, SparsificationPolicy]:
    """One policy per group of layers, by the group's first layer.

    Args:
        name: a key of ``POLICIES``.
        num_layers: layers of the model.
        hidden_size: width of its hidden states.
        group_starts: first layers of the groups; None spaces ``num_groups`` evenly.
        num_groups: number of groups when ``group_starts`` is None.
        target: keep ratio rho aimed at, in (0, 1).
        feature_dim: width of the router's linear attention.
        noise: standard deviation of the noise on the router's W_P.
        seed: of the initial weights.

    Raises:
        InputError: an unknown name, a target outside (0, 1), group starts that the model does not have.
    """
    if name not in POLICIES:
        raise InputError(f"unknown policy {name!r}: choose from {', '.join(POLICIES)}")
    if not 0 < target < 1:
        raise InputError(f"target keep ratio must lie in (0, 1), got {target}")
    starts = (
        default_group_starts(num_layers, num_groups)
        if group_starts is None
        else check_group_starts(group_starts, num_layers)
    )
    options = PolicyOptions(hidden_size, target, feature_dim, noise, torch.Generator().manual_seed(seed))
    return {start: POLICIES[name](options) for start in starts}
