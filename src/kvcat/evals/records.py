"""Results on disk, append-only: a JSON line per example, model, method, keep ratio, step, seed."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvcat.cache import are_comparable
from kvcat.errors import InputError, one_line
from kvcat.evals.registry import evaluation_names, find_evaluation
from kvcat.files import LOCK_FILE, append_jsonl, claim_folder, one_writer, read_json, read_jsonl

_CONFIG_FIELDS = ("evaluation", "dataset", "num_examples", "methods")
_METHOD_FIELDS = ("name", "options", "keep_ratios", "num_examples")
_COST_FIELDS = (
    "model",
    "method",
    "options",
    "keep_ratio",
    "step",
    "examples",
    "bytes",
    "dense_bytes",
    "seconds",
    "peak_mib",
)
_SECONDS_FOR_CLAIM = 5.0
Key = tuple[Any, ...]
Shard = tuple[int, int]


@dataclass(frozen=True)
class Record:
    """The values of one example under one model, method, keep ratio, step and seed.

    Raises:
        InputError: a value that is NaN.
    """

    model: str  # label; LABEL@SEED for one of several training runs
    fingerprint: str  # of the model's weights
    dtype: str  # of the weights, e.g. float32
    method: str  # name of the compressor, or of a baseline
    options: str  # as canonical JSON (sorted keys), only those that were set
    keep_ratio: float  # fraction of slots kept, in (0, 1]; of a baseline, of the context it sees
    step: int | None  # gradient steps done, or None for a method without steps
    seed: int | None  # of a method that draws, or None
    dataset: str
    stratum: str  # examples that are also reported apart; may be empty
    document: str  # the unit that intervals resample
    example: str  # name of the example in its document
    values: dict[str, float]  # by metric; nats per token where a unit applies, shares in [0, 1]

    def __post_init__(self) -> None:
        for name, value in self.values.items():
            if math.isnan(value):
                place = f"model {self.model!r}, {self.method} at keep ratio {self.keep_ratio:g}"
                example = f"example {self.example!r} of {self.document!r}"
                raise InputError(f"{place}: {name} of {example} is {value}, no number")

    @property
    def key(self) -> Key:
        """All fields but the values and the stratum; they make the record unique."""
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


class ResultsFolder:
    """Results of one configuration: ``config.json``, ``records.jsonl``, ``costs.jsonl``.

    Every append reaches the disk before it returns. The configuration, all that results depend on
    but the models, never changes; models may be added. Until the end of the ``with`` block a whole
    run is the folder's only writer; shards (index, count) share it, each the only writer of
    ``records-INDEX-of-COUNT.jsonl``, and all read the records of the others.

    Raises:
        InputError: the folder holds results of another configuration, or something that is no
            result; another process is writing to it; it cannot be written to.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], *, shard: Shard = (0, 1)) -> None:
        self.path = path
        index, count = shard
        ending = "" if count == 1 else f"-{index}-of-{count}"
        self._records_file = path / f"records{ending}.jsonl"
        self._costs_file = path / f"costs{ending}.jsonl"
        self._events_file = path / f"provenance{ending}.jsonl"
        with ExitStack() as stack:
            with one_writer(path, timeout=_SECONDS_FOR_CLAIM):  # the whole folder, only to claim it
                self._claim(config)
                self._check_other_counts(count)
                stack.enter_context(one_writer(path, f"{LOCK_FILE}-{index}-of-{count}"))
            self._records = {record.key: record for record in read_records(path)}
            self._locks = stack.pop_all()

    def _claim(self, config: Mapping[str, Any]) -> None:
        """Write the configuration, or check that it is the folder's."""
        config = json.loads(json.dumps(config))
        stored = claim_folder(self.path, "config.json", config) or config
        for field in [*config, *stored]:
            if config.get(field) != stored.get(field):
                raise InputError(
                    f"{self.path} holds results of another configuration: "
                    f"{field} is {stored.get(field)} there, {config.get(field)} here"
                )

    def _check_other_counts(self, count: int) -> None:
        """Reject a folder that processes share in another number of shards."""
        for lock in sorted(self.path.glob(f"{LOCK_FILE}-*")):
            if not lock.name.endswith(f"-of-{count}"):
                with one_writer(self.path, lock.name):
                    pass

    def fingerprint_of(self, label: str) -> str | None:
        """The fingerprint of a label's records in this folder; None where there are none."""
        weights = models_of(self.records).get(label)
        return None if weights is None else weights["fingerprint"]

    def check_model(self, label: str, fingerprint: str, dtype: str) -> None:
        """Reject a label that names other weights or another dtype in this folder."""
        weights = {"fingerprint": fingerprint, "dtype": dtype}
        stored = models_of(self.records).get(label, weights)
        if stored != weights:
            raise InputError(
                f"{self.path} holds results of another model {label!r}, {stored}, not {weights}"
            )

    @property
    def records(self) -> list[Record]:
        """All records on disk."""
        return list(self._records.values())

    def done(self, key: Key) -> bool:
        """Whether a record of this key is on disk."""
        return key in self._records

    def append(self, records: Iterable[Record]) -> None:
        """Write the records that are missing and wait until they are on disk."""
        new = {record.key: record for record in records if record.key not in self._records}
        append_jsonl(self._records_file, *(asdict(record) for record in new.values()))
        self._records.update(new)

    def append_cost(self, *costs: Mapping[str, Any]) -> None:
        """Append costs to their own file, because they differ between runs and records do not."""
        append_jsonl(self._costs_file, *costs)

    def append_event(self, event: Mapping[str, Any]) -> None:
        """Write a line of provenance."""
        append_jsonl(self._events_file, event)

    def __enter__(self) -> "ResultsFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self._locks.close()


