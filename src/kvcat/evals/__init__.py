"""Evaluations: how much of a model's prediction a compact cache keeps, with resumable records."""

from kvcat.evals.ability import models_below_chance
from kvcat.evals.analysis import Analysis, analyse
from kvcat.evals.intervals import ClusterBootstrap, Estimate
from kvcat.evals.metrics import EVALUATIONS, METRICS, Evaluation, Metric
from kvcat.evals.records import (
    Record,
    ResultsFolder,
    models_of,
    read_config,
    read_costs,
    read_events,
    read_records,
)
from kvcat.evals.runner import configuration, evaluate, progress_bar
from kvcat.evals.suffix import (
    CORPORA,
    SuffixTask,
    Window,
    corpus_documents,
    windows_from_documents,
)
from kvcat.evals.summary import compare_models, comparison_pairs, summarise
from kvcat.evals.task import Baseline, Method, Prepared, Task

plumbing = models_below_chance  # its earlier name

__all__ = [
    "CORPORA",
    "EVALUATIONS",
    "METRICS",
    "Analysis",
    "Baseline",
    "ClusterBootstrap",
    "Estimate",
    "Evaluation",
    "Method",
    "Metric",
    "Prepared",
    "Record",
    "ResultsFolder",
    "SuffixTask",
    "Task",
    "Window",
    "analyse",
    "compare_models",
    "comparison_pairs",
    "configuration",
    "corpus_documents",
    "evaluate",
    "models_below_chance",
    "models_of",
    "plumbing",
    "progress_bar",
    "read_config",
    "read_costs",
    "read_events",
    "read_records",
    "summarise",
    "windows_from_documents",
]
