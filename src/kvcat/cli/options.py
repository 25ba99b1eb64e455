"""Options that several commands share."""

from typing import Annotated

import typer

from kvcat.errors import InputError

MODEL_HELP = "Folder or Hub name of a decoder-only causal LM."
METHODS = ("attention-matching", "gradient", "first", "random", "streaming", "keynorm", "snapkv", "h2o", "tova")
METHOD_HELP = f"{', '.join(METHODS)}, or kvpress:PRESS; with options as NAME,option=value,..."

DeviceOption = Annotated[str, typer.Option(help="Torch device: cpu, cuda, cuda:1, mps.")]
DtypeOption = Annotated[str, typer.Option(help="Type of the weights and of the forward pass: float32 or bfloat16.")]
SeedOption = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of everything random.")]


def spread_values(argv: list[str]) -> list[str]:
    """``--keep 0.05 0.1`` as ``--keep 0.05 --keep 0.1``, and likewise ``--method a b``, for ``kvcat eval``.

    Further values are taken as long as they look like the option's (a number, the name of a method), so that a folder
    after them is still a folder.
    """
    if argv[:1] != ["eval"]:
        return argv
    spread: list[str] = []
    option, has_value = "", True
    for argument in argv:
        if not has_value:
            has_value = True
        elif argument in ("--keep", "--method"):
            option, has_value = argument, False
        elif option and _fits(option, argument):
            spread.append(option)
        else:
            option = ""
        spread.append(argument)
    return spread


def check_keep(keep: float) -> float:
    """The keep ratio itself.

    Raises:
        InputError: outside (0, 1].
    """
    if not 0 < keep <= 1:
        raise InputError(f"--keep is {keep:g}; it is the fraction of slots kept and must lie in (0, 1]")
    return keep


def check_method(spec: str) -> str:
    """The name in a method and its options, ``NAME,option=value,...``.

    Raises:
        InputError: no such method.
    """
    name = spec.partition(",")[0]
    if not _is_method(name):
        raise InputError(f"no method {name!r}; methods: {', '.join(METHODS)}, kvpress:PRESS")
    return name


def _is_method(name: str) -> bool:
    return name in METHODS or name.startswith("kvpress:")


def _fits(option: str, argument: str) -> bool:
    if option == "--method":
        return _is_method(argument.partition(",")[0])
    try:
        float(argument)
    except ValueError:
        return False
    return True
