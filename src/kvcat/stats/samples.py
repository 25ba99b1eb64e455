"""Records grouped by model, method, keep ratio, step and stratum, and the groups' figures."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pandas as pd

from kvcat.errors import InputError
from kvcat.stats.intervals import NO_ESTIMATE, Array, ClusterBootstrap, Draws, Estimate
from kvcat.stats.metrics import METRICS
from kvcat.stats.records import EXAMPLE as EXAMPLE
from kvcat.stats.records import PLACE, Record, models_of
from kvcat.stats.shares import share

SIZES = ("num_examples", "num_documents", "num_seeds")
_NO_STEP = -1


class Cell(NamedTuple):
    """The model, method, keep ratio, step and stratum of a row of the summary."""

    model: str  # without ``@SEED``
    method: str  # label with options
    keep_ratio: float
    step: int | None
    stratum: str  # "": all examples


@dataclass(frozen=True)
class Sample:
    """One model's values in a cell, averaged over the seeds of a compressor."""

    values: pd.DataFrame  # index (document, example), columns (value, training run)
    strata: pd.Series  # stratum of each example
    num_resamples: int

    @cached_property
    def documents(self) -> Array:
        """The name of each example's document."""
        return self.values.index.get_level_values("document").to_numpy(dtype=str)

    @cached_property
    def runs(self) -> list[str]:
        """The names of the training runs."""
        return list(self.values.columns.unique("run"))

    @property
    def sizes(self) -> dict[str, int]:
        """The numbers of examples, documents and training runs, by the names in ``SIZES``."""
        sizes = (len(self.values), self.bootstrap.num_documents, len(self.runs))
        return dict(zip(SIZES, sizes, strict=True))

    @cached_property
    def bootstrap(self) -> ClusterBootstrap:
        """The bootstrap over documents, within strata, and over training runs."""
        return ClusterBootstrap(
            self.documents,
            strata=list(self.strata[self.values.index]),
            seeds=self.runs,
            num_resamples=self.num_resamples,
        )

    @cached_property
    def columns(self) -> dict[str, Array]:
        """By name, every value that all records have, as an array (runs, examples)."""
        names = list(self.values.columns.unique(0))
        by_name = self.values.to_numpy().T.reshape(len(names), len(self.runs), len(self.values))
        return dict(zip(names, by_name, strict=True))

    @property
    def metrics(self) -> list[str]:
        """The names of the metrics that these values define."""
        return [name for name in METRICS if self.columns.keys() >= set(columns_of(name))]

    def defines(self, name: str) -> bool:
        """Whether a metric is defined for this sample."""
        column = METRICS[name].defined_where
        return not column or column in self._clearly_above_0

    @cached_property
    def _clearly_above_0(self) -> set[str]:
        """The columns on which metrics depend whose means are above 0 with their intervals."""
        conditions = {METRICS[name].defined_where for name in self.metrics} - {""}
        means = {column: self.bootstrap.mean(self.columns[column]) for column in conditions}
        return {column for column, mean in means.items() if mean.value > 0.0 and mean.low > 0.0}

    def draws(self, name: str) -> Draws:
        """A metric over all examples, and over every resample."""
        function = METRICS[name].function
        columns = [self.columns[column] for column in columns_of(name)]
        if function is None:
            return self.bootstrap.median(*columns)
        return self.bootstrap.of_means(function, *columns)

    def estimate(self, name: str) -> Estimate:
        """A metric over all examples, with its interval."""
        if not self.defines(name):
            return NO_ESTIMATE
        if not METRICS[name].share:
            return self.bootstrap.estimate(self.draws(name))
        by_document = self._share(name)
        if len(self.runs) == 1 or np.isnan(by_document.value):
            return by_document
        # Wilson's interval does not cover variation between training runs
        by_run = self.bootstrap.estimate(self.draws(name)).union(by_document)
        return Estimate(by_run.value, max(0.0, by_run.low), min(1.0, by_run.high))

    def _share(self, name: str) -> Estimate:
        """A share with the interval of ``share``; a second column, if any, selects the examples."""
        score, *counts = (self.columns[column].mean(axis=0) for column in columns_of(name))
        documents = self.documents
        if counts:
            counted = counts[0] > 0
            score = score[counted] / counts[0][counted]
            documents = documents[counted]
        return share(score, documents) if len(score) else NO_ESTIMATE

    def on(self, examples: pd.Index) -> "Sample":
        """The sample, restricted to some of its examples."""
        if self.values.index.equals(examples):
            return self
        return replace(self, values=self.values.loc[examples])


def record_table(records: Iterable[Record]) -> pd.DataFrame:
    """A table with a row per record and a column per value; ``step`` is -1 if there is none.

    ``label`` is the model's label. ``model`` and ``run`` are its parts before and after the ``@``.

    Raises:
        InputError: the records are from two data sets, or one label has two sets of weights.
    """
    records = list(records)
    models_of(records)
    datasets = sorted({record.dataset for record in records})
    if len(datasets) > 1:
        raise InputError(f"records of two data sets: {datasets[0]!r} and {datasets[1]!r}")
    places = []
    for record in records:
        model, _, run = record.model.partition("@")
        step = _NO_STEP if record.step is None else record.step
        places.append(
            (
                record.model,
                model,
                run,
                record.method_label,
                record.keep_ratio,
                step,
                record.stratum,
                record.document,
                record.example,
            )
        )
    values = pd.DataFrame([record.values for record in records])
    table = pd.DataFrame(places, columns=PLACE).join(values)
    for metric in METRICS.values():
        for name, (first, second) in metric.products.items():
            if first in table and second in table:
                table[name] = table[first] * table[second]
    return table


def samples_by_cell(table: pd.DataFrame, num_resamples: int) -> dict[Cell, Sample]:
    """The sample of each cell in a ``record_table``, in the order of the report's tables.

    Cells of strata follow those of all examples; a single stratum has none. Models and methods are
    in the order of the records; keep ratios and steps ascend.
    """
    table = table.copy()
    for name in ("model", "method"):
        table[name] = pd.Categorical(table[name], table[name].unique())
    strata = table.drop_duplicates(EXAMPLE).set_index(EXAMPLE)["stratum"]
    names = list(table["stratum"].unique())
    samples = {}
    for stratum in [""] + [name for name in names if name and len(names) > 1]:
        rows = table[table["stratum"] == stratum] if stratum else table
        groups = rows.groupby(["model", "method", "keep_ratio", "step"], observed=True)
        for (model, method, keep_ratio, step), cell_rows in groups:
            cell = Cell(model, method, keep_ratio, None if step == _NO_STEP else int(step), stratum)
            samples[cell] = Sample(_values(cell_rows), strata, num_resamples)
    return samples


def _values(rows: pd.DataFrame) -> pd.DataFrame:
    """The ``values`` of a ``Sample``, from the rows of its cell.

    Values that some record lacks are dropped, and so are examples that some training run lacks.
    """
    complete = rows.dropna(axis=1)
    names = [name for name in complete if name not in PLACE]
    return complete.groupby([*EXAMPLE, "run"])[names].mean().unstack("run").dropna()


def columns_of(name: str) -> tuple[str, ...]:
    """The names of the recorded values that a metric uses."""
    return METRICS[name].columns or (name,)
