"""``kvcat train``: continued pretraining from a recipe."""

import dataclasses
import inspect
import json
import os
import re
import tomllib
import typing
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcat.errors import InputError
from kvcat.recipes.training import RECIPES
from kvcat.training.config import TrainConfig


def _argument_help() -> dict[str, str]:
    """What the configuration's docstring says of each field."""
    text = inspect.cleandoc(TrainConfig.__doc__ or "").split("Args:")[1]
    entries = re.findall(r"^\s+(\w+): (.*(?:\n {8}.*)*)", text, flags=re.MULTILINE)
    return {name: " ".join(words.split()).replace("``", "") for name, words in entries}


def _option_type(annotation: Any) -> Any:
    """The type that the command line parses for a field: a comma-separated text for tuples."""
    if typing.get_origin(annotation) is tuple:
        return str
    if typing.get_origin(annotation) is typing.Literal:
        return annotation
    options = [a for a in typing.get_args(annotation) if a is not type(None)]
    return _option_type(options[0]) if options else annotation


def _signature() -> inspect.Signature:
    """The command's signature: the recipe, then one option for every field of the configuration."""
    hints, words = typing.get_type_hints(TrainConfig), _argument_help()
    recipe = inspect.Parameter(
        "recipe",
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        annotation=Annotated[str, typer.Argument(help="Name of a recipe, see above.")],
    )
    options = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                _option_type(hints[field.name]) | None,
                typer.Option(f"--{field.name.replace('_', '-')}", help=words[field.name], show_default=False),
            ],
        )
        for field in dataclasses.fields(TrainConfig)
        if hints[field.name] is not bool
    ]
    flags = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[bool | None, typer.Option(help=words[field.name], show_default=False)],
        )
        for field in dataclasses.fields(TrainConfig)
        if hints[field.name] is bool
    ]
    file = inspect.Parameter(
        "config_file",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            Path | None, typer.Option("--config", help="TOML or JSON file of fields that override the recipe's.")
        ],
    )
    dry_run = inspect.Parameter(
        "dry_run",
        inspect.Parameter.KEYWORD_ONLY,
        default=False,
        annotation=Annotated[bool, typer.Option("--dry-run", help="Print what the run would take, and stop.")],
    )
    return inspect.Signature([recipe, file, dry_run, *options, *flags])


def _parse(name: str, value: Any) -> Any:
    """A field's value from what the command line gave: numbers from comma-separated text for tuples."""
    annotation = typing.get_type_hints(TrainConfig)[name]
    tuples = [a for a in (annotation, *typing.get_args(annotation)) if typing.get_origin(a) is tuple]
    if not tuples:
        return value
    number, *rest = typing.get_args(tuples[0])
    try:
        values = tuple(number(part) for part in value.split(","))
    except ValueError:
        raise InputError(f"--{name.replace('_', '-')} takes numbers with commas between them, not {value!r}") from None
    if rest != [...] and len(values) != 2:
        raise InputError(f"--{name.replace('_', '-')} takes two numbers with a comma between them, not {value!r}")
    return values


def train_command(recipe: str, config_file: Path | None = None, dry_run: bool = False, **overrides: Any) -> None:
    """Continue a checkpoint's pretraining with KV-CAT, or with the plain next-token loss (--policy control).

    The recipe is a complete configuration; a file overrides fields of it, options override both. The run's folder holds
    the resolved configuration, metrics.jsonl, checkpoints and, at the end, export/: an ordinary Hugging Face folder.
    The same command continues a run that was stopped. Under torchrun the processes share the work.
    """
    if recipe not in RECIPES:
        raise InputError(f"no recipe {recipe!r}; recipes: {', '.join(RECIPES)}")
    given = {name: _parse(name, value) for name, value in overrides.items() if value is not None}
    config = RECIPES[recipe](**{**read_overrides(config_file), **given})
    if dry_run:
        from kvcat.training.plan import plan

        for name, told in plan(config).items():
            print(f"{name:18}{told}")
        return
    from kvcat.training import train

    result = train(config)
    if os.environ.get("RANK", "0") == "0":
        print(f"exported to {result.export}")


def read_overrides(path: Path | None) -> dict[str, Any]:
    """Fields of a configuration from a TOML or JSON file, such as a run's own ``config.json``; nothing without a file.

    Raises:
        InputError: no such file, or not readable as one.
    """
    if path is None:
        return {}
    try:
        values = (tomllib.loads if path.suffix == ".toml" else json.loads)(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} holds no fields of a configuration")
    return values


def _recipe_help() -> str:
    """The recipes, one a line, and an example; backspace keeps typer from wrapping the paragraph after it."""
    width = max(map(len, RECIPES))
    lines = [f"  {name:{width}}  {(inspect.getdoc(make) or '').splitlines()[0]}" for name, make in RECIPES.items()]
    example = "  kvcat train small --model ./my-model --data ./texts --output runs/router"
    return "\n".join(["\n\n\b", "Recipes:", *lines, "\n\b", "Example:", example])


train_command.__doc__ = inspect.cleandoc(train_command.__doc__ or "") + _recipe_help()
train_command.__signature__ = _signature()  # type: ignore[attr-defined]
train_command.__annotations__ = {name: p.annotation for name, p in train_command.__signature__.parameters.items()}  # type: ignore[attr-defined]
