"""``kvcat demo``: the whole story on the model and the text that come with the package."""

from pathlib import Path
from typing import Annotated

import typer

from kvcat.cli.options import SeedOption
from kvcat.errors import InputError


def demo_command(
    quick: Annotated[
        bool, typer.Option("--quick", help="At most two minutes; shows the path, too short to judge.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="The long recipe: six times the tokens and more windows; an hour.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder; default out/demo, out/demo-quick or out/demo-full.")] = None,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Pretrain the base again first; hours on two cores.")
    ] = False,
    seed: SeedOption = 0,
    device: Annotated[str, typer.Option(help="Torch device: cpu, cuda, mps.")] = "cpu",
) -> None:
    """Train KV-CAT and its control from the small base, compress held-out text on all three, write report.html.

    No download, no GPU. The text is the Python sources of this installation. Stopped at any moment, the same command
    continues.
    """
    if quick and full:
        raise InputError("--quick and --full exclude each other")
    from kvcat.recipes.demo import FULL, QUICK, STANDARD, run_demo

    plan = QUICK if quick else FULL if full else STANDARD
    name = "demo-quick" if quick else "demo-full" if full else "demo"
    run_demo(plan, out or Path("out") / name, seed=seed, device=device, from_scratch=from_scratch)
