"""Sparsification policies: which KV slots the masked pass of training sees.

A policy is a file of this folder with a function ``make``; the file's name is the policy's. Other
packages add such functions by entry points of the group ``kvcat.policies``.
"""

import importlib
import inspect
import pkgutil
import typing
from collections.abc import Callable, Iterable
from typing import Any

import torch

from kvcat import plugins
from kvcat.errors import InputError, unknown_name
from kvcat.options import check_typed_options, parse_spec
from kvcat.policies._base import SparsificationPolicy as SparsificationPolicy
from kvcat.policies._base import check_group_starts as check_group_starts
from kvcat.policies._base import gate as gate
from kvcat.policies._base import kept_count as kept_count
from kvcat.policies.attention import AttentionMassPolicy as AttentionMassPolicy
from kvcat.policies.random import RandomPolicy as RandomPolicy
from kvcat.policies.router import Router as Router
from kvcat.policies.router import linear_attention as linear_attention

POLICIES = {
    module.name: importlib.import_module(f"{__name__}.{module.name}").make
    for module in pkgutil.iter_modules(__path__)
    if not module.name.startswith("_")
}
"""The functions of this package that make the policy of one group of layers, by policy."""

_SHARED_ARGUMENTS = ("hidden_size", "target", "feature_dim", "noise", "generator")


def build_policies(
    spec: str,
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
        spec: NAME or NAME,option=value,... (``parse_policy``).
        group_starts, num_groups: as in ``check_group_starts``.
        target: keep ratio rho to aim at, in (0, 1).
        feature_dim: width of the router's linear attention.
        noise: standard deviation of the noise on the router's W_P.
        seed: seed of the initial weights; one generator draws those of all groups, so that each
            starts differently.

    Raises:
        InputError: an unknown name or option, a value out of range, group starts that the model
            does not have.
    """
    name, options = parse_policy(spec)
    make = _make_function(name)
    starts = check_group_starts(num_layers, group_starts, num_groups)
    shared: dict[str, Any] = {
        "hidden_size": hidden_size,
        "target": target,
        "feature_dim": feature_dim,
        "noise": noise,
        "generator": torch.Generator().manual_seed(seed),
    }
    return {start: make(**shared, **options) for start in starts}


def policy_names() -> list[str]:
    """The names of all policies, those of other packages included."""
    return [*POLICIES, *plugins.plugin_names(plugins.POLICIES)]


def parse_policy(spec: str) -> tuple[str, dict[str, Any]]:
    """Name and options of ``NAME,option=value,...``, checked against the policy's ``make``.

    The options of a policy are the keyword arguments of its ``make`` that ``build_policies`` does
    not fill in itself.

    Raises:
        InputError: an unknown name, an unknown option, or a value of another type.
    """
    name, options = parse_spec(spec, "policy")
    check_typed_options(_option_types(_make_function(name)), options, f"policy {name}")
    return name, options


def _make_function(name: str) -> Callable[..., SparsificationPolicy]:
    """The function that makes the policy of a name."""
    if name in POLICIES:
        plugins.check_new_names(plugins.POLICIES, {name})
        return POLICIES[name]
    plugins.check_new_names(plugins.POLICIES, set(POLICIES))
    if name not in policy_names():
        raise unknown_name("policy", name, policy_names())
    make: Any = plugins.load_plugin(plugins.POLICIES, name)
    if not callable(make):
        raise InputError(f"plug-in {name!r} is not a function that makes a policy: {make!r}")
    return typing.cast(Callable[..., SparsificationPolicy], make)


def _option_types(make: Callable[..., SparsificationPolicy]) -> dict[str, Any]:
    hints = typing.get_type_hints(make)
    parameters = inspect.signature(make).parameters.values()
    named = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    return {name: hints[name] for name in named if name not in _SHARED_ARGUMENTS}
