"""Training recipes: complete configurations whose fields can be overridden by keyword.

``pretrain`` trains the base model of the package, and ``demo`` runs the demo.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvcat.errors import InputError
from kvcat.options import parse_spec
from kvcat.training.config import TrainConfig

__all__ = ["BASE_RECIPES", "RECIPES", "VARIANTS", "Recipe", "qwen2_5_0_5b", "qwen2_5_1_5b", "small"]


@dataclass(frozen=True)
class Recipe:
    """A named configuration; a call with overrides returns the ``TrainConfig``."""

    name: str
    about: str  # one line about the recipe
    values: dict[str, Any]  # the fields that differ from the defaults
    fixed: tuple[str, ...] = ()  # those of them that make it the variant that it is

    def __call__(self, **overrides: Any) -> TrainConfig:
        """The configuration with these fields.

        The default output folder is ``runs/NAME-POLICY``.

        Raises:
            InputError: there is no model, a field is unknown, a value is out of range, or a field
                makes it another variant than its name says.
        """
        for name in self.fixed:
            expected = self.values[name]
            wanted = overrides.get(name, expected)
            if wanted != expected:
                raise InputError(
                    f"this variant of {self.name} has {name} {expected!r}, not {wanted!r}: name "
                    "another recipe"
                )
        values = {**self.values, **overrides}
        if not values.get("model"):
            raise InputError(f"recipe {self.name} needs a model: a folder or a Hub name")
        if not values.get("output"):
            values["output"] = self.default_output(values)
        return TrainConfig.from_dict(values)

    def default_output(self, values: dict[str, Any]) -> str:
        """The default output folder of a run with these fields: ``runs/NAME-POLICY``."""
        policy, _ = parse_spec(values.get("policy", "router"), "policy")
        kind = "frozen-teacher" if values.get("teacher") == "frozen" else policy
        return f"runs/{self.name}-{kind}"


_SMALL = {"seq_len": 512, "peak_lr": 1e-3, "min_lr": 5e-5}
_PAPER = {
    "data": "hub:HuggingFaceFW/fineweb-edu",
    "batch_size": 128,
    "micro_batch_size": 8,
    "max_steps": 40_000,
    "warmup_steps": 600,
    "dtype": "bfloat16",
    "device": "cuda",
    "log_every": 10,
    "validation_every": 500,
    "validation_sequences": 128,
    "checkpoint_every": 500,
}
small = Recipe("small", "For a small model on a CPU: 300 steps of 4,096 tokens.", _SMALL)
qwen2_5_0_5b = Recipe(
    "qwen2.5-0.5b",
    "The paper's run of Qwen2.5-0.5B: 5.2 billion tokens of FineWeb-Edu.",
    {**_PAPER, "model": "Qwen/Qwen2.5-0.5B", "group_starts": (0, 6, 12, 18)},
)
qwen2_5_1_5b = Recipe(
    "qwen2.5-1.5b",
    "The paper's run of Qwen2.5-1.5B: 5.2 billion tokens of FineWeb-Edu.",
    {**_PAPER, "model": "Qwen/Qwen2.5-1.5B", "group_starts": (0, 7, 14, 21)},
)


class Variant(NamedTuple):
    """A variant that every recipe has: its description, and the fields that differ."""

    about: str
    values: dict[str, Any]


BASE_RECIPES = (small, qwen2_5_0_5b, qwen2_5_1_5b)
VARIANTS = {
    "control": Variant("The plain next-token loss: the control.", {"policy": "control"}),
    "random": Variant(
        "Random masks that keep half of the slots (the paper's Rand).", {"policy": "random"}
    ),
    "attention": Variant(
        "Masks that keep the half with the most attention mass (Attn).", {"policy": "attention"}
    ),
    "frozen-teacher": Variant(
        "The frozen base teaches both passes (the paper's footnote).", {"teacher": "frozen"}
    ),
}
"""Variants by the end of their recipe's name: ``small-control``."""


def _recipes() -> dict[str, Recipe]:
    """All recipes and their variants, by name."""
    recipes = {recipe.name: recipe for recipe in BASE_RECIPES}
    variants: dict[str, Recipe] = {}
    for name, recipe in recipes.items():
        for suffix, variant in VARIANTS.items():
            variants[f"{name}-{suffix}"] = dataclasses.replace(
                recipe,
                about=f"{name}: {variant.about}",
                values={**recipe.values, **variant.values},
                fixed=tuple(variant.values),
            )
    return {**recipes, **variants}


RECIPES = _recipes()
