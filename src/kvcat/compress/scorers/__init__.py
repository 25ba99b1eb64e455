"""Eviction scorers: which slots to keep, one method per file."""

from kvcat.compress.scorers.base import Scorer, received_mass
from kvcat.compress.scorers.first import First
from kvcat.compress.scorers.h2o import H2O
from kvcat.compress.scorers.keynorm import KeyNorm
from kvcat.compress.scorers.random import Random
from kvcat.compress.scorers.snapkv import SnapKV

SCORERS: dict[str, type[Scorer]] = {
    "first": First,
    "random": Random,
    "keynorm": KeyNorm,
    "snapkv": SnapKV,
    "h2o": H2O,
}

__all__ = ["H2O", "SCORERS", "First", "KeyNorm", "Random", "Scorer", "SnapKV", "received_mass"]
