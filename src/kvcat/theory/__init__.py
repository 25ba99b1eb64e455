"""The paper's theory as running code, in float64: constructions, exact optima over all policies, errata.

Nothing here trains and nothing needs a model. ``docs/theory.md`` explains each result.
"""

from kvcat.theory.certificate import certified_bound, certified_bounds
from kvcat.theory.definitions import CompressedModel, Transformer, compress, compressibility, prefix_cache, sequences
from kvcat.theory.functions import FUNCTIONS, FunctionTable
from kvcat.theory.histogram import compressible_histogram, histogram_policy, incompressible_histogram
from kvcat.theory.hull import best_shift, enclosing_ball, hull_lemma_bound, sharp_constant
from kvcat.theory.optimum import definition_optimum, joint_optimum, optimal_error, optimal_policy, paper_bound
from kvcat.theory.reports import run_errata, run_histogram, run_theorem
from kvcat.theory.theorem import compressible_network, incompressible_network, summary_policy

__all__ = [
    "FUNCTIONS",
    "CompressedModel",
    "FunctionTable",
    "Transformer",
    "best_shift",
    "certified_bound",
    "certified_bounds",
    "compress",
    "compressibility",
    "compressible_histogram",
    "compressible_network",
    "definition_optimum",
    "enclosing_ball",
    "histogram_policy",
    "hull_lemma_bound",
    "incompressible_histogram",
    "incompressible_network",
    "joint_optimum",
    "optimal_error",
    "optimal_policy",
    "paper_bound",
    "prefix_cache",
    "run_errata",
    "run_histogram",
    "run_theorem",
    "sequences",
    "sharp_constant",
    "summary_policy",
]
