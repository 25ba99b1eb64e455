"""The class of metrics, and the metrics that several evaluations share.

A metric of a single evaluation is defined in that evaluation's file (``kvcat.evals.evaluations``).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from kvcat.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A figure that is computed over the examples of an evaluation."""

    label: str  # heading of a column
    description: str  # one line for a reader
    long_label: str = ""  # used where space allows; empty: the label
    unit: str = "nats/token"  # empty for a share
    decimals: int = 3  # decimals in tables
    percent: bool = False  # shown in percent
    log_scale: bool = False  # never negative, and drawn on a logarithmic axis
    lower_is_better: bool = True
    share: bool = False  # mean of a per-example score in [0, 1], with the interval of ``share``
    ratio: bool = False  # the ratio of two models is meaningful, because 0 means no loss
    comparable: bool = True  # defined on the same examples for all models, which are compared by it
    of_dense_model: bool = False  # the same for every method and keep ratio
    dense_metric: str = ""  # name of the same metric with the whole cache
    shows_ability: bool = False  # on the whole cache, it shows ability at the task
    chance: float = 0.0  # value for a model that guesses
    chance_by_stratum: Mapping[str, float] = field(default_factory=dict)  # where chance differs
    columns: tuple[str, ...] = ()  # per-example values used; empty: the one of its name
    function: Callable[..., Any] | None = np.asarray  # of their means; None: the median
    defined_where: str = ""  # column whose mean must be clearly above 0; empty: none
    # columns that are products of two recorded values
    products: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def heading(self) -> str:
        """The heading of a column of values."""
        return f"{self.label} (%)" if self.percent else self.label

    @property
    def difference_heading(self) -> str:
        """The heading of a column of differences between models."""
        return f"{self.label} diff. (pt)" if self.percent else f"{self.label} diff."

    @property
    def difference_decimals(self) -> int:
        """The number of decimals of a difference, which is smaller than the values."""
        return self.decimals if self.percent else 4

    @property
    def scale(self) -> float:
        """The factor from a value to the displayed figure."""
        return 100.0 if self.percent else 1.0


share_of_examples = partial(
    Metric, unit="", decimals=1, percent=True, lower_is_better=False, share=True
)
"""A metric that averages a score in [0, 1] over examples, in percent; larger is better."""

METRICS = {
    "nll": Metric(
        label="NLL compact",
        description="Negative log-likelihood of the real suffix, or of the right answer, on the "
        "compact cache.",
        long_label="NLL on the compact cache",
        dense_metric="nll_dense",
    ),
    "delta_nll": Metric(
        label="delta NLL",
        description="NLL on the compact cache minus dense NLL.",
        decimals=4,
        ratio=True,
    ),
    "nll_dense": Metric(
        label="NLL dense",
        description="Negative log-likelihood with the whole cache; training may raise it.",
        long_label="Dense loss",
        of_dense_model=True,
    ),
    "context_gain": Metric(
        label="context gain",
        description="NLL without the prefix minus dense NLL, of suffix tokens 2 onwards: the gain "
        "from the prefix.",
        lower_is_better=False,
        of_dense_model=True,
        shows_ability=True,
    ),
    "exact_match": share_of_examples(
        label="exact match",
        description="Share of examples whose greedy answer on the compact cache is right.",
        dense_metric="dense_exact_match",
        shows_ability=True,
    ),
    "dense_exact_match": share_of_examples(
        label="exact match, dense",
        description="Share of examples whose greedy answer on the whole cache is right.",
        of_dense_model=True,
    ),
}
"""Every metric by its name in records, summaries and CSV files.

Those defined here are shared by several evaluations; ``register_metrics`` adds those of a single
evaluation.
"""

_OWNERS = dict.fromkeys(METRICS, "kvcat.stats")


def register_metrics(metrics: Mapping[str, Metric], owner: str) -> None:
    """Add the metrics of an evaluation to ``METRICS``; a second call has no effect.

    Two evaluations may share a metric, but two metrics may not share a name. A share is the mean of
    the value of its name; one by which models are not compared may be the first of two columns over
    the second.

    Args:
        owner: the class of the evaluation, for error messages.

    Raises:
        InputError: another evaluation has a different metric with one of these names, or a share is
            of other columns.
    """
    for name, metric in metrics.items():
        of_values = (metric.columns or (name,)) == (name,) and metric.function is np.asarray
        of_some = len(metric.columns) == 2 and metric.function is np.divide
        if metric.share and not of_values and not (of_some and not metric.comparable):
            raise InputError(
                f"{owner}: the share {name!r} is the mean of the value of its name, without "
                "columns and function"
            )
        first_owner = _OWNERS.setdefault(name, owner)
        if first_owner == owner:
            METRICS[name] = metric
        elif METRICS[name] != metric:
            raise InputError(
                f"{owner} has a metric {name!r}, but {first_owner} has one of that "
                "name already: rename it"
            )
