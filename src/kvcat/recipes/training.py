"""Training recipes: functions that return a complete configuration, any field of it overridden by keyword."""

from collections.abc import Callable
from typing import Any

from kvcat.errors import InputError
from kvcat.training.config import TrainConfig


def _recipe(name: str, defaults: dict[str, Any], overrides: dict[str, Any]) -> TrainConfig:
    values = {**defaults, **overrides}
    if "model" not in values:
        raise InputError(f"recipe {name} needs a model: a folder or a Hub name")
    kind = "frozen-teacher" if values.get("teacher") == "frozen" else values.get("policy", "router")
    values.setdefault("output", f"runs/{name}-{kind}")
    return TrainConfig.from_dict(values)


def small(**overrides: Any) -> TrainConfig:
    """For a small model on a CPU: 300 steps of 4,096 tokens."""
    defaults = {
        "seq_len": 512,
        "batch_size": 8,
        "max_steps": 300,
        "warmup_steps": 20,
        "peak_lr": 1e-3,
        "min_lr": 5e-5,
        "router_lr_multiplier": 10.0,
        "validation_every": 50,
        "checkpoint_every": 50,
    }
    return _recipe("small", defaults, overrides)


def _paper(name: str, model: str, group_starts: tuple[int, ...], overrides: dict[str, Any]) -> TrainConfig:
    defaults = {
        "model": model,
        "data": "hub:HuggingFaceFW/fineweb-edu",
        "group_starts": group_starts,
        "seq_len": 1024,
        "batch_size": 128,
        "micro_batch_size": 8,
        "max_steps": 40_000,
        "warmup_steps": 600,
        "peak_lr": 1e-4,
        "min_lr": 5e-6,
        "dtype": "bfloat16",
        "device": "cuda",
        "log_every": 10,
        "validation_every": 500,
        "validation_sequences": 128,
        "checkpoint_every": 500,
    }
    return _recipe(name, defaults, overrides)


def qwen2_5_0_5b(**overrides: Any) -> TrainConfig:
    """The paper's Qwen2.5-0.5B run on FineWeb-Edu, routers at layers 0, 6, 12, 18."""
    return _paper("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B", (0, 6, 12, 18), overrides)


def qwen2_5_1_5b(**overrides: Any) -> TrainConfig:
    """The paper's Qwen2.5-1.5B run on FineWeb-Edu, routers at layers 0, 7, 14, 21."""
    return _paper("qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B", (0, 7, 14, 21), overrides)


def _variant(make: Callable[..., TrainConfig], told: str, **fields: Any) -> Callable[..., TrainConfig]:
    """A recipe that differs from another in these fields."""

    def variant(**overrides: Any) -> TrainConfig:
        return make(**{**fields, **overrides})

    variant.__doc__ = told
    return variant


_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "control": ("the control: the same tokens, plain next-token loss", {"policy": "control"}),
    "random": ("its ablation Rand: half of the slots, drawn at random", {"policy": "random"}),
    "attention": ("its ablation Attn: the half with the most attention mass", {"policy": "attention"}),
    "frozen-teacher": ("the footnote's variant: the frozen base teaches both passes", {"teacher": "frozen"}),
}
_MAKERS = {"small": small, "qwen2.5-0.5b": qwen2_5_0_5b, "qwen2.5-1.5b": qwen2_5_1_5b}

RECIPES: dict[str, Callable[..., TrainConfig]] = dict(_MAKERS)
RECIPES |= {
    f"{name}-{variant}": _variant(make, f"{name} as {told}.", **fields)
    for name, make in _MAKERS.items()
    for variant, (told, fields) in _VARIANTS.items()
}
