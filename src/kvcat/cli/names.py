"""The names of methods and evaluations, from their file names, without imports."""

import ast
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from kvcat.plugins import COMPRESSORS, EVALUATIONS, plugin_names, plugin_packages

_METHOD_FOLDERS = ("methods", "eviction")


def method_names() -> list[str]:
    """The names of the compression methods, including plug-ins but not kvpress's presses."""
    return list(_method_files()) + plugin_names(COMPRESSORS)


def method_lines() -> dict[str, str]:
    """One line about every method, by name, as ``evaluation_lines``."""
    lines = {name: _first_line(source) for name, source in _method_files().items()}
    for name in plugin_names(COMPRESSORS):
        packages = ", ".join(plugin_packages(COMPRESSORS, name))
        lines.setdefault(name, f"A method of the package {packages}.")
    return lines


def _method_files() -> dict[str, Traversable]:
    """The files of this package's methods, by the method's name."""
    sources = {}
    for folder in _METHOD_FOLDERS:
        for module, source in _modules(files("kvcat") / "compress" / folder).items():
            sources[module.replace("_", "-")] = source
    return sources


def evaluation_lines() -> dict[str, str]:
    """One line about every evaluation, by name: the first line of its file's docstring.

    For an evaluation from another package, the line names the package.
    """
    sources = _modules(files("kvcat") / "evals" / "evaluations")
    lines = {name: _first_line(source) for name, source in sources.items()}
    for name in plugin_names(EVALUATIONS):
        packages = ", ".join(plugin_packages(EVALUATIONS, name))
        lines.setdefault(name, f"An evaluation of the package {packages}.")
    return lines


@cache
def _first_line(source: Traversable) -> str:
    """The first line of a Python file's docstring."""
    docstring = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def _modules(folder: Traversable) -> dict[str, Traversable]:
    """The Python files in a folder, except ``__init__``, by module name, sorted."""
    modules = {}
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".py") and not entry.name.startswith("_"):
            modules[entry.name.removesuffix(".py")] = entry
    return modules
