"""Tests of differences between models: permutations, McNemar, Holm; warnings on small samples."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float, Int
from scipy.stats import binomtest

from kvcat.evals.intervals import LEVEL, NORMAL_QUANTILE, NUM_MEDIAN_CHUNKS, Array, Names

# for p < 0.05, an exact test needs this many differing examples, all in favour of one model
_FEWEST_DIFFERING = math.ceil(1.0 - math.log2(1.0 - LEVEL))


def swap_p_value(
    figure: Callable[..., Array] | None,
    first: Sequence[Float[Array, " windows"]],
    second: Sequence[Float[Array, " windows"]],
    documents: Names,
    *,
    num_swaps: int = 10_000,
) -> float:
    """The two-sided permutation p-value for the hypothesis that two models are alike.

    If the models are alike, exchanging them on any set of documents does not change the
    distribution. The p-value is the share of exchanges for which the difference of the figure is at
    least as large as the observed one. It uses all exchanges, or the identity and ``num_swaps``
    random ones. With D documents it is at least 2^(1 - D). Variation between training runs is not
    covered: pass the mean over seeds. For means, this is the sign-flip test.

    Args:
        figure: function of the columns' means; None: the median of the only column.
        first, second: columns of the first and of the second model.
        documents: name of each window's document.
        num_swaps: up to this number, all exchanges are used.

    References: Fisher 1935; Good 2005, "Permutation, parametric and bootstrap tests".
    """
    names, document_of = np.unique(np.asarray(documents), return_inverse=True)
    num_documents = len(names)
    is_exact = 2**num_documents <= num_swaps
    if is_exact:
        numbers = np.arange(2**num_documents)[:, None]
        swapped = (numbers >> np.arange(num_documents)) & 1  # the first row swaps no document
    else:
        random = np.random.default_rng([0, num_documents]).integers(
            0, 2, size=(num_swaps, num_documents)
        )
        swapped = np.concatenate([np.zeros((1, num_documents), dtype=int), random])
    if figure is None:
        differences = _swapped_medians(first[0], second[0], swapped[:, document_of])
    else:
        differences = _swapped_figures(figure, first, second, swapped, document_of)
    if np.isnan(differences).any():
        return math.nan
    size = np.abs(differences)
    tolerance = 1e-9 * max(float(size.max()), 1e-300)  # differences within rounding count as ties
    return float((size >= size[0] - tolerance).mean())


def _swapped_medians(
    first: Float[Array, " windows"],
    second: Float[Array, " windows"],
    swapped: Int[Array, "swaps windows"],
) -> Float[Array, " swaps"]:
    """The difference of medians for every exchange."""
    differences = []
    for rows in np.array_split(swapped.astype(bool), NUM_MEDIAN_CHUNKS):
        ours = np.median(np.where(rows, second, first), axis=1)
        theirs = np.median(np.where(rows, first, second), axis=1)
        differences.append(ours - theirs)
    return np.concatenate(differences)


def _swapped_figures(
    figure: Callable[..., Array],
    first: Sequence[Float[Array, " windows"]],
    second: Sequence[Float[Array, " windows"]],
    swapped: Int[Array, "swaps documents"],
    document_of: Int[Array, " windows"],
) -> Float[Array, " swaps"]:
    """The difference of a function of means for every exchange."""
    ours = []
    theirs = []
    for column, other in zip(first, second, strict=True):
        sums = np.bincount(document_of, weights=column)
        other_sums = np.bincount(document_of, weights=other)
        exchanged = swapped @ (other_sums - sums)
        ours.append((sums.sum() + exchanged) / len(column))
        theirs.append((other_sums.sum() - exchanged) / len(column))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(figure(*ours), float) - np.asarray(figure(*theirs), float)


def mcnemar(first: Float[Array, " examples"], second: Float[Array, " examples"]) -> float:
    """The exact two-sided p-value for the hypothesis that two models are equally often right.

    Only examples on which exactly one model is right count. Of b + c such examples, b ~ Binomial(b
    + c, 1/2), and p = min(1, 2 P(X <= min(b, c))). Values are 0 or 1. The test assumes that
    examples are independent: if documents have several examples, use ``share_difference`` (McNemar
    1947).
    """
    only_first = int(np.sum(first > second))
    only_second = int(np.sum(first < second))
    if only_first + only_second == 0:
        return 1.0
    return float(binomtest(only_first, only_first + only_second).pvalue)


def small_sample_warning(
    first: Float[Array, " examples"], second: Float[Array, " examples"], documents: Names
) -> str:
    """A warning if the sample is too small to detect the observed difference; else empty.

    With n documents, the smallest difference that a test at 5 % detects is about max(z sqrt(E d^2 /
    n), 6 max|d| / n), where d are the examples' differences. The first term is the normal
    half-width. The second is for the six differing examples that an exact test needs. A true
    difference of this size is detected about half of the time.
    """
    differences = np.abs(first - second)
    num_documents = len(set(documents))
    if not differences.any():
        return f"the models agree on all {len(first)} examples"
    if num_documents < _FEWEST_DIFFERING:
        noun = "document" if num_documents == 1 else "documents"
        return f"{num_documents} {noun}: no difference can be detected at 95 %"
    half_width = NORMAL_QUANTILE * math.sqrt(float((differences**2).mean()) / num_documents)
    exact = _FEWEST_DIFFERING * float(differences.max()) / num_documents
    smallest = max(half_width, exact)
    observed = abs(float((first - second).mean()))
    if observed >= smallest:
        return ""
    return (
        f"{num_documents} documents: differences under {100.0 * smallest:.1f} points cannot be "
        f"detected at 95 %, such as the observed {100.0 * observed:.1f}"
    )


def holm(p_values: Float[Array, " tests"]) -> Float[Array, " tests"]:
    """The p-values after Holm's step-down correction, which controls the family-wise error.

    NaN stays NaN and is not counted. With the p-values of m tests in ascending order, p_(i) becomes
    the maximum over j <= i of min(1, (m - j + 1) p_(j)) (Holm 1979).
    """
    num_tests = np.count_nonzero(~np.isnan(p_values))
    order = np.argsort(p_values, kind="stable")[:num_tests]  # NaN is last
    scaled = p_values[order] * np.arange(num_tests, 0, -1)
    corrected = np.full(len(p_values), np.nan)
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(scaled))
    return corrected
