"""``kvcat train`` of some weights alone: those whose names hold one of some words.

    python runs/smollm2/train_only.py k_proj,v_proj small --model smollm2-135m --output out/kv ...

After the words come the arguments of ``kvcat train``. The other weights stay as they are, in the
dense pass too; routers are trained. An output folder continues only with the same words, which are
in a file next to it.
"""

import argparse
from pathlib import Path
from typing import Any

import kvcat
from kvcat.cli.train import parse_config
from kvcat.errors import InputError, run_script
from kvcat.files import read_json, write_json
from kvcat.training import run


def train_only(words: list[str]) -> None:
    """Let runs of this process train the weights whose names hold one of the words, no others."""
    load = run.load

    def loaded(*arguments: Any, **options: Any) -> Any:
        model, tokenizer = load(*arguments, **options)
        trained = 0
        for name, weight in model.named_parameters():
            weight.requires_grad_(any(word in name for word in words))
            trained += weight.numel() * weight.requires_grad
        if not trained:
            raise InputError(f"no weight of the model has {' or '.join(words)} in its name")
        return model, tokenizer

    run.load = loaded


def check_form(folder: Path, form: str) -> None:
    """Reject an output folder that was begun with another form; else write it next to the folder.

    Args:
        folder: of the run.
        form: what it does other than ``kvcat train``.
    """
    file = folder.with_name(f"{folder.name}.form.json")
    known = read_json(file)["form"] if file.exists() else "plain"
    if known != form and folder.exists():
        raise InputError(f"{folder} holds another run, of the form {known}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, {"form": form})


def main() -> None:
    """Train and print the folder of the export."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", help="with commas between them")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="those of kvcat train")
    options = parser.parse_args()
    config, dry_run = parse_config(options.arguments)
    if dry_run:
        raise InputError("--dry-run is an option of kvcat train alone")
    check_form(Path(config.output), f"only {options.words}")
    train_only([word for word in options.words.split(",") if word])
    print(kvcat.train(config).export)


if __name__ == "__main__":
    run_script(main)
