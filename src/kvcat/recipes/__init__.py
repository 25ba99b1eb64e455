"""Complete named configurations; the embedded base is in ``base``, the demo in ``demo``."""

from kvcat.recipes.training import RECIPES, qwen2_5_0_5b, qwen2_5_1_5b, small

__all__ = ["RECIPES", "qwen2_5_0_5b", "qwen2_5_1_5b", "small"]
