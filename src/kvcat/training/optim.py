"""Optimizer and schedule."""

import math

import torch

from kvcat.training.config import TrainConfig
from kvcat.training.objective import Objective


def learning_rate(step: int, config: TrainConfig) -> float:
    """The model's learning rate at a step: linear warm-up to the peak, then half a cosine down to the floor.

    Args:
        step: number of the step, from 0; the first step already moves.
        config: gives warm-up, peak, floor and number of steps.
    """
    if step < config.warmup_steps:
        return config.peak_lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.max_steps - 1 - config.warmup_steps)
    return config.min_lr + (config.peak_lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def make_optimizer(objective: Objective, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over the model (matrices with weight decay, vectors without) and the routers (own rate, no decay)."""
    parameters = [p for p in objective.model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay, "lr_multiplier": 1.0},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0, "lr_multiplier": 1.0},
        {
            "params": objective.policy_parameters(),
            "weight_decay": 0.0,
            "lr_multiplier": config.router_lr_multiplier,
        },
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=config.peak_lr, betas=config.betas, eps=1e-8, fused=True
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every parameter group its multiple of the model's learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_multiplier"]
