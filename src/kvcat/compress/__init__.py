"""Compression of a prefix after the fact, and how well a suffix is predicted from the result.

trace -> queries -> slots, log-bias, values -> compact cache -> replay
"""

from kvcat.compress.base import Compressor, Scorer, compact_cache, received_mass, slots_for
from kvcat.compress.calibration import CalibratedBudgets, calibrate
from kvcat.compress.compare import (
    Scores,
    SmallestCache,
    compare,
    replay,
    smallest_cache,
    supervised_kl,
)
from kvcat.compress.compose import append, compose
from kvcat.compress.document_cache import compress_document
from kvcat.compress.documents import (
    INSTRUCTION,
    document_trace,
    protected_ranges,
    question_ids,
    reconstruction,
)
from kvcat.compress.eviction import SCORERS, Eviction
from kvcat.compress.kvpress import KVPress
from kvcat.compress.methods.attention_matching import AttentionMatching
from kvcat.compress.methods.gradient import SNAPSHOT_STEPS, GradientCompression
from kvcat.compress.methods.refined import RefinedMatching
from kvcat.compress.prefix import Prefix, protecting
from kvcat.compress.quantized import slots_and_bits
from kvcat.compress.registry import (
    COMPRESSORS,
    compressor_names,
    make_compressor,
    seeded_compressor,
    seeded_compressors,
)
from kvcat.compress.sessions import Session
from kvcat.compress.solvers import fit_log_bias, fit_values
from kvcat.compress.trace import Reconstruction, Trace, split_supervision
from kvcat.compress.tracing import trace
from kvcat.options import parse_spec as parse_method

__all__ = [
    "COMPRESSORS",
    "INSTRUCTION",
    "SCORERS",
    "SNAPSHOT_STEPS",
    "AttentionMatching",
    "CalibratedBudgets",
    "Compressor",
    "Eviction",
    "GradientCompression",
    "KVPress",
    "Prefix",
    "Reconstruction",
    "RefinedMatching",
    "Scorer",
    "Scores",
    "Session",
    "SmallestCache",
    "Trace",
    "append",
    "calibrate",
    "compact_cache",
    "compare",
    "compose",
    "compress_document",
    "compressor_names",
    "document_trace",
    "fit_log_bias",
    "fit_values",
    "make_compressor",
    "parse_method",
    "protected_ranges",
    "protecting",
    "question_ids",
    "received_mass",
    "reconstruction",
    "replay",
    "seeded_compressor",
    "seeded_compressors",
    "slots_and_bits",
    "slots_for",
    "smallest_cache",
    "split_supervision",
    "supervised_kl",
    "trace",
]
