"""Eviction scorers: which slots to keep, one method per file."""

from kvcat.compress.scorers.base import Scorer, received_mass
from kvcat.compress.scorers.first import First
from kvcat.compress.scorers.h2o import H2O
from kvcat.compress.scorers.keynorm import KeyNorm
from kvcat.compress.scorers.random import Random
from kvcat.compress.scorers.snapkv import SnapKV
from kvcat.compress.scorers.streaming import StreamingLLM
from kvcat.compress.scorers.tova import TOVA

SCORERS: dict[str, type[Scorer]] = {
    "first": First,
    "random": Random,
    "streaming": StreamingLLM,
    "keynorm": KeyNorm,
    "snapkv": SnapKV,
    "h2o": H2O,
    "tova": TOVA,
}

__all__ = [
    "H2O", "SCORERS", "TOVA", "First", "KeyNorm", "Random", "Scorer", "SnapKV", "StreamingLLM", "received_mass",
]  # fmt: skip
