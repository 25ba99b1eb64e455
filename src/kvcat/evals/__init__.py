"""Evaluations: how much of a model's prediction a compact cache keeps, with resumable records and intervals."""

from kvcat.evals.records import Record, ResultsFolder, models_of, read_config, read_costs, read_events, read_records
from kvcat.evals.runner import configuration, evaluate, progress_bar
from kvcat.evals.statistics import EVALUATIONS, METRICS, ClusterBootstrap, Estimate, Metric
from kvcat.evals.suffix import CORPORA, SuffixTask, Window, corpus_documents, windows_from_documents
from kvcat.evals.summary import compare_models, comparison_pairs, plumbing, summarise
from kvcat.evals.task import Baseline, Method, Prepared, Task

__all__ = [
    "CORPORA", "EVALUATIONS", "METRICS", "Baseline", "ClusterBootstrap", "Estimate", "Method", "Metric", "Prepared",
    "Record", "ResultsFolder", "SuffixTask", "Task", "Window", "compare_models", "comparison_pairs", "configuration",
    "corpus_documents", "evaluate", "models_of", "plumbing", "progress_bar", "read_config", "read_costs", "read_events",
    "read_records", "summarise", "windows_from_documents",
]  # fmt: skip
