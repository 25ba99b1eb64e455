"""Checks of a command's arguments before the slow imports of torch and transformers."""

import ast
import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from kvcat.errors import InputError
from kvcat.options import parse_spec
from kvcat.plugins import COMPRESSORS, EVALUATIONS, plugin_names, plugin_packages

_DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "npu", "mtia", "meta")
_METHOD_FOLDERS = ("methods", "eviction")


def check_model(name: str) -> None:
    """Reject a model that is neither a folder, nor a file, nor on the Hub.

    Weights are not fetched.
    """
    from kvcat.hub import local_folder

    local_folder(name, weights=False)


def check_tokenizer(name: str) -> None:
    """Reject a model as ``check_model``, but accept any folder, which may hold a tokenizer."""
    if not Path(name).expanduser().is_dir():
        check_model(name)


def check_device(device: str) -> None:
    """Reject a text that does not name a torch device; whether the device exists shows later."""
    kind = device.partition(":")[0]
    if kind not in _DEVICES or not re.fullmatch(r"[a-z]+(:\d+)?", device):
        raise InputError(
            f"device is {device!r}; it must be one of {', '.join(_DEVICES)}, or such as cuda:1"
        )


def check_method(spec: str) -> None:
    """Reject a method that does not exist, or a text other than NAME,option=value,...

    The options are checked later.
    """
    name, _ = parse_spec(spec)
    if name.startswith("kvpress:"):
        return
    names = [*_built_in_methods(), *plugin_names(COMPRESSORS)]
    if name not in names:
        raise InputError(f"no compressor {name!r}; there are {', '.join(names)}, kvpress:PRESS")


def _built_in_methods() -> list[str]:
    """Names of the methods of this package, from the names of their files."""
    names: list[str] = []
    for folder in _METHOD_FOLDERS:
        modules = _modules(files("kvcat") / "compress" / folder)
        names += [module.replace("_", "-") for module in modules]
    return names


def evaluation_lines() -> dict[str, str]:
    """One line on every evaluation, by name: the first one of its file's docstring.

    Of an evaluation of another package it names the package.
    """
    lines = {}
    for name, source in _modules(files("kvcat") / "evals" / "evaluations").items():
        docstring = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
        lines[name] = docstring.partition("\n")[0]
    for name in plugin_names(EVALUATIONS):
        packages = ", ".join(plugin_packages(EVALUATIONS, name))
        lines.setdefault(name, f"An evaluation of the package {packages}.")
    return lines


def _modules(folder: Traversable) -> dict[str, Traversable]:
    """The Python files of a folder that are no ``__init__``, by module name, sorted."""
    modules = {}
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".py") and not entry.name.startswith("_"):
            modules[entry.name.removesuffix(".py")] = entry
    return modules


def check_file(file: Path, what: str) -> None:
    """Reject a file to read that does not exist."""
    if not file.is_file():
        raise InputError(f"no {what} {file}")
