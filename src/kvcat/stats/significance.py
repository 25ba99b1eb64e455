"""Tests of differences between models: permutations, Holm; warnings on small samples."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float, Int

from kvcat.stats.intervals import LEVEL, NUM_MEDIAN_CHUNKS, Array, Names
from kvcat.stats.shares import effective_answers

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
    # differences within rounding count as ties; where an exchange divides by 0 they are endless
    usual_size = np.quantile(size[np.isfinite(size)], 0.9) if np.isfinite(size).any() else 0.0
    tolerance = 1e-9 * max(float(usual_size), 1e-300)
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
        with np.errstate(invalid="ignore"):  # values may be infinite
            exchanged = swapped @ (other_sums - sums)
            ours.append((sums.sum() + exchanged) / len(column))
            theirs.append((other_sums.sum() - exchanged) / len(column))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(figure(*ours), float) - np.asarray(figure(*theirs), float)


def sign_flip_p_value(
    first: Float[Array, " examples"], second: Float[Array, " examples"], documents: Names
) -> float:
    """The exact two-sided p-value for the hypothesis that two methods are equally often right.

    Both answer the same questions, and scores are 0 or 1. If the methods are alike, exchanging
    them on any document changes nothing, so that the difference d_i of their right answers on
    document i is as likely to be -d_i, for all documents independently. The p-value is the
    probability that the sum of +/- d_i is at least as far from 0 as the observed one, computed from
    the distribution of the sum, a convolution over the documents. For documents with one question
    each it is McNemar's exact test. Where a document has several, their answers are alike, and
    McNemar's test rejects too often: with 12 documents of 12 questions and a correlation of .3 in
    the documents, in a third of the cases at a nominal 5 % (a simulation is among the tests).

    References: Fisher 1935; McNemar 1947; Good 2005, "Permutation, parametric and bootstrap tests".
    """
    _, document_of = np.unique(np.asarray(documents), return_inverse=True)
    differences = np.abs(np.bincount(document_of, weights=first - second)).round().astype(int)
    observed = abs(round(float((first - second).sum())))
    chances = np.ones(1)  # of the sums -largest, ..., largest, in steps of 1
    for difference in differences[differences > 0]:
        flipped = np.zeros(2 * difference + 1)
        flipped[[0, -1]] = 0.5
        chances = np.convolve(chances, flipped)
    sums = np.arange(len(chances)) - len(chances) // 2
    return min(1.0, float(chances[np.abs(sums) >= observed].sum()))


def small_sample_warning(
    first: Float[Array, " examples"], second: Float[Array, " examples"], documents: Names
) -> str:
    """A warning if the sample is too small to detect the observed difference; else empty.

    With n examples, the smallest difference that a test at 5 % detects is about max(q sqrt(E d^2 /
    n'), 6 max|d| / n), where d are the examples' differences. The first term is the half-width of
    an interval, with n' and q as in ``share``. The second is for the six differing documents that
    an exact test needs. A true difference of this size is detected about half of the time.
    """
    differences = np.abs(first - second)
    num_documents = len(set(documents))
    if not differences.any():
        return f"the models agree on all {len(first)} examples"
    if num_documents < _FEWEST_DIFFERING:
        noun = "document" if num_documents == 1 else "documents"
        return f"{num_documents} {noun}: no difference can be detected at 95 %"
    square = float((differences**2).mean())
    num_effective, quantile = effective_answers(first - second, documents, square)
    half_width = quantile * math.sqrt(square / num_effective)
    exact = _FEWEST_DIFFERING * float(differences.max()) / len(first)
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
