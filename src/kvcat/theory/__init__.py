"""The paper's theory as running code: definitions, constructions, exact optima and counter-examples, in float64.

Nothing here trains and nothing needs a model from elsewhere. ``docs/theory.md`` explains each result.
"""

from kvcat.theory.compression import (
    Budget,
    Cache,
    CompressedModel,
    Policy,
    WorstCase,
    answer,
    compress,
    compressibility,
    keep_all,
    prefix_cache,
    suffix_error,
)
from kvcat.theory.definitions import AttentionHead, Block, FeedForward, Transformer, sequences
from kvcat.theory.detectors import compressible_network, differing_rows, incompressible_network, one_slot_policy
from kvcat.theory.detectors_bound import verify_incompressible
from kvcat.theory.detectors_report import theorem_report
from kvcat.theory.enclosing import enclosing_ball
from kvcat.theory.functions import (
    FUNCTIONS,
    FunctionTable,
    last_symbol,
    majority,
    mean,
    parity,
    random_function,
    tabulate,
)
from kvcat.theory.histogram import compressible_histogram, histogram_policy, incompressible_histogram
from kvcat.theory.histogram_curves import budget_curve, scaling_curve
from kvcat.theory.histogram_optimum import (
    definition_optimum,
    empty_cache_error,
    joint_optimum,
    optimal_error,
    optimal_policy,
    paper_bound,
)
from kvcat.theory.hull import best_shift, distance_to_hull, hull_lemma_bound, sharp_constant
from kvcat.theory.searching import search_cache

__all__ = [
    "FUNCTIONS",
    "AttentionHead",
    "Block",
    "Budget",
    "Cache",
    "CompressedModel",
    "FeedForward",
    "FunctionTable",
    "Policy",
    "Transformer",
    "WorstCase",
    "answer",
    "best_shift",
    "budget_curve",
    "compress",
    "compressibility",
    "compressible_histogram",
    "compressible_network",
    "definition_optimum",
    "differing_rows",
    "distance_to_hull",
    "empty_cache_error",
    "enclosing_ball",
    "histogram_policy",
    "hull_lemma_bound",
    "incompressible_histogram",
    "incompressible_network",
    "joint_optimum",
    "keep_all",
    "last_symbol",
    "majority",
    "mean",
    "one_slot_policy",
    "optimal_error",
    "optimal_policy",
    "paper_bound",
    "parity",
    "prefix_cache",
    "random_function",
    "scaling_curve",
    "search_cache",
    "sequences",
    "sharp_constant",
    "suffix_error",
    "tabulate",
    "theorem_report",
    "verify_incompressible",
]
