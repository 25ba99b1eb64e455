"""Complete named configurations: the paper's runs, small ones, and the demo."""

import importlib
from typing import TYPE_CHECKING, Any

from kvcat.recipes.training import RECIPES, qwen2_5_0_5b, qwen2_5_1_5b, small

if TYPE_CHECKING:
    from kvcat.recipes.demo import DemoPlan, run_demo

__all__ = ["RECIPES", "DemoPlan", "qwen2_5_0_5b", "qwen2_5_1_5b", "run_demo", "small"]


def __getattr__(name: str) -> Any:
    if name in ("DemoPlan", "run_demo"):
        return getattr(importlib.import_module("kvcat.recipes.demo"), name)
    raise AttributeError(f"module 'kvcat.recipes' has no attribute {name!r}")
