"""Base classes of evaluations: options, examples, metrics and facts for the report.

Nothing here imports torch, so that help texts and errors about options appear immediately.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import tyro

from kvcat.evals.task import Method, Task
from kvcat.option_types import (
    Count,
    Device,
    Dtype,
    Fractions,
    Models,
    Seed,
    Seeds,
    Strings,
    flat,
)
from kvcat.settings import DEFAULT_METHOD
from kvcat.stats.metrics import Metric

if TYPE_CHECKING:
    import pandas as pd

    from kvcat.stats.records import Record

BatchSize = Annotated[Count, tyro.conf.arg(help="Examples per forward pass.")]
DataSeed = Annotated[Seed, tyro.conf.arg(help="Seed of the random selection of examples.")]


@dataclass(frozen=True, kw_only=True)
class ReportFacts:
    """Facts about an evaluation that its report needs.

    Args:
        title: title of its section.
        metrics: names in ``METRICS`` for tables and plots, in this order: the deciding metric, the
            quality on the compact cache, the loss of dense quality, others.
        example_name: name for one example, such as "window".
        stratum_name: name for one stratum, such as "task".
        plotted_metrics: metrics that are plotted against the slots kept; empty: the first two
            metrics, if they have the same unit.
        method_metrics: metrics by which the methods are plotted if there is one model; empty: as
            plotted_metrics.
        reported_steps: gradient steps that tables show in addition to the last one.
        step_metrics: metrics that are plotted against gradient steps; empty: the deciding one.
        averages: averages over strata that are reported: by name, the strata.
        sizes: text about the length of the examples, with settings of the results folder in braces,
            such as "{length} tokens each"; empty: not shown.
    """

    title: str
    metrics: tuple[str, ...]
    example_name: str = "example"
    stratum_name: str = "stratum"
    plotted_metrics: tuple[str, ...] = ()
    method_metrics: tuple[str, ...] = ()
    reported_steps: tuple[int, ...] = ()
    step_metrics: tuple[str, ...] = ()
    averages: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sizes: str = ""

    @property
    def deciding(self) -> str:
        """The metric of the primary cell if the user names none."""
        return self.metrics[0]


@dataclass(frozen=True, kw_only=True)
class PaperFigures:
    """The figures in the KV-CAT paper that belong to an evaluation (``paper_tables.csv``).

    Args:
        metrics: name of the paper's metric, by name of our metric.
        names_model: whether the paper names the model of these figures.
        compresses: whether the figures are for compressed caches.
        all_strata: the paper's name for all strata together.
        average: name of our average over strata that the paper prints as well.
        corpora: the paper's name of a data set, by our name; empty: the paper used one data set.
        main_corpus: with ``corpora``, the data set of those figures for which the paper names none.
    """

    metrics: Mapping[str, str]
    names_model: bool = True
    compresses: bool = True
    all_strata: str = ""
    average: str = ""
    corpora: Mapping[str, str] = field(default_factory=dict)
    main_corpus: str = ""


@dataclass(frozen=True, kw_only=True)
class LinePlot:
    """A plot with a line per model over a whole number, on two logarithmic axes.

    Args:
        title: title of the plot.
        rows: one point per row; the column ``model`` names its line.
        x: column with the whole number.
        panels: by column, the title of the panel that shows it; all panels have the same scale.
        x_label, y_label: labels of the axes.
        unit: unit of the values.
    """

    title: str
    rows: "pd.DataFrame"
    x: str
    panels: Mapping[str, str]
    x_label: str
    y_label: str
    unit: str


@dataclass(frozen=True, kw_only=True)
class ResultTable:
    """A table that an evaluation prints, and writes next to its records, instead of a report.

    Args:
        name: name of the files NAME.csv and NAME.png.
        frame: content of the CSV file.
        text: text to print.
        plot: plot of the table.
    """

    name: str
    frame: "pd.DataFrame"
    text: str
    plot: LinePlot


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Base class of evaluations; a subclass is a frozen dataclass with ``kw_only=True``.

    The fields of a subclass are the options of ``kvcat eval NAME``. Its docstring and those of its
    fields are the help text. An instance holds the options of one command. NAME is the file's name
    in ``kvcat.evals.evaluations``, or the entry point of another package in the group
    ``kvcat.evaluations``.
    """

    facts: ClassVar[ReportFacts]
    """Facts that the report needs."""
    new_metrics: ClassVar[Mapping[str, Metric]] = {}
    """Metrics by name that only this evaluation has."""
    paper: ClassVar[PaperFigures | None] = None
    """The KV-CAT paper's figures for this evaluation; None: there are none."""
    folder_option: ClassVar[str] = ""
    """An option whose values are evaluated in separate folders; empty: there is none."""

    models: tyro.conf.Positional[Models]
    out: Path
    """Results folder. A stopped evaluation continues there; processes of torchrun share work."""
    device: Device = "cpu"
    dtype: Dtype = "float32"
    data_seed: DataSeed = 0
    batch_size: BatchSize = 8

    def make_task(self, tokenizer: Any, value: Any) -> Task:
        """The task: examples, and their scoring.

        Args:
            tokenizer: tokenizer of the first model.
            value: value of the ``folder_option``; None: its default, or there is no such option.
        """
        raise NotImplementedError

    @classmethod
    def task(cls, tokenizer: Any, value: Any = None, **options: Any) -> Task:
        """The task of ``make_task`` for Python: with options by name, the others at their defaults.

        Args:
            tokenizer, value: as there.
            options: fields of this class; several values of an option as a list or a tuple.
        """
        # on the command line an option may be repeated, each time with several values (``flat``)
        grouped: dict[str, Any] = {
            name: (tuple(option),) if isinstance(option, list | tuple) else option
            for name, option in options.items()
        }
        return cls(models=(), out=Path(), **grouped).make_task(tokenizer, value)

    def method_specs(self) -> list[str]:
        """The methods to evaluate: NAME or NAME,option=value,... each; empty: dense model only."""
        return []

    def settings(self) -> dict[str, Any]:
        """Further arguments for ``kvcat.evals.evaluate``."""
        return {"methods": [], "keep_ratios": [], "batch_size": self.batch_size}

    def result_table(self, records: "Sequence[Record]") -> ResultTable | None:  # noqa: ARG002
        """The table to print at the end; None: the main figures of the report are printed."""
        return None


