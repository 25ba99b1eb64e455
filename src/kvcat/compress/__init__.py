"""Compression of a prefix after the fact, and how well a suffix fares on the result.

trace -> queries -> slots, log-bias, values -> compact cache -> replay
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kvcat.compress import methods
from kvcat.compress.base import Compressor, classes_in, slots_for
from kvcat.compress.compare import Scores, SmallestCache, compare, replay, smallest_cache, supervised_kl
from kvcat.compress.documents import INSTRUCTION, reconstruction
from kvcat.compress.eviction import SCORERS, Eviction
from kvcat.compress.kvpress import KVPress
from kvcat.compress.methods.attention_matching import AttentionMatching
from kvcat.compress.methods.gradient import SNAPSHOT_STEPS, GradientCompression
from kvcat.compress.solvers import fit_log_bias, fit_values
from kvcat.compress.trace import Reconstruction, Trace, split_supervision, trace
from kvcat.errors import InputError
from kvcat.options import check_options
from kvcat.options import parse_spec as parse_method

__all__ = [
    "COMPRESSORS", "INSTRUCTION", "SCORERS", "SNAPSHOT_STEPS", "AttentionMatching", "Compressor", "Eviction",
    "GradientCompression", "KVPress", "Reconstruction", "Scores", "SmallestCache", "Trace", "compare", "fit_log_bias",
    "fit_values", "make_compressor", "parse_method", "reconstruction", "replay",
    "seeded_compressor", "slots_for", "smallest_cache", "split_supervision", "supervised_kl", "takes_seed", "trace",
]  # fmt: skip

_METHODS = classes_in(methods.__name__, methods.__path__, Compressor)
COMPRESSORS: dict[str, Callable[..., Compressor]] = {
    **_METHODS,
    **{name: partial(Eviction, name) for name in SCORERS},
}
"""Compressors by the names of their files."""


def make_compressor(name: str, /, **options: Any) -> Compressor:
    """The compressor of a name with its options: of ``COMPRESSORS``, or "kvpress:" and the name of a press of kvpress.

    Raises:
        InputError: an unknown name, or options it does not have or take.
    """
    if name.startswith("kvpress:"):
        return KVPress(name.removeprefix("kvpress:"), **options)
    if name not in COMPRESSORS:
        raise InputError(f"no compressor {name!r}; there are {', '.join(COMPRESSORS)}, kvpress:PRESS")
    if name in _METHODS:
        check_options(_METHODS[name], options, name)
    return COMPRESSORS[name](**options)


def seeded_compressor(name: str, options: Mapping[str, Any], seed: int) -> Compressor:
    """As ``make_compressor``, with the seed where the method draws and its options give none."""
    return make_compressor(name, **{**options, "seed": seed} if takes_seed(name, options) else options)


def takes_seed(name: str, options: Mapping[str, Any]) -> bool:
    """Whether the compressor of a name draws, with a seed that its options leave open."""
    return make_compressor(name, **options).draws and "seed" not in options
