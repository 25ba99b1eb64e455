"""Optional packages, and the extras of kvcat that install them.

The core needs none of them: it loads models, compresses, saves, generates and serves.
"""

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
        error: raised by the import.
        user: what needs the package, such as "kvcat report".
    """
    package = (error.name or "").partition(".")[0]
    extras = [extra for extra, packages in EXTRAS.items() if package in packages]
    if not extras:
        return ""
    command = user.removeprefix("kvcat ").split()[0]
    extra = _EXTRA_OF_COMMAND.get(command, extras[0])
    return f"{user} needs the package {package}: pip install 'kvcat[{extra}]'"
