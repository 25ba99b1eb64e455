"""The learning rate over the steps of a run."""

import math

from kvcat.training.config import TrainConfig


def learning_rate(step: int, config: TrainConfig) -> float:
    """The model's learning rate in a step, counted from 0.

    Linear warm-up to ``peak_lr``, then half a cosine down to ``min_lr`` in the last step. The
    routers' rate is ``router_lr_multiplier`` times as large.
    """
    warmup = config.warmup_steps
    if step < warmup:
        return config.peak_lr * (step + 1) / warmup
    num_later = config.max_steps - 1 - warmup
    # the only step after the warm-up is the last one
    progress = min(1.0, (step - warmup) / num_later) if num_later > 0 else 1.0
    height = 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_lr + (config.peak_lr - config.min_lr) * height


def schedule_notes(config: TrainConfig) -> list[str]:
    """Lines for people about a schedule that is not what its numbers suggest."""
    if config.warmup_steps < config.max_steps:
        return []
    return [
        f"the learning rate never reaches its peak of {config.peak_lr:g}: the warm-up has "
        f"{config.warmup_steps} steps, the run {config.max_steps}"
    ]
