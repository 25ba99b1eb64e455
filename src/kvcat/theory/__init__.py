"""The paper's theory as running code: constructions, exact optima over all policies.

Nothing here trains and nothing needs a model. ``docs/theory.md`` explains each result.
"""

from kvcat.theory.definitions import (
    FUNCTIONS,
    FunctionTable,
    Transformer,
    compressibility,
    sequences,
)
from kvcat.theory.histogram import (
    compressible_histogram,
    histogram_policy,
    incompressible_histogram,
)
from kvcat.theory.optimum import (
    definition_optimum,
    hull_lemma_bound,
    optimal_error,
    paper_bound,
    sharp_constant,
)
from kvcat.theory.theorem import (
    certified_bound,
    compressible_network,
    incompressible_network,
    summary_policy,
)

__all__ = [
    "FUNCTIONS",
    "FunctionTable",
    "Transformer",
    "certified_bound",
    "compressibility",
    "compressible_histogram",
    "compressible_network",
    "definition_optimum",
    "histogram_policy",
    "hull_lemma_bound",
    "incompressible_histogram",
    "incompressible_network",
    "optimal_error",
    "paper_bound",
    "sequences",
    "sharp_constant",
    "summary_policy",
]
