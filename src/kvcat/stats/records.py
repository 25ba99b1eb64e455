"""A record: the values of one example for one model, method, keep ratio, step and seed."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from kvcat.errors import InputError
from kvcat.stats.metrics import METRICS

Key = tuple[Any, ...]
EXAMPLE = ["document", "example"]
PLACE = ["label", "model", "run", "method", "keep_ratio", "step", "stratum", *EXAMPLE]
"""The columns of a table of records that are not values."""
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Record:
    """The values of one example for one model, method, keep ratio, step and seed.

    Raises:
        InputError: a value is NaN, a share outside [0, 1], or called like a column of ``PLACE``.
    """

    model: str  # label; LABEL@SEED if there are several training runs
    fingerprint: str  # identifies the model's weights
    dtype: str  # dtype of the weights, e.g. float32
    method: str  # name of the compressor or of the baseline
    options: str  # options that were set, as JSON with sorted keys
    keep_ratio: float  # fraction of slots kept; for a baseline, fraction of the context seen
    step: int | None  # gradient steps; None for a method without steps
    seed: int | None  # seed of a randomised method; None for the others
    dataset: str
    stratum: str  # group that is also reported separately; may be empty
    document: str  # name of the document, the unit that is resampled
    example: str  # name of the example within its document
    values: dict[str, Any]  # a number by metric, kept as float; shares are in [0, 1]

    def __post_init__(self) -> None:
        place = f"model {self.model!r}, {self.method} at keep ratio {self.keep_ratio:g}"
        example = f"example {self.example!r} of {self.document!r}"
        numbers: dict[str, float] = {}
        for name, value in self.values.items():
            if name in PLACE:
                raise InputError(f"a value of {example} has the reserved name {name!r}: rename it")
            if isinstance(value, bool) or not isinstance(value, Real):
                raise InputError(f"{name} of example {self.example!r} is {value!r}, not a number")
            number = float(value)
            if math.isnan(number):
                raise InputError(f"{place}: {name} of {example} is {value}, not a number")
            is_share = name in METRICS and METRICS[name].share
            if is_share and not -_ROUNDING <= number <= 1.0 + _ROUNDING:
                raise InputError(f"{place}: {name} of {example} is {value}: a share is in [0, 1]")
            numbers[name] = number
        object.__setattr__(self, "values", numbers)

    @property
    def key(self) -> Key:
        """The fields that identify the record: all except the values and the stratum."""
        fields = vars(self).items()
        return tuple(value for name, value in fields if name not in ("stratum", "values"))

    @property
    def method_label(self) -> str:
        """The method's name with its options, e.g. ``attention-matching preset=paper``."""
        return method_label(self.method, json.loads(self.options))


def method_label(name: str, options: Mapping[str, Any]) -> str:
    """A method's name with its options, e.g. ``attention-matching preset=paper``."""
    settings = [f"{key}={value}" for key, value in sorted(options.items())]
    return " ".join([name, *settings])


def models_of(records: Iterable[Record]) -> dict[str, dict[str, str]]:
    """The fingerprint and dtype of each model's weights, by label.

    Raises:
        InputError: one label has two sets of weights, or ``check_runs``.
    """
    models: dict[str, dict[str, str]] = {}
    for record in records:
        weights = {"fingerprint": record.fingerprint, "dtype": record.dtype}
        known = models.setdefault(record.model, weights)
        if known != weights:
            raise InputError(
                f"the records of model {record.model!r} come from two different models"
            )
    check_runs({label: weights["fingerprint"] for label, weights in models.items()})
    return models


def check_runs(fingerprints: Mapping[str, str]) -> None:
    """Check that labels with the same part before the ``@`` are different runs of one model.

    Args:
        fingerprints: of each model's weights, by label.

    Raises:
        InputError: two runs have the same weights, or one has no ``@``.
    """
    known: dict[tuple[str, str], str] = {}
    for label, weights in fingerprints.items():
        model, at, _ = label.partition("@")
        other = known.setdefault((model, weights), label)
        if other != label:
            raise InputError(
                f"{other!r} and {label!r} have the same weights and are not two runs of {model!r}"
            )
        if at and model in fingerprints:
            raise InputError(
                f"{model!r} and {label!r} would count as two runs of one model: label every run of "
                "a model LABEL@SEED, and other models otherwise"
            )
