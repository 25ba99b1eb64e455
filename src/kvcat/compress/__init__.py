"""Compression of a prefix after the fact, and how well a suffix is predicted from the result.

trace -> queries -> slots, log-bias, values -> compact cache -> replay
"""
# isort: skip_file

# fmt: off
# first, so that the files of methods can import these names from here
from kvcat.compress.base import (
    Compressor as Compressor, Scorer as Scorer, compact_cache as compact_cache,
    received_mass as received_mass, slots_for as slots_for,
)
from kvcat.compress.prefix import Prefix as Prefix, protecting as protecting
from kvcat.compress.trace import (
    Reconstruction as Reconstruction, Trace as Trace, split_supervision as split_supervision,
)

from kvcat.compress.calibration import (
    CalibratedBudgets as CalibratedBudgets, calibrate as calibrate,
)
from kvcat.compress.compare import (
    Scores as Scores, SmallestCache as SmallestCache, compare as compare, replay as replay,
    smallest_cache as smallest_cache, supervised_kl as supervised_kl,
)
from kvcat.compress.compose import append as append, compose as compose
from kvcat.compress.document_cache import compress_document as compress_document
from kvcat.compress.documents import (
    INSTRUCTION as INSTRUCTION, document_trace as document_trace,
    protected_ranges as protected_ranges, question_ids as question_ids,
    reconstruction as reconstruction,
)
from kvcat.compress.eviction import SCORERS as SCORERS, Eviction as Eviction
from kvcat.compress.kvpress import KVPress as KVPress
from kvcat.compress.methods.attention_matching import AttentionMatching as AttentionMatching
from kvcat.compress.methods.gradient import (
    SNAPSHOT_STEPS as SNAPSHOT_STEPS, GradientCompression as GradientCompression,
)
from kvcat.compress.methods.refined import RefinedMatching as RefinedMatching
from kvcat.compress.quantized import slots_and_bits as slots_and_bits
from kvcat.compress.registry import (
    COMPRESSORS as COMPRESSORS, compressor_names as compressor_names,
    make_compressor as make_compressor, seeded_compressor as seeded_compressor,
    seeded_compressors as seeded_compressors,
)
from kvcat.compress.sessions import Session as Session
from kvcat.compress.solvers import fit_log_bias as fit_log_bias, fit_values as fit_values
from kvcat.compress.tracing import trace as trace
from kvcat.options import parse_spec
# fmt: on

parse_method = parse_spec