@dataclass(frozen=True)
class StoredResults:
    """The content of a results folder."""

    config: dict[str, Any]
    wanted: dict[tuple[str, float], int]  # examples of a complete run, by method and keep ratio
    records: list[Record]
    costs: list[dict[str, Any]]  # of ``read_costs``; methods with their options
    events: list[dict[str, Any]]


def read_folder(folder: Path) -> StoredResults:
    """Configuration, records, costs and provenance of a results folder.

    Raises:
        InputError: no results folder, or damaged content.
    """
    config = read_config(folder)
    records = read_records(folder)
    costs = read_costs(folder)
    for cost in costs:
        cost["method"] = method_label(cost["method"], cost["options"])
    return StoredResults(config, _wanted_examples(config), records, costs, read_events(folder))


def _wanted_examples(config: Mapping[str, Any]) -> dict[tuple[str, float], int]:
    wanted = {}
    for name, keep_ratio in config.get("baselines", []):
        wanted[name, keep_ratio] = config["num_examples"]
    for method in config["methods"]:
        label = method_label(method["name"], method["options"])
        for keep_ratio in method["keep_ratios"]:
            wanted[label, keep_ratio] = method["num_examples"]
    return wanted


def read_records(folder: Path) -> list[Record]:
    """Records of a results folder, of all its shards, each once; torn last lines are left out.

    Raises:
        InputError: a line that is no record, a value that is no number, two records of one example
            that differ.
    """
    _load_evaluation(folder)
    records: dict[Key, Record] = {}
    for file, line in _lines(folder, "records"):
        try:
            record = Record(**line)
        except (TypeError, ValueError) as error:
            raise InputError(f"{file} has a line that is no record: {one_line(error)}") from None
        if records.setdefault(record.key, record) != record:
            raise InputError(
                f"{file} has a second, different record of example {record.example!r} of "
                f"{record.document!r}: {record.model}, {record.method_label}, keep ratio "
                f"{record.keep_ratio:g}"
            )
    return list(records.values())


def _load_evaluation(folder: Path) -> None:
    """Import the evaluation of a folder's records, so that ``METRICS`` has its metrics."""
    file = folder / "config.json"
    config = read_json(file) if file.is_file() else None
    if isinstance(config, dict) and config.get("evaluation") in evaluation_names():
        find_evaluation(config["evaluation"])


def read_costs(folder: Path) -> list[dict[str, Any]]:
    """Costs in a results folder, of all its shards; ``InputError`` for a line without a field."""
    costs = []
    for file, line in _lines(folder, "costs"):
        _check_fields(line, _COST_FIELDS, f"{file} has a line that is no cost")
        costs.append(line)
    return costs


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Command, versions, hardware and duration of every run that wrote to a results folder."""
    return [line for _, line in _lines(folder, "provenance")]


def read_config(folder: Path) -> dict[str, Any]:
    """Configuration of a results folder.

    Raises:
        InputError: no results folder, a damaged one, or one of an unknown evaluation.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise InputError(f"{folder} is no results folder: it has no config.json")
    config = read_json(file)
    _check_fields(config, _CONFIG_FIELDS, f"{file} is of no evaluation or damaged")
    try:
        find_evaluation(config["evaluation"])
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
    for method in config["methods"]:
        _check_fields(method, _METHOD_FIELDS, f"{file} is damaged, a method")
    return config


def models_of(records: Iterable[Record]) -> dict[str, dict[str, str]]:
    """Label of each model to fingerprint and dtype of its weights.

    Raises:
        InputError: two sets of weights under one label.
    """
    models: dict[str, dict[str, str]] = {}
    for record in records:
        weights = {"fingerprint": record.fingerprint, "dtype": record.dtype}
        known = models.setdefault(record.model, weights)
        if not are_comparable(record.fingerprint, known["fingerprint"]):
            # of another version of kvcat, whose fingerprint contradicts nothing
            known = {**known, "fingerprint": record.fingerprint}
        if known != weights:
            raise InputError(
                f"the records of model {record.model!r} come from two different models"
            )
    return models


def _lines(folder: Path, name: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Lines of a log and of its shards."""
    shards = folder.glob(f"{name}-*-of-*.jsonl")
    for file in sorted([*folder.glob(f"{name}.jsonl"), *shards]):
        for line in read_jsonl(file):
            yield file, line


def _check_fields(line: Any, fields: Iterable[str], what: str) -> None:
    for field in fields:
        if not isinstance(line, dict) or field not in line:
            raise InputError(f"{what}: it has no {field}")