@dataclass(frozen=True, kw_only=True)
class CompressingEvaluation(Evaluation):
    """Base class of evaluations of compressed caches, with options for methods and keep ratios."""

    default_keeps: ClassVar[tuple[float, ...]] = (0.05, 0.1, 0.2, 0.4)
    """Default fractions of the slots that caches keep."""

    method: Strings = ()
    """Methods: NAME or NAME,option=value,... (docs/compress.md); by default attention-matching."""
    keep: Fractions = ()
    """Fractions of the slots to KEEP, each in (0, 1]."""
    seed: Seeds = ()
    """Seeds of randomised compressors; the report averages over them; by default 0."""
    primary: Annotated[
        tuple[str, float, str] | None,
        tyro.conf.arg(metavar="METHOD KEEP METRIC", help_behavior_hint=""),
    ] = None
    """Primary cell, such as attention-matching 0.1 nll; by default the first of each."""
    speed: bool = False
    """Also time answers: seconds to the first token, and tokens per second after it."""

    def method_specs(self) -> list[str]:  # noqa: D102
        return flat(self.method) or [DEFAULT_METHOD]

    def keep_ratios(self) -> list[float]:
        """The fractions of the slots that caches keep."""
        return flat(self.keep) or list(self.default_keeps)

    def settings(self) -> dict[str, Any]:  # noqa: D102
        settings: dict[str, Any] = {
            "methods": Method.parse(self.method_specs()),
            "keep_ratios": self.keep_ratios(),
            "seeds": flat(self.seed) or [0],
            "batch_size": self.batch_size,
            "speed": self.speed,
        }
        if self.primary is not None:
            spec, keep_ratio, metric = self.primary
            (method,) = Method.parse([spec])
            settings["primary"] = (method.label, keep_ratio, metric)
        return settings
