"""``kvcat export``: a checkpoint of a run as an ordinary Hugging Face folder."""

from pathlib import Path
from typing import Annotated

import typer

from kvcat.errors import InputError


def export_command(
    run: Annotated[Path, typer.Argument(help="Folder of a run, finished or not.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write.")],
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint; the newest whole one by default.")] = None,
) -> None:
    """Write a checkpoint of a run, which may still be going on, as a folder that plain transformers loads."""
    from kvcat.training.checkpoint import checkpoint_folder, folders, verify
    from kvcat.training.export import export_checkpoint

    there = folders(run)
    if not there:
        raise InputError(f"{run} holds no checkpoint")
    if step is not None:
        if (wanted := checkpoint_folder(run, step)) not in there:
            steps = ", ".join(str(int(folder.name.removeprefix("step-"))) for folder in there)
            raise InputError(f"{run} holds no checkpoint of step {step}; it has {steps}")
        there = [wanted]
    for folder in reversed(there):
        try:
            verify(folder)
        except InputError:
            if folder == there[0]:
                raise
            continue
        print(f"exported {folder.name} to {export_checkpoint(folder, output)}")
        return
