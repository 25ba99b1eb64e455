"""Checks of a command's arguments before torch and transformers are imported, which takes seconds."""

import re
from importlib.resources import files
from pathlib import Path

from kvcat.errors import InputError
from kvcat.options import parse_spec
from kvcat.plugins import COMPRESSORS, plugin_names

_DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "npu", "mtia", "meta")
_METHOD_FOLDERS = ("methods", "eviction")


def check_model(name: str) -> None:
    """Refuse a model that is neither a folder, nor a file, nor on the Hub; weights are not fetched."""
    from kvcat.hub import local_folder

    local_folder(name, weights=False)


def check_tokenizer(name: str) -> None:
    """The same of a model whose tokenizer alone is needed; any folder may hold one."""
    if not Path(name).expanduser().is_dir():
        check_model(name)


def check_device(device: str) -> None:
    """Refuse what is no name of a torch device; whether the device is there is found out later."""
    kind = device.partition(":")[0]
    if kind not in _DEVICES or not re.fullmatch(r"[a-z]+(:\d+)?", device):
        raise InputError(
            f"device is {device!r}; it must be one of {', '.join(_DEVICES)}, or such as cuda:1"
        )


def check_method(spec: str) -> None:
    """Refuse a method that does not exist, or a text that is no NAME,option=value,...; options are checked later."""
    name, _ = parse_spec(spec)
    if name.startswith("kvpress:"):
        return
    names = [*_built_in_methods(), *plugin_names(COMPRESSORS)]
    if name not in names:
        raise InputError(f"no compressor {name!r}; there are {', '.join(names)}, kvpress:PRESS")


def _built_in_methods() -> list[str]:
    """Names of the methods of this package, which are those of their files."""
    names: list[str] = []
    for folder in _METHOD_FOLDERS:
        entries = (files("kvcat") / "compress" / folder).iterdir()
        file_names = sorted(entry.name for entry in entries if entry.name.endswith(".py"))
        modules = [name.removesuffix(".py") for name in file_names if not name.startswith("_")]
        names += [module.replace("_", "-") for module in modules]
    return names


def check_file(file: Path, what: str) -> None:
    """Refuse a file to read that does not exist."""
    if not file.is_file():
        raise InputError(f"no {what} {file}")
