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
        Analysis,
        analyse,
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
    from kvcat.evals.intervals import (
        ClusterBootstrap,
        Estimate,
    )
    from kvcat.evals.metrics import (
        Metric,
        share_of_examples,
    )
    from kvcat.evals.records import (
        Record,
        ResultsFolder,
        models_of,
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
    from kvcat.evals.samples import (
        METRICS,
    )
    from kvcat.evals.suffix import (
        CORPORA,
        SuffixTask,
        Window,
        corpus_documents,
        windows_from_documents,
    )
    from kvcat.evals.summary import (
        compare_models,
        comparison_pairs,
        summarise,
    )
    from kvcat.evals.task import (
        Baseline,
        Method,
        Prepared,
        Task,
        Values,
        vocabulary,
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
    "vocabulary": "task",
    "answer_ids": "answers",
    "CORPORA": "suffix",
    "METRICS": "samples",
    "Analysis": "analysis",
    "Baseline": "task",
    "ClusterBootstrap": "intervals",
    "CompressingEvaluation": "evaluation",
    "Estimate": "intervals",
    "Evaluation": "evaluation",
    "LinePlot": "evaluation",
    "Method": "task",
    "Metric": "metrics",
    "PaperFigures": "evaluation",
    "Prepared": "task",
    "Question": "answers",
    "QuestionTask": "answers",
    "Record": "records",
    "ReportFacts": "evaluation",
    "ResultTable": "evaluation",
    "ResultsFolder": "records",
    "SuffixTask": "suffix",
    "Task": "task",
    "Values": "task",
    "Window": "suffix",
    "analyse": "analysis",
    "compare_models": "summary",
    "comparison_pairs": "summary",
    "configuration": "runner",
    "corpus_documents": "suffix",
    "evaluate": "runner",
    "evaluation_names": "registry",
    "find_evaluation": "registry",
    "models_below_chance": "ability",
    "models_of": "records",
    "progress_bar": "runner",
    "read_config": "records",
    "read_costs": "records",
    "read_events": "records",
    "read_records": "records",
    "share_of_examples": "metrics",
    "summarise": "summary",
    "windows_from_documents": "suffix",
}
"""The module that defines each name."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
