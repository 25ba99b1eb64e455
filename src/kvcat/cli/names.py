"""The names of methods and evaluations, from their file names, without imports."""

import ast
from importlib.resources import files
from importlib.resources.abc import Traversable

from kvcat.plugins import COMPRESSORS, EVALUATIONS, plugin_names, plugin_packages

_METHOD_FOLDERS = ("methods", "eviction")


def method_names() -> list[str]:
    """The names of the compression methods, including plug-ins but not kvpress's presses."""
    names: list[str] = []
    for folder in _METHOD_FOLDERS:
        modules = _modules(files("kvcat") / "compress" / folder)
        names += [module.replace("_", "-") for module in modules]
    return [*names, *plugin_names(COMPRESSORS)]


def evaluation_lines() -> dict[str, str]:
    """One line about every evaluation, by name: the first line of its file's docstring.

    For an evaluation from another package, the line names the package.
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
    """The Python files in a folder, except ``__init__``, by module name, sorted."""
    modules = {}
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".py") and not entry.name.startswith("_"):
            modules[entry.name.removesuffix(".py")] = entry
    return modules
