"""The paper's two histogram networks on the prefixes, and with the search, that the trained ones are measured with."""

from collections.abc import Sequence

import torch

from kvcat.recipes.histogram_measure import (
    Compressibility,
    count_prefixes,
    measure_histogram,
    summarise_prefixes,
    worst_error,
)
from kvcat.recipes.histogram_runs import HistogramExperiment, Row
from kvcat.theory.compression import compress, prefix_cache
from kvcat.theory.definitions import Transformer
from kvcat.theory.histogram import compressible_histogram, histogram_policy, incompressible_histogram
from kvcat.theory.histogram_optimum import joint_optimum

OPTIMUM = "incompressible construction, optimum"
OPTIMUM_FOUND = "incompressible construction, found"
POLICY = "compressible construction, its policy"
POLICY_FOUND = "compressible construction, found"


def construction_rows(experiment: HistogramExperiment, *, search: bool = True) -> list[Row]:
    """Rows as ``run_histogram_experiment`` gives them for trained networks, ``seed`` empty, ``task_rms`` left out.

    - "incompressible construction, optimum": no policy does better, for each prefix and all its suffixes jointly.
    - "compressible construction, its policy": one slot; at r = 1 alone.
    - ", found": the search that the trained networks are measured with. On the first network it shows how far above the
      optimum it ends, on the second that it may miss a cache that exists.

    Args:
        experiment: alphabet, lengths, prefixes and search.
        search: False leaves out what is found by search.
    """
    m, longest = experiment.num_symbols, experiment.longest
    incompressible = incompressible_histogram(m, longest, num_blocks=4).with_causal_mask()
    compressible = compressible_histogram(m, longest).with_causal_mask()
    rows = _rows(OPTIMUM, _optimum(experiment)) + _rows(POLICY, [_policy(experiment, compressible)])
    for name, model in ((OPTIMUM_FOUND, incompressible), (POLICY_FOUND, compressible)) if search else ():
        rows += _rows(
            name,
            measure_histogram(
                model,
                prefix_len=experiment.prefix_len,
                slots=experiment.budgets,
                num_prefixes=experiment.num_prefixes,
                search=experiment.search,
            ),
        )
    return rows


def _optimum(experiment: HistogramExperiment) -> list[Compressibility]:
    prefixes = _prefixes(experiment)
    longest_suffix = experiment.longest - experiment.prefix_len
    counts = [torch.bincount(prefix, minlength=experiment.num_symbols) for prefix in prefixes]
    return [
        summarise_prefixes(prefixes, r, [joint_optimum(row, longest_suffix, r).error for row in counts])
        for r in experiment.budgets
    ]


def _policy(experiment: HistogramExperiment, model: Transformer) -> Compressibility:
    prefixes, policy = _prefixes(experiment), histogram_policy(experiment.num_symbols)
    errors = [worst_error(model, compress(policy, prefix_cache(model, prefix)), prefix) for prefix in prefixes]
    return summarise_prefixes(prefixes, 1, errors)


def _prefixes(experiment: HistogramExperiment) -> torch.Tensor:
    return count_prefixes(
        experiment.num_symbols, experiment.prefix_len, limit=experiment.num_prefixes, seed=experiment.search.seed
    )


def _rows(name: str, measured: Sequence[Compressibility]) -> list[Row]:
    return [row.as_row(name, "") for row in measured]
