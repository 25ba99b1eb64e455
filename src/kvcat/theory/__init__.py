"""The paper's theory as running code: constructions, exact optima over all policies.

Nothing here trains and nothing needs a model. ``docs/theory.md`` explains each result.
"""
# isort: skip_file

# fmt: off
from kvcat.theory.definitions import (
    FUNCTIONS as FUNCTIONS, FunctionTable as FunctionTable, Transformer as Transformer,
    compressibility as compressibility, sequences as sequences,
)
from kvcat.theory.histogram import (
    compressible_histogram as compressible_histogram, histogram_policy as histogram_policy,
    incompressible_histogram as incompressible_histogram,
)
from kvcat.theory.optimum import (
    definition_optimum as definition_optimum, hull_lemma_bound as hull_lemma_bound,
    optimal_error as optimal_error, paper_bound as paper_bound, sharp_constant as sharp_constant,
)
from kvcat.theory.theorem import (
    certified_bound as certified_bound, compressible_network as compressible_network,
    incompressible_network as incompressible_network, summary_policy as summary_policy,
)
# fmt: on
