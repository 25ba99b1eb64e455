"""Evaluations of compact caches: how much of a model's predictions they keep; resumable.

Names are imported on first use, so that the options of an evaluation load without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcat.evals.ability import (
        models_below_chance,
    )
    from kvcat.evals.analysis import (
        METRICS,
        Analysis,
        analyse,
        compare_models,
        summarise,
    )
    from kvcat.evals.answers import (
        Question,
        QuestionTask,
        answer_ids,
    )
    from kvcat.evals.evaluation import (
        CompressingEvaluation,
        Evaluation,
        LinePlot,
        PaperFigures,
        ReportFacts,
        ResultTable,
    )
    from kvcat.evals.records import (
        ResultsFolder,
        read_config,
        read_costs,
        read_events,
        read_records,
    )
    from kvcat.evals.registry import (
        evaluation_names,
        find_evaluation,
    )
    from kvcat.evals.runner import (
        configuration,
        evaluate,
        progress_bar,
    )
    from kvcat.evals.suffix import (
        CORPORA,
        SuffixTask,
        Window,
        corpus_documents,
        windows_from_documents,
    )
    from kvcat.evals.task import (
        Baseline,
        Method,
        Prepared,
        Task,
        Values,
        vocabulary,
    )
    from kvcat.stats.intervals import (
        ClusterBootstrap,
        Estimate,
    )
    from kvcat.stats.metrics import (
        Metric,
        share_of_examples,
    )
    from kvcat.stats.records import (
        Record,
        models_of,
    )
    from kvcat.stats.summary import (
        comparison_pairs,
    )

__all__ = [
    "CORPORA",
    "METRICS",
    "Analysis",
    "Baseline",
    "ClusterBootstrap",
    "CompressingEvaluation",
    "Estimate",
    "Evaluation",
    "LinePlot",
    "Method",
    "Metric",
    "PaperFigures",
    "Prepared",
    "Question",
    "QuestionTask",
    "Record",
    "ReportFacts",
    "ResultTable",
    "ResultsFolder",
    "SuffixTask",
    "Task",
    "Values",
    "Window",
    "analyse",
    "answer_ids",
    "compare_models",
    "comparison_pairs",
    "configuration",
    "corpus_documents",
    "evaluate",
    "evaluation_names",
    "find_evaluation",
    "models_below_chance",
    "models_of",
    "progress_bar",
    "read_config",
    "read_costs",
    "read_events",
    "read_records",
    "share_of_examples",
    "summarise",
    "vocabulary",
    "windows_from_documents",
]
_MODULES = {
    "vocabulary": "evals.task",
    "answer_ids": "evals.answers",
    "CORPORA": "evals.suffix",
    "METRICS": "evals.analysis",
    "Analysis": "evals.analysis",
    "Baseline": "evals.task",
    "ClusterBootstrap": "stats.intervals",
    "CompressingEvaluation": "evals.evaluation",
    "Estimate": "stats.intervals",
    "Evaluation": "evals.evaluation",
    "LinePlot": "evals.evaluation",
    "Method": "evals.task",
    "Metric": "stats.metrics",
    "PaperFigures": "evals.evaluation",
    "Prepared": "evals.task",
    "Question": "evals.answers",
    "QuestionTask": "evals.answers",
    "Record": "stats.records",
    "ReportFacts": "evals.evaluation",
    "ResultTable": "evals.evaluation",
    "ResultsFolder": "evals.records",
    "SuffixTask": "evals.suffix",
    "Task": "evals.task",
    "Values": "evals.task",
    "Window": "evals.suffix",
    "analyse": "evals.analysis",
    "compare_models": "evals.analysis",
    "comparison_pairs": "stats.summary",
    "configuration": "evals.runner",
    "corpus_documents": "evals.suffix",
    "evaluate": "evals.runner",
    "evaluation_names": "evals.registry",
    "find_evaluation": "evals.registry",
    "models_below_chance": "evals.ability",
    "models_of": "stats.records",
    "progress_bar": "evals.runner",
    "read_config": "evals.records",
    "read_costs": "evals.records",
    "read_events": "evals.records",
    "read_records": "evals.records",
    "share_of_examples": "stats.metrics",
    "summarise": "evals.analysis",
    "windows_from_documents": "evals.suffix",
}
"""The module that defines each name."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"kvcat.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
