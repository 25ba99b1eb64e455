"""Base classes of tasks: examples, the scoring of a batch, and the methods to compare."""

import hashlib
import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from kvcat.errors import InputError, check_in
from kvcat.options import parse_spec
from kvcat.stats.records import method_label

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvcat.cache import CompactCache

Values = dict[str, float]


@dataclass(frozen=True)
class Baseline:
    """A score without compression, reported next to the compressed ones."""

    name: str  # dense (whole cache), no-context, or truncated (plain text of the given length)
    keep_ratio: float  # fraction of the context's tokens that are seen, in [0, 1]


@dataclass(frozen=True)
class Method:
    """A compressor to evaluate, with its keep ratios and number of examples."""

    name: str  # e.g. attention-matching
    options: Mapping[str, Any] = field(default_factory=dict)  # options that were set, JSON values
    keep_ratios: tuple[float, ...] | None = None  # each in (0, 1]; None: the evaluation's
    num_examples: int | None = None  # number of first examples; None: all

    @classmethod
    def parse(cls, specs: Iterable[str]) -> "list[Method]":
        """The methods of texts NAME or NAME,option=value,..., which are checked later."""
        return [cls(*parse_spec(spec)) for spec in specs]

    @property
    def label(self) -> str:
        """The name with the options, as in tables."""
        return method_label(self.name, self.options)


@dataclass(frozen=True)
class Prepared:
    """A batch of a task's examples that is scored on one model."""

    task: Any
    model: "PreTrainedModel"
    tokenizer: Any
    batch: Sequence[Any]

    trace: ClassVar[Any]
    """The trace to which compressors are fitted, a row per example; a subclass caches it."""

    def score(self, cache: "CompactCache") -> list[Values]:
        """The values of each example when the compact cache replaces the context."""
        raise NotImplementedError

    def baseline(self, baseline: Baseline) -> list[Values]:
        """The values of each example for one of the task's baselines."""
        raise NotImplementedError


class Task:
    """The base class of tasks: examples, and their scoring; subclasses are frozen dataclasses.

    Examples are frozen dataclasses; the first n are a fair sample. Each has ``document`` (its
    source, the unit that intervals resample), ``name`` (unique in the document) and ``stratum``
    (group that is also reported separately; may be empty).
    """

    evaluation: ClassVar[str]  # name of its ``Evaluation``, whose facts a report shows
    prepared: ClassVar[type[Prepared]]  # how its batches are scored
    compresses: ClassVar[bool] = True  # whether there is a context to compress
    baselines: ClassVar[Any] = (Baseline("dense", 1.0), Baseline("no-context", 0.0))
    examples: Any
    dataset: str  # its name, part of every record

    def describe(self) -> Mapping[str, Any]:
        """The settings on which the results depend, except the examples, as JSON values."""
        return {}

    def batch_key(self, example: Any) -> Hashable:  # noqa: ARG002
        """A key of the example; neighbouring examples with equal keys may share a batch."""
        return None

    def check(self, label: str, model: "PreTrainedModel", tokenizer: Any) -> None:
        """Raise ``InputError``, before heavy work, if a model cannot run these examples."""
        raise NotImplementedError

    def prepare(self, model: "PreTrainedModel", tokenizer: Any, batch: Sequence[Any]) -> Prepared:
        """The batch, prepared for a model."""
        return self.prepared(self, model, tokenizer, batch)


def manifest(examples: Sequence[Any]) -> str:
    """A hash of all fields of the examples, which ties a results folder to these examples."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(json.dumps(sorted(vars(example).items()), default=str).encode() + b"\n")
    return digest.hexdigest()


def vocabulary(tokenizer: Any) -> str:
    """A hash of the tokenizer's tokens and their ids."""
    tokens = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(tokens.encode()).hexdigest()


def check_vocabulary(label: str, tokenizer: Any, wanted: str) -> None:
    """Raise ``InputError`` if the hash of the tokenizer's vocabulary is not ``wanted``."""
    if tokenizer is None or vocabulary(tokenizer) != wanted:
        actual = "none" if tokenizer is None else "another one"
        raise InputError(
            f"the examples need the tokenizer they were made with, model {label!r} has {actual}"
        )


def check_tokenizer(label: str, tokenizer: Any, user: str) -> None:
    """Raise ``InputError`` if a model has no tokenizer, which ``user`` needs."""
    if tokenizer is None:
        raise InputError(f"{user} needs the tokenizer of model {label!r}")


def check_fits(
    label: str, model: "PreTrainedModel", *, num_tokens: int, largest: int, what: str
) -> None:
    """Raise ``InputError`` if a model has too few positions or tokens for the sequences.

    ``what`` names the sequences, and ``largest`` is their largest token.
    """
    from kvcat.models import check_length

    check_length(f"model {label!r}, {what}", num_tokens, model.config)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    if largest >= vocab_size:
        raise InputError(
            f"token {largest} is outside the vocabulary of model {label!r}, {vocab_size} tokens"
        )


def check_keep_ratios(keep_ratios: Sequence[float]) -> None:
    """Raise ``InputError`` if a keep ratio is outside (0, 1]."""
    for keep_ratio in keep_ratios:
        check_in("(0, 1]", keep_ratio=keep_ratio)
