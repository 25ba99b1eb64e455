"""Options that several commands share."""

from typing import Annotated

import typer

MODEL_HELP = "Folder or Hub name of a decoder-only causal LM."
METHODS = ("attention-matching", "gradient", "first", "random", "keynorm", "snapkv", "h2o")

DeviceOption = Annotated[str, typer.Option(help="Torch device: cpu, cuda, cuda:1, mps.")]
DtypeOption = Annotated[str, typer.Option(help="Type of the weights and of the forward pass: float32 or bfloat16.")]
SeedOption = Annotated[int, typer.Option(help="Seed of everything random.")]


def spread_values(argv: list[str]) -> list[str]:
    """``--keep 0.05 0.1`` as ``--keep 0.05 --keep 0.1``, and likewise ``--method a b``.

    Values are taken as long as they look like the option's (a number, the name of a method), so that a folder after
    them is still a folder.
    """
    spread: list[str] = []
    option = None
    for argument in argv:
        if argument in ("--keep", "--method"):
            option = argument
            continue
        if option and _fits(option, argument):
            spread += [option, argument]
            continue
        if option and (not spread or spread[-2:-1] != [option]):
            spread += [option]
        option = None
        spread.append(argument)
    return [*spread, option] if option and (len(spread) < 2 or spread[-2] != option) else spread


def _fits(option: str, argument: str) -> bool:
    if option == "--method":
        return argument in METHODS
    try:
        float(argument)
    except ValueError:
        return False
    return True
