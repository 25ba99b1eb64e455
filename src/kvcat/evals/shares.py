"""Shares of right answers and their differences, with 95 % intervals."""

import math

import numpy as np
from jaxtyping import Float
from scipy.stats import norm

from kvcat.evals.intervals import NORMAL_QUANTILE, Array, Estimate, Names


def wilson(successes: float | int, num_trials: float | int) -> Estimate:
    """A proportion with Wilson's score interval, whose width is positive even at 0 and 100 %.

    The interval contains all p with |p_hat - p| <= z sqrt(p (1 - p) / n), where z is the normal
    quantile. Successes may be fractional if a trial is a document with several examples.

    References: Wilson 1927; Brown, Cai and DasGupta 2001, "Interval estimation for a binomial
    proportion".
    """
    rate = successes / num_trials
    square = NORMAL_QUANTILE**2 / num_trials
    centre = (rate + square / 2.0) / (1.0 + square)
    half = math.sqrt(square * rate * (1.0 - rate) + square**2 / 4.0) / (1.0 + square)
    low = 0.0 if successes == 0 else min(centre - half, rate)  # avoids a rounding error of 1e-18
    high = 1.0 if successes == num_trials else max(centre + half, rate)
    return Estimate(rate, low, high)


def share(scores: Float[Array, " examples"], documents: Names) -> Estimate:
    """The mean of scores in [0, 1] with Wilson's interval for n = number of documents.

    The interval is conservative: the variance of a variable in [0, 1] with mean p is at most p (1 -
    p), and examples from one document count as copies of one another.
    """
    num_documents = len(set(documents))
    return wilson(float(scores.mean()) * num_documents, num_documents)


def share_difference(
    first: Float[Array, " examples"], second: Float[Array, " examples"], documents: Names
) -> tuple[Estimate, float]:
    """The difference of two mean scores in [0, 1] with Agresti and Min's interval and p-value.

    Both models are scored on the same examples. Half a document is added to each of four outcomes:
    both are right, neither is, only the first is, only the second is. Let d_i be the difference on
    document i of n, scaled so that the mean of all d_i is the difference. With m = sum d / (n + 2)
    and s^2 = ((sum d^2 + 1) / (n + 2) - m^2) / (n + 2), the interval is m +/- z s, whose width is
    never zero, and p = 2 Phi(-|m| / s).

    References: Agresti and Min 2005, "Simple improved confidence intervals for comparing matched
    proportions".
    """
    names, document_of = np.unique(np.asarray(documents), return_inverse=True)
    sums = np.bincount(document_of, weights=first - second)
    differences = sums * len(names) / len(first)
    total = len(names) + 2
    mean = differences.sum() / total
    mean_square = ((differences**2).sum() + 1.0) / total
    error = math.sqrt(mean_square - mean**2) / math.sqrt(total)
    value = float((first - second).mean())
    low = min(float(mean - NORMAL_QUANTILE * error), value)
    high = max(float(mean + NORMAL_QUANTILE * error), value)
    p_value = 2.0 * float(norm.cdf(-abs(mean) / error))
    return Estimate(value, low, high), p_value
