"""Results on disk: one JSON line per example, model, method, keep ratio, step and seed, appended and never changed."""

import json
import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvcat.cache import are_comparable
from kvcat.errors import InputError, one_line
from kvcat.evals.statistics import EVALUATIONS
from kvcat.files import LOCK_FILE, append_jsonl, claim_folder, one_writer, read_json, read_jsonl

_CONFIG = ("evaluation", "dataset", "num_examples", "methods")
_METHOD = ("name", "options", "keep_ratios", "num_examples")
_COST = ("model", "method", "options", "keep_ratio", "step", "examples", "bytes", "dense_bytes", "seconds", "peak_mib")
_SECONDS_FOR_CLAIM = 5.0
Key = tuple[Any, ...]
Shard = tuple[int, int]


@dataclass(frozen=True)
class Record:
    """What one example gave under one model, method, keep ratio, step and seed; ``InputError`` for a NaN."""

    model: str  # label; LABEL@SEED for one of several training runs
    fingerprint: str  # of the model's weights
    dtype: str  # of the weights, e.g. float32
    method: str  # name of the compressor, or of a baseline
    options: str  # as given, as canonical JSON (sorted keys)
    keep_ratio: float  # fraction of slots kept, in (0, 1]; of a baseline the fraction of the context that it sees
    step: int | None  # gradient steps taken, or None for a method without steps
    seed: int | None  # of a method that draws, or None
    dataset: str
    stratum: str  # group that is reported apart, may be empty
    document: str  # the unit that intervals resample
    example: str  # name of the example in its document
    values: dict[str, float]  # by metric; nats per token where a unit applies, shares in [0, 1]

    def __post_init__(self) -> None:
        for name, value in self.values.items():
            if math.isnan(value):
                found = f"{name} of example {self.example!r} of {self.document!r} is {value}, no number"
                raise InputError(f"model {self.model!r}, {self.method} at keep ratio {self.keep_ratio:g}: {found}")

    @property
    def key(self) -> Key:
        """What makes the record unique: all but the values and the stratum."""
        return tuple(value for name, value in vars(self).items() if name not in ("stratum", "values"))

    @property
    def method_label(self) -> str:
        """The method's name with its options, e.g. ``attention-matching preset=paper``."""
        return method_label(self.method, json.loads(self.options))


def method_label(name: str, options: Mapping[str, Any]) -> str:
    """A method's name with its options, e.g. ``attention-matching preset=paper``."""
    return " ".join([name, *(f"{key}={value}" for key, value in sorted(options.items()))])


class ResultsFolder:
    """A folder of results of one configuration: ``config.json``, ``records.jsonl``, ``costs.jsonl``.

    Every append reaches the disk before it returns. The configuration, all that results depend on but the
    models, never changes; models may be added. Until the end of the ``with`` block a whole run is the folder's
    only writer; shards (index, count) share it, each the only writer of ``records-INDEX-of-COUNT.jsonl``, and
    all read what the others have done.

    Raises:
        InputError: the folder holds results of another configuration, or something that is no result;
            another process is writing to it; it cannot be written to.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], *, shard: Shard = (0, 1)) -> None:
        self.path = path
        index, count = shard
        suffix = "" if count == 1 else f"-{index}-of-{count}"
        self._files = {name: path / f"{name}{suffix}.jsonl" for name in ("records", "costs", "provenance")}
        with ExitStack() as stack:
            with one_writer(path, timeout=_SECONDS_FOR_CLAIM):  # the whole folder, only to claim it
                self._claim(config)
                for lock in sorted(path.glob(f"{LOCK_FILE}-*")):
                    if not lock.name.endswith(f"-of-{count}"):
                        with one_writer(path, lock.name):  # refused while it is shared out otherwise
                            pass
                stack.enter_context(one_writer(path, f"{LOCK_FILE}-{index}-of-{count}"))
            self._records = {record.key: record for record in read_records(path)}
            self._open = stack.pop_all()

    def _claim(self, config: Mapping[str, Any]) -> None:
        config = json.loads(json.dumps(config))
        there = claim_folder(self.path, "config.json", config) or config
        for field in [*config, *there]:
            if config.get(field) != there.get(field):
                differs = f"{field} is {there.get(field)} there, {config.get(field)} here"
                raise InputError(f"{self.path} holds results of another configuration: {differs}")

    def fingerprint_of(self, label: str) -> str | None:
        """The fingerprint of a label's records in this folder; None where there are none."""
        known = models_of(self.records).get(label)
        return None if known is None else known["fingerprint"]

    def check_model(self, label: str, fingerprint: str, dtype: str) -> None:
        """Refuse a label that stands for other weights or another dtype in this folder."""
        own = {"fingerprint": fingerprint, "dtype": dtype}
        if (there := models_of(self.records).get(label, own)) != own:
            raise InputError(f"{self.path} holds results of another model {label!r}, {there}, not {own}")

    @property
    def records(self) -> list[Record]:
        """All records on disk."""
        return list(self._records.values())

    def done(self, key: Key) -> bool:
        """Whether a record of this key is on disk."""
        return key in self._records

    def append(self, records: Iterable[Record]) -> None:
        """Write records that are not there yet and wait until they are on disk."""
        new = {record.key: record for record in records if record.key not in self._records}
        append_jsonl(self._files["records"], *map(asdict, new.values()))
        self._records |= new

    def append_cost(self, *costs: Mapping[str, Any]) -> None:
        """Write what a method took, apart from the records, which a repetition gives again to the last bit."""
        append_jsonl(self._files["costs"], *costs)

    def append_event(self, event: Mapping[str, Any]) -> None:
        """Write a line of provenance."""
        append_jsonl(self._files["provenance"], event)

    def __enter__(self) -> "ResultsFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()


