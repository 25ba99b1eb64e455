"""Evaluations of compact caches: how much of a model's predictions they keep; resumable.

Names are imported on first use, so that the options of an evaluation load without torch.
"""

import importlib
from typing import Any

_NAMES = {
    "kvcat.evals.ability": "models_below_chance",
    "kvcat.evals.analysis": "METRICS Analysis analyse compare_models summarise",
    "kvcat.evals.evaluation": "CompressingEvaluation Evaluation LinePlot PaperFigures ReportFacts "
    "ResultTable",
    "kvcat.evals.evaluations.suffix": "CORPORA SuffixTask Window corpus_documents "
    "windows_from_documents",
    "kvcat.evals.questions": "Question QuestionTask answer_ids",
    "kvcat.evals.records": "ResultsFolder read_config read_costs read_events read_records",
    "kvcat.evals.registry": "evaluation_names find_evaluation",
    "kvcat.evals.runner": "Plan evaluate progress_bar",
    "kvcat.evals.task": "Baseline Method Prepared Task Values vocabulary",
    "kvcat.stats.intervals": "ClusterBootstrap Estimate",
    "kvcat.stats.metrics": "Metric share_of_examples",
    "kvcat.stats.records": "Record models_of",
    "kvcat.stats.summary": "comparison_pairs",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
