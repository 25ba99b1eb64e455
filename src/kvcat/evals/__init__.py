"""Evaluations: how much of a model's prediction a compact cache keeps, with resumable records and intervals."""

from kvcat.evals.metrics import METRICS, Metric
from kvcat.evals.provenance import provenance
from kvcat.evals.records import Record, ResultsFolder, read_config, read_records
from kvcat.evals.statistics import ClusterBootstrap, Estimate
from kvcat.evals.suffix import Method, evaluate_suffix
from kvcat.evals.summary import ComparisonRow, SummaryRow, compare_models, comparison_pairs, summarise
from kvcat.evals.windows import Window, windows_from_documents

__all__ = [
    "METRICS",
    "ClusterBootstrap",
    "ComparisonRow",
    "Estimate",
    "Method",
    "Metric",
    "Record",
    "ResultsFolder",
    "SummaryRow",
    "Window",
    "compare_models",
    "comparison_pairs",
    "evaluate_suffix",
    "provenance",
    "read_config",
    "read_records",
    "summarise",
    "windows_from_documents",
]
