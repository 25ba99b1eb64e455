"""AdamW over the model and its routers, and the norms of their gradients."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from kvcat.training.config import TrainConfig


def make_optimizer(
    model: nn.Module, router_parameters: Iterable[nn.Parameter], config: TrainConfig
) -> torch.optim.AdamW:
    """AdamW in up to three groups: matrices, vectors and routers.

    Only the matrices have weight decay. The biases of all experts of a layer, which make up a
    matrix, count as vectors. ``lr_multiplier`` of a group is its learning rate over the model's.

    Args:
        router_parameters: of what chooses its slots; none for the control.
    """
    weights: list[nn.Parameter] = []
    vectors_and_biases: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_matrix = parameter.ndim >= 2 and not name.endswith("bias")
            (weights if is_matrix else vectors_and_biases).append(parameter)
    matrices = {
        "params": weights,
        "weight_decay": config.weight_decay,
        "lr_multiplier": 1.0,
    }
    vectors = {
        "params": vectors_and_biases,
        "weight_decay": 0.0,
        "lr_multiplier": 1.0,
    }
    routers = {
        "params": list(router_parameters),
        "weight_decay": 0.0,
        "lr_multiplier": config.router_lr_multiplier,
    }
    groups: list[dict[str, Any]] = [
        group for group in (matrices, vectors, routers) if group["params"]
    ]
    return torch.optim.AdamW(groups, lr=config.peak_lr, betas=config.betas, eps=1e-8, fused=True)


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Clip the gradients to a norm; returns their norm before."""
    with_gradient = [p for p in parameters if p.grad is not None]
    norm = nn.utils.clip_grad_norm_(with_gradient, max_norm)
    if hasattr(norm, "full_tensor"):  # of sharded parameters
        norm = norm.full_tensor()  # type: ignore[operator]
    return float(norm)
