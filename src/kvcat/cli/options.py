"""Options that several commands share."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvcat.errors import InputError

MODEL_HELP = "Folder or Hub name of a decoder-only causal LM."
METHODS = ("attention-matching", "gradient", "first", "random", "streaming", "keynorm", "snapkv", "h2o", "tova")
METHOD_HELP = f"{', '.join(METHODS)}, or kvpress:PRESS; with options as NAME,option=value,..."
SUFFIX_KINDS = ("model", "true", "other", "random")
FUNCTION_NAMES = ("random", "parity", "last", "majority", "mean")

DeviceOption = Annotated[str, typer.Option(help="Torch device: cpu, cuda, cuda:1, mps.")]
DtypeOption = Annotated[str, typer.Option(help="Type of the weights and of the forward pass: float32 or bfloat16.")]
SeedOption = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of everything random.")]


def spread_values(argv: list[str]) -> list[str]:
    """``--keep 0.05 0.1`` as ``--keep 0.05 --keep 0.1``, and likewise every list of ``kvcat eval`` and ``theory``.

    Further values are taken as long as they look like the option's (a number, the name of a method), so that a folder
    after them is still a folder.
    """
    lists = _LISTS.get(argv[0] if argv else "", {})
    spread: list[str] = []
    option, has_value = "", True
    for argument in argv:
        if not has_value:
            has_value = True
        elif argument in lists:
            option, has_value = argument, False
        elif option and lists[option](argument):
            spread.append(option)
        else:
            option = ""
        spread.append(argument)
    return spread


def labelled_models(models: Sequence[str]) -> dict[str, str]:
    """Label to folder or Hub name, from FOLDER, Hub name or LABEL=FOLDER.

    Raises:
        InputError: an empty label, or one that two models share.
    """
    labelled: dict[str, str] = {}
    for item in models:
        label, separator, folder = ("", "", item) if Path(item).is_dir() else item.partition("=")
        if separator and not label:
            raise InputError(f"{item!r} names no label before the equals sign")
        label, folder = (label, folder) if separator else (Path(item).name or item, item)
        if label in labelled:
            raise InputError(f"two models have the same label; give them as LABEL=FOLDER: {', '.join(models)}")
        labelled[label] = folder
    return labelled


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


def _names_method(spec: str) -> bool:
    return _is_method(spec.partition(",")[0])


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


_LISTS: dict[str, dict[str, Callable[[str], bool]]] = {
    "eval": {"--keep": _is_number, "--method": _names_method},
    "theory": {
        **dict.fromkeys(("--slots", "--keep", "--epsilon", "--scaling"), _is_number),
        **dict.fromkeys(("--kinds", "--fit-kinds"), SUFFIX_KINDS.__contains__),
        "--method": _names_method,
        "--function": FUNCTION_NAMES.__contains__,
    },
}
