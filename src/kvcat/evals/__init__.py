"""Evaluations of compact caches: how much of a model's predictions they keep; resumable.

Names are imported on first use, so that the options of an evaluation load without torch.
"""
# isort: skip_file

from typing import TYPE_CHECKING

from kvcat.extras import on_first_use

if TYPE_CHECKING:
    # fmt: off
    from kvcat.evals.ability import models_below_chance as models_below_chance
    from kvcat.evals.analysis import (
        METRICS as METRICS, Analysis as Analysis, analyse as analyse,
        compare_models as compare_models, summarise as summarise,
    )
    from kvcat.evals.evaluation import (
        CompressingEvaluation as CompressingEvaluation, Evaluation as Evaluation,
        LinePlot as LinePlot, PaperFigures as PaperFigures, ReportFacts as ReportFacts,
        ResultTable as ResultTable,
    )
    from kvcat.evals.evaluations.suffix import (
        CORPORA as CORPORA, SuffixTask as SuffixTask, Window as Window,
        corpus_documents as corpus_documents, windows_from_documents as windows_from_documents,
    )
    from kvcat.evals.questions import (
        Question as Question, QuestionTask as QuestionTask, answer_ids as answer_ids,
    )
    from kvcat.evals.records import (
        ResultsFolder as ResultsFolder, read_config as read_config, read_costs as read_costs,
        read_events as read_events, read_records as read_records,
    )
    from kvcat.evals.registry import (
        evaluation_names as evaluation_names, find_evaluation as find_evaluation,
    )
    from kvcat.evals.runner import Plan as Plan, evaluate as evaluate, progress_bar as progress_bar
    from kvcat.evals.task import (
        Baseline as Baseline, Method as Method, Prepared as Prepared, Task as Task,
        Values as Values, vocabulary as vocabulary,
    )
    from kvcat.stats.intervals import ClusterBootstrap as ClusterBootstrap, Estimate as Estimate
    from kvcat.stats.metrics import Metric as Metric, share_of_examples as share_of_examples
    from kvcat.stats.records import Record as Record, models_of as models_of
    from kvcat.stats.summary import comparison_pairs as comparison_pairs
    # fmt: on

__getattr__, __dir__, __all__ = on_first_use(__name__, __file__)  # pyright: ignore
