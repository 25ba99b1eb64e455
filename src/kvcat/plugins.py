"""Plug-ins from other packages, found by entry point and imported when they are used.

A package declares, for example,

    [project.entry-points."kvcat.compressors"]
    my-method = "my_package:MyMethod"

and ``my-method`` is then available like the names of kvcat itself.
"""

import sys
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from kvcat.errors import InputError, one_line

COMPRESSORS = "kvcat.compressors"
POLICIES = "kvcat.policies"
EVALUATIONS = "kvcat.evaluations"


def plugin_names(group: str) -> list[str]:
    """The names that other packages add to a group, sorted; the packages are not imported."""
    return sorted({point.name for point in _points(group)})


def plugin_packages(group: str, name: str) -> list[str]:
    """The packages that add a name to a group."""
    return [_package(point) for point in _points(group) if point.name == name]


def load_plugin(group: str, name: str) -> Any:
    """The object that is registered under a name of ``plugin_names``.

    Raises:
        InputError: two packages add the name, or the object cannot be imported.
    """
    points = [point for point in _points(group) if point.name == name]
    if len(points) > 1:
        packages = ", ".join(plugin_packages(group, name))
        raise InputError(f"{name!r} is added to {group} by several packages: {packages}")
    (point,) = points
    try:
        return point.load()
    except Exception as error:
        reason = one_line(error)
        raise InputError(
            f"{name!r} of package {_package(point)} cannot be loaded: {reason}"
        ) from error


def check_new_names(group: str, taken: set[str]) -> None:
    """Reject plug-ins whose name kvcat itself uses.

    Raises:
        InputError: a plug-in has a name that is in ``taken``.
    """
    for point in _points(group):
        if point.name in taken:
            raise InputError(
                f"package {_package(point)} adds {point.name!r} to {group}, which kvcat has already"
            )


def _points(group: str) -> tuple[EntryPoint, ...]:
    """The entry points of a group in all installed packages."""
    return _points_in(group, tuple(sys.path))


@lru_cache(maxsize=16)
def _points_in(group: str, folders: tuple[str, ...]) -> tuple[EntryPoint, ...]:  # noqa: ARG001
    """The entry points of a group, read once for the given ``sys.path``."""
    return tuple(entry_points(group=group))


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value
