"""Compressors by name: those of this package, the presses of kvpress, and plug-ins."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from kvcat import plugins
from kvcat.cache import parse_bits
from kvcat.compress import methods
from kvcat.compress.base import Compressor, Scorer, classes_in
from kvcat.compress.eviction import SCORERS, Eviction
from kvcat.compress.kvpress import KVPress
from kvcat.errors import InputError, unknown_name
from kvcat.options import check_options

_KVPRESS = "kvpress:"
_METHODS: dict[str, type[Compressor]] = classes_in(methods.__name__, methods.__path__, Compressor)
COMPRESSORS: dict[str, Callable[..., Compressor]] = {
    **_METHODS,
    **{name: partial(Eviction, name) for name in SCORERS},
}
"""The compressors of this package, by the names of their files."""


def compressor_names() -> list[str]:
    """All names that ``make_compressor`` accepts, except the presses of kvpress."""
    return [*COMPRESSORS, *plugins.plugin_names(plugins.COMPRESSORS)]


def make_compressor(name: str, /, **options: Any) -> Compressor:
    """The compressor with a name and options.

    Args:
        name: one of ``compressor_names``, or "kvpress:" and the name of a press of kvpress.
        options: fields of the compressor's dataclass; and ``bits`` for quantised caches (8 or 4;
            ``Compressor``).

    Raises:
        InputError: the name or an option is unknown, or a value is not valid.
    """
    if "bits" in options:
        options["bits"] = parse_bits(options["bits"])
    if name.startswith(_KVPRESS):
        return KVPress(name.removeprefix(_KVPRESS), **options)
    if name in COMPRESSORS:
        plugins.check_new_names(plugins.COMPRESSORS, {name})
    if name in SCORERS:
        return Eviction(name, **options)
    kind = _METHODS[name] if name in _METHODS else _plugin(name)
    if issubclass(kind, Scorer):
        return Eviction(name, scorer_class=kind, **options)
    check_options(kind, options, name)
    return kind(**options)


def seeded_compressor(name: str, options: Mapping[str, Any], seed: int) -> Compressor:
    """The compressor, with this seed if the method is randomised and its options name no seed."""
    ((_, compressor),) = seeded_compressors(name, options, [seed])
    return compressor


def seeded_compressors(
    name: str, options: Mapping[str, Any], seeds: Iterable[int]
) -> list[tuple[int | None, Compressor]]:
    """The compressor with every seed; once, with None, if no seed would change its result.

    That is a method that is not randomised, or whose options name a seed.
    """
    compressor = make_compressor(name, **options)
    if "seed" in options or not compressor.draws:
        return [(None, compressor)]
    return [(seed, compressor.with_seed(seed)) for seed in seeds]


def _plugin(name: str) -> type[Compressor] | type[Scorer]:
    """The class of the compressor or scorer that another package adds under a name."""
    plugins.check_new_names(plugins.COMPRESSORS, set(COMPRESSORS))
    if name not in plugins.plugin_names(plugins.COMPRESSORS):
        raise unknown_name("compressor", name, [*compressor_names(), "kvpress:PRESS"])
    kind = plugins.load_plugin(plugins.COMPRESSORS, name)
    if not (isinstance(kind, type) and issubclass(kind, Compressor | Scorer)):
        raise InputError(f"plug-in {name!r} is not a subclass of Compressor or Scorer: {kind!r}")
    return kind
