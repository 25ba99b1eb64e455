"""Shares of right answers and their differences, with 95 % intervals."""

import math

import numpy as np
from jaxtyping import Float

from kvcat.stats.intervals import NORMAL_QUANTILE, Array, Estimate, Names, student_quantile

_ROUNDING = 1e-12


def wilson(
    successes: float | int, num_trials: float | int, *, quantile: float = NORMAL_QUANTILE
) -> Estimate:
    """A proportion with Wilson's score interval, whose width is positive even at 0 and 100 %.

    The interval contains all p with |p_hat - p| <= z sqrt(p (1 - p) / n), where z is the quantile.
    Successes and trials may be fractional (``share``).

    References: Wilson 1927; Brown, Cai and DasGupta 2001, "Interval estimation for a binomial
    proportion".
    """
    rate = successes / num_trials
    square = quantile**2 / num_trials
    centre = (rate + square / 2.0) / (1.0 + square)
    half = math.sqrt(square * rate * (1.0 - rate) + square**2 / 4.0) / (1.0 + square)
    low = 0.0 if successes == 0 else min(centre - half, rate)  # avoids a rounding error of 1e-18
    high = 1.0 if successes == num_trials else max(centre + half, rate)
    return Estimate(rate, low, high)


def share(scores: Float[Array, " examples"], documents: Names) -> Estimate:
    """The mean of scores in [0, 1], with Wilson's interval at n over the design effect.

    Answers about one document are alike, so n answers say as much as n / D independent ones. The
    design effect D is the variance of the mean over documents, divided by that of n independent
    answers. Let p be the mean, and document d have n_d of n answers with the sum s_d. To first
    order the mean moves by u_d / n with u_d = s_d - p n_d, so over C documents

        D = C / (C - 1) * sum_d u_d^2 / (n p (1 - p)), but at least 1.

    Wilson's equation |p_hat - p| <= q sqrt(p (1 - p) D / n) is that of n / D answers. The variance
    of independent answers is known; of the whole, the fraction (D - 1) / D is estimated from few
    documents. So q is the quantile of Student's t with (K - 1) D / (D - 1) degrees of freedom,
    where K = n^2 / sum_d n_d^2 is the number of equally large documents (C if they are), and the
    normal one for D = 1. Documents with one answer each give Wilson's interval for n. If all
    answers are right, or none is, or there is one document, D cannot be estimated: a document then
    counts as one answer.

    In a simulation with beta-binomial answers (12 documents of 1 to 12 answers, 12 of 4 and of 12,
    30 of 10; means of .1 to .9) it covers 93 to 97 % for correlations in a document of up to .1 and
    88 to 97 % for .3. Wilson's interval for the number of documents covers 98 to 100 %, and for n
    60 to 90 %. Close to 0 or 1 with strongly correlated answers it covers less (87 % at .1 and .6).

    References: Kish 1965, "Survey sampling"; Korn and Graubard 1998, "Confidence intervals for
    proportions with small expected number of positive counts"; Dean and Pagano 2015, "Evaluating
    confidence interval methods for binomial proportions in clustered surveys".
    """
    mean = float(scores.mean())
    if mean in (0.0, 1.0):
        num_effective, quantile = float(len(set(documents))), NORMAL_QUANTILE
    else:
        num_effective, quantile = effective_answers(scores, documents, mean * (1.0 - mean))
    return wilson(mean * num_effective, num_effective, quantile=quantile)


def effective_answers(
    values: Float[Array, " examples"], documents: Names, variance: float
) -> tuple[float, float]:
    """The number of independent answers that say as much, and the quantile (see ``share``).

    Args:
        documents: name of each example's document.
        variance: of independent values.
    """
    _, document_of, sizes = np.unique(
        np.asarray(documents), return_inverse=True, return_counts=True
    )
    num_values = len(values)
    num_documents = len(sizes)
    if num_documents in (1, num_values):  # one document is one answer
        return float(num_documents), NORMAL_QUANTILE
    moves = np.bincount(document_of, weights=values - values.mean())
    square = num_documents / (num_documents - 1) * float((moves**2).sum())
    design_effect = max(1.0, square / (num_values * variance))
    if design_effect == 1.0:
        return float(num_values), NORMAL_QUANTILE
    effective_documents = num_values**2 / float((sizes**2).sum())
    # a document with nearly all answers leaves less than one degree of freedom
    degrees = max(1.0, effective_documents - 1.0)
    quantile = student_quantile(degrees * design_effect / (design_effect - 1.0))
    return num_values / design_effect, quantile


def share_difference(
    first: Float[Array, " examples"], second: Float[Array, " examples"], documents: Names
) -> Estimate:
    """The difference of two mean scores in [0, 1] with Agresti and Min's interval.

    Both models are scored on the same examples. Half an answer is added to each of four outcomes:
    both are right, neither is, only the first is, only the second is. Let m be the mean difference
    and s the mean square difference of n answers. With m' = n m / (n + 2) and s' = (n s + 1) / (n +
    2), the interval is m' +/- q sqrt((s' - m'^2) / (n + 2)), whose width is never zero. For answers
    about few documents n is divided by the design effect and q is Student's t, as in ``share``.
    ``sign_flip_p_value`` is the test.

    References: Agresti and Min 2005, "Simple improved confidence intervals for comparing matched
    proportions".
    """
    differences = first - second
    value = float(differences.mean())
    square = float((differences**2).mean())
    if np.ptp(differences) < _ROUNDING:  # all examples differ by the same
        num_effective, quantile = float(len(set(documents))), NORMAL_QUANTILE
    else:
        num_effective, quantile = effective_answers(differences, documents, square - value**2)
    total = num_effective + 2.0
    mean = num_effective * value / total
    mean_square = (num_effective * square + 1.0) / total
    half = quantile * math.sqrt((mean_square - mean**2) / total)
    return Estimate(value, min(mean - half, value), max(mean + half, value))
