"""Compressors by name."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import kvcat.compress.methods
from kvcat.compress.base import Compressor, classes_in
from kvcat.compress.eviction import SCORERS, Eviction
from kvcat.compress.kvpress import KVPress
from kvcat.compress.options import check_options
from kvcat.errors import InputError

_METHODS = classes_in("kvcat.compress.methods", kvcat.compress.methods.__path__, Compressor)
COMPRESSORS: dict[str, Callable[..., Compressor]] = {
    **_METHODS,
    **{name: partial(Eviction, name) for name in SCORERS},
}


def make_compressor(name: str, **options: Any) -> Compressor:
    """The compressor of a name, with its options.

    Args:
        name: one of ``COMPRESSORS``, or "kvpress:" and the name of a press of kvpress.
        options: fields of the compressor.

    Raises:
        InputError: an unknown name, or options it does not have or take.
    """
    if name.startswith("kvpress:"):
        return KVPress(name.removeprefix("kvpress:"), **options)
    if name not in COMPRESSORS:
        raise InputError(f"no compressor {name!r}; there are {', '.join(COMPRESSORS)}, kvpress:PRESS")
    check_options(SCORERS.get(name) or _METHODS[name], options, name)
    return COMPRESSORS[name](**options)


def seeded_compressor(name: str, options: Mapping[str, Any], seed: int) -> Compressor:
    """The compressor of a name, with the seed where it draws and its options give none.

    Args:
        name: as in ``make_compressor``.
        options: fields of the compressor.
        seed: any integer.

    Raises:
        InputError: as ``make_compressor``.
    """
    return make_compressor(name, **{**options, "seed": seed} if takes_seed(name, options) else options)


def takes_seed(name: str, options: Mapping[str, Any]) -> bool:
    """Whether the compressor of a name draws, with a seed that its options leave open.

    Args:
        name: as in ``make_compressor``.
        options: fields of the compressor.

    Raises:
        InputError: as ``make_compressor``.
    """
    return make_compressor(name, **options).draws and "seed" not in options