def read_records(folder: Path) -> list[Record]:
    """Records of a results folder, of all its shards, each once; torn last lines are left out.

    Raises:
        InputError: a line that is no record, a value that is no number, two records of one example that differ.
    """
    found: dict[Key, Record] = {}
    for file, line in _lines(folder, "records"):
        try:
            record = Record(**line)
        except (TypeError, ValueError) as error:
            raise InputError(f"{file} has a line that is no record: {one_line(error)}") from None
        if found.setdefault(record.key, record) != record:
            raise InputError(
                f"{file} has a second, different record of example {record.example!r} of {record.document!r}: "
                f"{record.model}, {record.method_label}, keep ratio {record.keep_ratio:g}"
            )
    return list(found.values())


def read_costs(folder: Path) -> list[dict[str, Any]]:
    """What the methods of a results folder took, of all its shards; ``InputError`` for a line without a field."""
    lines = list(_lines(folder, "costs"))
    for file, line in lines:
        _check_fields(line, _COST, f"{file} has a line that is no cost")
    return [line for _, line in lines]


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Command, versions, hardware and duration of every run that wrote to a results folder."""
    return [line for _, line in _lines(folder, "provenance")]


def read_config(folder: Path) -> dict[str, Any]:
    """Configuration of a results folder; ``InputError`` where it is none, damaged, or of an unknown evaluation."""
    file = folder / "config.json"
    if not file.is_file():
        raise InputError(f"{folder} is no results folder: it has no config.json")
    config = read_json(file)
    _check_fields(config, _CONFIG, f"{file} is of no evaluation or damaged")
    if config["evaluation"] not in EVALUATIONS:
        raise InputError(f"{file}: no evaluation {config['evaluation']!r}; there are {', '.join(EVALUATIONS)}")
    for method in config["methods"]:
        _check_fields(method, _METHOD, f"{file} is damaged, a method")
    return config


def models_of(records: Iterable[Record]) -> dict[str, dict[str, str]]:
    """Label of each model to fingerprint and dtype of its weights; ``InputError`` for two sets under one label."""
    models: dict[str, dict[str, str]] = {}
    for record in records:
        new = {"fingerprint": record.fingerprint, "dtype": record.dtype}
        known = models.setdefault(record.model, new)
        if not are_comparable(record.fingerprint, known["fingerprint"]):
            known = known | {"fingerprint": record.fingerprint}  # of another version of kvcat: nothing contradicts it
        if known != new:
            raise InputError(f"the records of model {record.model!r} come from two different models")
    return models


def _lines(folder: Path, name: str) -> Iterable[tuple[Path, dict[str, Any]]]:
    """Lines of a log and of its shards."""
    for file in sorted([*folder.glob(f"{name}.jsonl"), *folder.glob(f"{name}-*-of-*.jsonl")]):
        for line in read_jsonl(file):
            yield file, line


def _check_fields(line: Any, fields: Iterable[str], what: str) -> None:
    for field in fields:
        if not isinstance(line, dict) or field not in line:
            raise InputError(f"{what}: it has no {field}")
