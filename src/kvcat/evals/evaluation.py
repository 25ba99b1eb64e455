"""What an evaluation is: options, examples, metrics, and what a report shows of it.

Nothing here imports torch, so that help texts and complaints about options come at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import tyro

from kvcat.evals.metrics import Metric
from kvcat.option_types import Count, Device, Dtype, Fractions, Models, Seed, Seeds, Strings, flat

if TYPE_CHECKING:
    import pandas as pd

    from kvcat.evals.records import Record
    from kvcat.evals.task import Method, Task

BatchSize = Annotated[Count, tyro.conf.arg(help="Examples per forward pass.")]
DataSeed = Annotated[Seed, tyro.conf.arg(help="Seed of the draw of examples.")]


@dataclass(frozen=True, kw_only=True)
class ReportFacts:
    """What a report shows of an evaluation.

    Args:
        title: of its section.
        metrics: names in ``METRICS`` for tables and plots, in this order: the one that decides,
            what a user gets, the price, others.
        example_name: what one example is called.
        stratum_name: what a stratum is called.
        plotted_metrics: drawn against the slots kept; empty: the first two metrics, if they have
            the same unit.
        reported_steps: gradient steps in the tables besides the last one.
        step_metrics: drawn against gradient steps; empty: the deciding one.
        averages: strata whose mean is reported, by a name for them.
        sizes: how long the examples are, with settings of the results folder in braces, such as
            "{length} tokens each"; empty: not shown.
    """

    title: str
    metrics: tuple[str, ...]
    example_name: str = "example"
    stratum_name: str = "stratum"
    plotted_metrics: tuple[str, ...] = ()
    reported_steps: tuple[int, ...] = ()
    step_metrics: tuple[str, ...] = ()
    averages: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sizes: str = ""

    @property
    def deciding(self) -> str:
        """The metric that decides where no other is named."""
        return self.metrics[0]


@dataclass(frozen=True, kw_only=True)
class PaperFigures:
    """Which figures of the KV-CAT paper belong to an evaluation (``paper_tables.csv``).

    Args:
        metrics: the paper's metric, by ours.
        names_model: whether the paper says which model the figures are of.
        compresses: whether they are of compressed caches.
        all_strata: what the paper calls all strata together.
        average: the one of our averages over strata that the paper prints.
        corpora: the paper's name of a data set, by ours; empty: it used one.
        main_corpus: with ``corpora``, the data set of the figures that name none.
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
    """A line per model over a whole number, on two logarithmic axes.

    Args:
        title: of the plot.
        rows: a point of each line per row; ``model`` names the line.
        x: column of the whole number.
        panels: title of a panel by the column that it shows; all panels have one scale.
        x_label, y_label: of the axes.
        unit: of the values.
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
    """What an evaluation prints and writes next to its records in place of a report.

    Args:
        name: of the files NAME.csv and NAME.png.
        frame: for the CSV file.
        text: to print.
        plot: of the table.
    """

    name: str
    frame: "pd.DataFrame"
    text: str
    plot: LinePlot


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """An evaluation; a subclass is a frozen dataclass with ``kw_only=True``.

    Its fields are the options of ``kvcat eval NAME``, their docstrings and its own the help text.
    An instance holds the options of one command. NAME is the file's name in
    ``kvcat.evals.evaluations``, or the entry point of another package in the group
    ``kvcat.evaluations``.
    """

    facts: ClassVar[ReportFacts]
    """What a report shows."""
    new_metrics: ClassVar[Mapping[str, Metric]] = {}
    """Metrics that no other evaluation has, by name."""
    paper: ClassVar[PaperFigures | None] = None
    """The KV-CAT paper's figures for it; None: there are none."""
    folder_option: ClassVar[str] = ""
    """The option of which every value is evaluated in its own folder; empty: there is none."""

    models: tyro.conf.Positional[Models]
    out: Path
    """Folder to write; a stopped evaluation continues. Processes of torchrun share the work."""
    device: Device = "cpu"
    dtype: Dtype = "float32"
    data_seed: DataSeed = 0
    batch_size: BatchSize = 8

    def make_task(self, tokenizer: Any, value: Any) -> "Task":
        """The examples and how they are scored.

        Args:
            tokenizer: of the first model.
            value: of the ``folder_option``; None: its default, or there is no such option.
        """
        raise NotImplementedError

    def method_specs(self) -> list[str]:
        """The methods to evaluate, each NAME or NAME,option=value,...; none without compression."""
        return []

    def settings(self) -> dict[str, Any]:
        """Further arguments of ``kvcat.evals.evaluate``."""
        return {"methods": [], "keep_ratios": [], "batch_size": self.batch_size}

    def result_table(self, records: "Sequence[Record]") -> ResultTable | None:  # noqa: ARG002
        """What is printed at the end in place of the figures of a report; None: these."""
        return None


@dataclass(frozen=True, kw_only=True)
class CompressingEvaluation(Evaluation):
    """An evaluation of compressed caches, with the options for methods and keep ratios."""

    default_keeps: ClassVar[tuple[float, ...]] = (0.05, 0.1, 0.2, 0.4)
    """Fractions of the slots that caches keep if no others are given."""

    method: Strings = ()
    """Methods, NAME or NAME,option=value,... (docs/compress.md); attention-matching by default."""
    keep: Fractions = ()
    """Fractions of the slots to KEEP, each in (0, 1]."""
    seed: Seeds = ()
    """Seeds of compressors that draw; the report averages the records of several. 0 by default."""
    primary: Annotated[
        tuple[str, float, str] | None,
        tyro.conf.arg(metavar="METHOD KEEP METRIC"),
    ] = None
    """The cell that decides, such as attention-matching 0.1 nll; by default the first of each."""
    speed: bool = False
    """Also time answers: seconds to the first token, tokens per second."""

    def method_specs(self) -> list[str]:  # noqa: D102
        return flat(self.method) or ["attention-matching"]

    def keep_ratios(self) -> list[float]:
        """The fractions of the slots that caches keep."""
        return flat(self.keep) or list(self.default_keeps)

    def settings(self) -> dict[str, Any]:  # noqa: D102
        settings: dict[str, Any] = {
            "methods": parse_methods(self.method_specs()),
            "keep_ratios": self.keep_ratios(),
            "seeds": flat(self.seed) or [0],
            "batch_size": self.batch_size,
            "speed": self.speed,
        }
        if self.primary is not None:
            spec, keep_ratio, metric = self.primary
            method = parse_methods([spec])[0]
            settings["primary"] = (method.label, keep_ratio, metric)
        return settings


def parse_methods(specs: list[str]) -> "list[Method]":
    """The methods of a command line; ``InputError`` for an unknown one or wrong options."""
    from kvcat.compress import make_compressor, parse_method
    from kvcat.evals.task import Method

    methods = [Method(*parse_method(spec)) for spec in specs]
    for method in methods:
        make_compressor(method.name, **method.options)
    return methods
