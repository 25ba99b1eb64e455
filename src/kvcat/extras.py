"""Optional packages with the extras that install them, and names imported on first use.

The core needs no optional package: it loads models, compresses, saves, generates and serves.
"""

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXTRAS = {
    "train": ("datasets", "fsspec", "pyarrow"),
    "eval": ("pandas", "scipy"),
    "report": ("matplotlib",),
}
"""Packages of each extra. Each extra includes those before it."""
_EXTRA_OF_COMMAND = {
    "budgets": "corpus",
    "compress": "corpus",
    "generate": "corpus",
    "chat": "corpus",
    "info": "corpus",
    "serve": "serve",
    "prepare": "train",
    "train": "train",
    "eval": "eval",
    "report": "report",
    "theory": "report",
    "demo": "report",
}


def missing_package(error: ModuleNotFoundError, user: str) -> str:
    """A line about an optional package that is missing; empty for any other module.

    Args:
        user: what needs the package, such as "kvcat report".
    """
    package = (error.name or "").partition(".")[0]
    extras = [extra for extra, packages in EXTRAS.items() if package in packages]
    if not extras:
        return ""
    command = user.removeprefix("kvcat ").split()[0]
    extra = _EXTRA_OF_COMMAND.get(command, extras[0])
    return f"{user} needs the package {package}: {install_command(extra)}"


def install_command(extra: str) -> str:
    """The command that installs an extra, for the way in which this kvcat was installed.

    A clone is not in a package index, so its folder is named.
    """
    # only where a package is missing: these imports are slow
    import json
    import shlex
    from importlib import metadata
    from urllib.parse import urlparse
    from urllib.request import url2pathname

    try:
        recorded = metadata.distribution("kvcat").read_text("direct_url.json")
    except metadata.PackageNotFoundError:  # found by its path alone
        recorded = None
    source = json.loads(recorded) if recorded else {}
    url = str(source.get("url", ""))
    if "dir_info" in source:
        folder = url2pathname(urlparse(url).path)
        editable = "-e " if source["dir_info"].get("editable") else ""
        return f"pip install {editable}{shlex.quote(f'{folder}[{extra}]')}"
    if "vcs_info" in source:
        vcs = source["vcs_info"]
        place = f"{vcs['vcs']}+{url}@{vcs.get('commit_id', 'HEAD')}"
        return f"pip install {shlex.quote(f'kvcat[{extra}] @ {place}')}"
    if url:  # a wheel
        return f"pip install {shlex.quote(f'kvcat[{extra}] @ {url}')}"
    return f"pip install 'kvcat[{extra}]'"


def on_first_use(
    package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` (PEP 562) and ``__all__`` of a package that imports names late.

    The names are listed once, as imports under ``if TYPE_CHECKING`` in the package's file, where
    type checkers and documentation find them.

    Args:
        package, file: its ``__name__`` and ``__file__``.
    """
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    home = {}
    for node in block.body:
        if isinstance(node, ast.ImportFrom):
            home |= {alias.name: str(node.module) for alias in node.names}

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            if home[name] == package:  # a module of the package
                return importlib.import_module(f"{package}.{name}")
            return getattr(importlib.import_module(home[name]), name)
        except ModuleNotFoundError as error:
            line = missing_package(error, f"{package}.{name}")
            if line:
                raise ModuleNotFoundError(line, name=error.name) from error
            raise

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home})

    return get, list_names, sorted(home)
