"""Statistics of records: metrics, intervals, tests of differences, tables; without torch."""

from kvcat.stats.intervals import ClusterBootstrap, Estimate
from kvcat.stats.metrics import METRICS, Metric, share_of_examples
from kvcat.stats.records import Record
from kvcat.stats.shares import share, share_difference
from kvcat.stats.significance import holm, sign_flip_p_value, swap_p_value
from kvcat.stats.summary import compare_models, comparison_pairs, summarise

__all__ = [
    "METRICS",
    "ClusterBootstrap",
    "Estimate",
    "Metric",
    "Record",
    "compare_models",
    "comparison_pairs",
    "holm",
    "share",
    "share_difference",
    "share_of_examples",
    "sign_flip_p_value",
    "summarise",
    "swap_p_value",
]
