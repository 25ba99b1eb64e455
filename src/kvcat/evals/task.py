"""What an evaluation is made of: examples, baselines, and how a batch of them is scored on a compact cache."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from transformers import PreTrainedModel

from kvcat.cache import CompactCache
from kvcat.compress import Trace

Values = dict[str, float]


@runtime_checkable
class Example(Protocol):
    """One thing to score; a task's own examples hold more."""

    @property
    def document(self) -> str:
        """Name of what it was taken from, the unit that intervals resample."""
        ...

    @property
    def name(self) -> str:
        """Its name, unique in the document."""
        ...

    @property
    def stratum(self) -> str:
        """Group that is reported apart and resampled apart, e.g. a depth or a sub-domain; may be empty."""
        ...


@dataclass(frozen=True)
class Baseline:
    """A score without any compression, beside which the compressed ones stand.

    Args:
        name: ``dense`` (the whole cache), ``no-context`` (none) or ``truncated`` (as much plain text as the budget).
        keep_ratio: fraction of the context's tokens that it sees, in [0, 1].
    """

    name: str
    keep_ratio: float


@runtime_checkable
class Prepared(Protocol):
    """A batch of examples on one model; the dense forward runs when first needed."""

    @property
    def trace(self) -> Trace:
        """What compressors are fitted to, one row per example."""
        ...

    def score(self, cache: CompactCache) -> list[Values]:
        """Values per example when the compact cache stands for the context."""
        ...

    def baseline(self, baseline: Baseline) -> list[Values]:
        """Values per example without compression; only those of the task's ``baselines`` are asked for."""
        ...


@runtime_checkable
class Task(Protocol):
    """An evaluation's examples and how they are scored."""

    @property
    def evaluation(self) -> str:
        """Name of the evaluation: ``suffix``, ``needle``, ``longbench``, ``qa``, ``ruler``."""
        ...

    @property
    def dataset(self) -> str:
        """Name of the data set, part of every record."""
        ...

    @property
    def tokenized(self) -> bool:
        """Whether examples are token ids, so that all models need one tokenizer."""
        ...

    @property
    def examples(self) -> Sequence[Example]:
        """In the order of evaluation, so that the first n are a fair sample for every n."""
        ...

    @property
    def baselines(self) -> Sequence[Baseline]:
        """Those that are scored for every model."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """What the results depend on, JSON values: lengths, options, and a hash of all examples under ``manifest``."""
        ...

    def batch_key(self, example: Any) -> Hashable:
        """Neighbouring examples of equal keys may share a batch."""
        ...

    def check(self, label: str, model: PreTrainedModel, tokenizer: Any) -> None:
        """Raises InputError where this model cannot run these examples (positions, vocabulary), before heavy work."""
        ...

    def prepare(self, model: PreTrainedModel, tokenizer: Any, batch: Sequence[Any]) -> Prepared:
        """The batch on a model; the tokenizer may be None where the examples are token ids."""
        ...
