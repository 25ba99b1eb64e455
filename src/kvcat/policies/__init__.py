"""Sparsification policies: which KV slots the masked pass of training sees. A policy is a file with a ``make``."""

import importlib
import pkgutil
from collections.abc import Iterable

import torch

from kvcat.errors import InputError
from kvcat.policies._base import (
    PolicyOptions,
    Randomness,
    SparsificationPolicy,
    check_group_starts,
    default_group_starts,
    gate,
    kept_count,
)
from kvcat.policies.attention import AttentionMassPolicy, attention_mass
from kvcat.policies.random import RandomPolicy
from kvcat.policies.router import Router, linear_attention

__all__ = [
    "POLICIES", "AttentionMassPolicy", "PolicyOptions", "RandomPolicy", "Randomness", "Router", "SparsificationPolicy",
    "attention_mass", "build_policies", "check_group_starts", "default_group_starts", "gate", "kept_count",
    "linear_attention",
]  # fmt: skip

POLICIES = {
    module.name: importlib.import_module(f"{__name__}.{module.name}").make
    for module in pkgutil.iter_modules(__path__)
    if not module.name.startswith("_")
}
"""What makes the policy of one group of layers from its ``PolicyOptions``, by the name of the policy's file."""


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
