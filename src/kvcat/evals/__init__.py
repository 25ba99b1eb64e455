"""Evaluations: how much of a model's prediction a compact cache keeps, with resumable records and intervals."""

from kvcat.evals.corpora import CORPORA, corpus_documents
from kvcat.evals.metrics import HEADLINES, METRICS, Metric
from kvcat.evals.provenance import provenance
from kvcat.evals.records import Record, ResultsFolder, models_of, read_config, read_costs, read_records
from kvcat.evals.rows import comparison_pairs
from kvcat.evals.running import Method, evaluate
from kvcat.evals.statistics import ClusterBootstrap, Estimate
from kvcat.evals.suffix import SuffixTask, evaluate_suffix
from kvcat.evals.summary import compare_models, summarise
from kvcat.evals.task import Baseline, Example, Prepared, Task
from kvcat.evals.windows import Window, windows_from_documents

__all__ = [
    "CORPORA", "HEADLINES", "METRICS", "Baseline", "ClusterBootstrap", "Estimate", "Example", "Method",
    "Metric", "Prepared", "Record", "ResultsFolder", "SuffixTask", "Task", "Window", "compare_models",
    "comparison_pairs", "corpus_documents", "evaluate", "evaluate_suffix", "models_of", "provenance", "read_config",
    "read_costs", "read_records", "summarise", "windows_from_documents",
]  # fmt: skip
