"""Compression of a prefix after the fact, and how well a suffix fares on the result."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kvcat.compress.attention_matching import AttentionMatching
from kvcat.compress.checking import check_options
from kvcat.compress.common import Compressor, slots_for
from kvcat.compress.eviction import Eviction
from kvcat.compress.gradient import SNAPSHOT_STEPS, GradientCompression
from kvcat.compress.kvpress import KVPress
from kvcat.compress.naming import parse_method
from kvcat.compress.quality import SmallestCache, smallest_cache, split_supervision, supervised_kl
from kvcat.compress.refitting import refit_without_log_bias
from kvcat.compress.replaying import Scores, compare, replay
from kvcat.compress.scorers import SCORERS
from kvcat.compress.sequences import INSTRUCTION, Reconstruction, reconstruction
from kvcat.compress.solvers import fit_log_bias, fit_values
from kvcat.compress.tracing import Trace, trace
from kvcat.errors import InputError

COMPRESSORS: dict[str, Callable[..., Compressor]] = {
    "attention-matching": AttentionMatching,
    "gradient": GradientCompression,
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
    check_options(SCORERS[name] if name in SCORERS else COMPRESSORS[name], options, name)  # type: ignore[arg-type]
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
    compressor = make_compressor(name, **options)
    draws = any(hasattr(part, "seed") for part in (compressor, getattr(compressor, "scorer", None)))
    return draws and "seed" not in options


__all__ = [
    "COMPRESSORS", "INSTRUCTION", "SNAPSHOT_STEPS", "AttentionMatching", "Compressor", "Eviction",
    "GradientCompression", "KVPress", "Reconstruction", "Scores", "SmallestCache", "Trace", "compare", "fit_log_bias",
    "fit_values", "make_compressor", "parse_method", "reconstruction", "refit_without_log_bias", "replay",
    "seeded_compressor", "slots_for", "smallest_cache", "split_supervision", "supervised_kl", "takes_seed", "trace",
]  # fmt: skip
