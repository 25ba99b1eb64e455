"""Append-only results on disk: a JSON line per example, model, method, keep ratio, step, seed."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from kvcat.errors import InputError, one_line
from kvcat.evals.registry import find_evaluation
from kvcat.files import (
    LOCK_FILE,
    append_jsonl,
    check_record,
    claim_folder,
    one_writer,
    read_json,
    read_jsonl,
)
from kvcat.stats.records import Key, Record, check_runs, method_label, models_of

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
_NUMBER = (float, int)
_RECORD_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("model", "fingerprint", "dtype", "method", "options"), (str,)),
    "keep_ratio": _NUMBER,
    **dict.fromkeys(("step", "seed"), (int, NoneType)),
    **dict.fromkeys(("dataset", "stratum", "document", "example"), (str,)),
    "values": (dict,),
}
_SECONDS_FOR_CLAIM = 5.0
Shard = tuple[int, int]


class ResultsFolder:
    """The folder with one configuration's results: its settings, records and costs.

    The files are ``config.json``, ``records.jsonl`` and ``costs.jsonl``.

    Every append is on disk when it returns. The configuration contains everything on which the
    results depend, except the models. It never changes, but models may be added.

    Until the end of the ``with`` block, an unsharded run is the folder's only writer. Shards
    (index, count) share the folder: each is the only writer of its
    ``records-INDEX-of-COUNT.jsonl``, and reads the records of the others.

    Raises:
        InputError: the folder holds results of another configuration, or other files; another
            process is writing to it; it cannot be written to.
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
            self._records = {record.key: record for record in _read_records(path)}
            self._locks = stack.pop_all()

    def _claim(self, config: Mapping[str, Any]) -> None:
        """Write the configuration, or check that it equals the stored one."""
        config = json.loads(json.dumps(config))
        stored = claim_folder(self.path, "config.json", config) or config
        for field in [*config, *stored]:
            if config.get(field) != stored.get(field):
                raise InputError(
                    f"{self.path} holds results of another configuration: "
                    f"{field} is {stored.get(field)} there, {config.get(field)} here"
                )

    def _check_other_counts(self, count: int) -> None:
        """Reject a folder with records from a different number of shards."""
        for lock in sorted(self.path.glob(f"{LOCK_FILE}-*")):
            if not lock.name.endswith(f"-of-{count}"):
                with one_writer(self.path, lock.name):
                    pass

    def check_models(self, models: Mapping[str, Mapping[str, str]]) -> None:
        """Reject labels whose records in this folder have other weights or another dtype.

        Also those that would not be runs of their own, among themselves or next to the models of
        this folder (``check_runs``).

        Args:
            models: fingerprint and dtype of each model's weights, by label.
        """
        known = models_of(self.records)
        for label, weights in models.items():
            stored = known.setdefault(label, dict(weights))
            if stored != weights:
                raise InputError(
                    f"{self.path} holds results of another model {label!r}, {stored}, not {weights}"
                )
        check_runs({label: weights["fingerprint"] for label, weights in known.items()})

    @property
    def records(self) -> list[Record]:
        """All records on disk."""
        return list(self._records.values())

    def done(self, key: Key) -> bool:
        """Whether a record with this key is on disk."""
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
        """Append a line of provenance."""
        append_jsonl(self._events_file, event)

    def __enter__(self) -> "ResultsFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self._locks.close()


@dataclass(frozen=True)
class StoredResults:
    """The content of a results folder."""

    config: dict[str, Any]
    wanted: dict[tuple[str, float], int]  # number of examples by method and keep ratio
    records: list[Record]
    costs: list[dict[str, Any]]  # as in ``read_costs``, with method labels
    events: list[dict[str, Any]]


def read_folder(folder: Path) -> StoredResults:
    """The configuration, records, costs and provenance of a results folder.

    Raises:
        InputError: it is not a results folder, or its content is damaged.
    """
    config = read_config(folder)
    records = _read_records(folder)
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
    """The records of a results folder with all its shards, without duplicates.

    A last line that a kill left incomplete is skipped.

    Raises:
        InputError: as in ``read_config``; a line is not a record, a value is not a number, or two
            records of one example differ.
    """
    read_config(folder)
    return _read_records(folder)


def _read_records(folder: Path) -> list[Record]:
    """``read_records`` of a folder whose configuration was checked."""
    records: dict[Key, Record] = {}
    for file, line in _lines(folder, "records"):
        try:
            check_record(_RECORD_TYPES, line)
            record = Record(**line)
        except (TypeError, ValueError) as error:
            raise InputError(f"{file} has a line that is not a record: {one_line(error)}") from None
        if records.setdefault(record.key, record) != record:
            raise InputError(
                f"{file} has a second, different record of example {record.example!r} of "
                f"{record.document!r}: {record.model}, {record.method_label}, keep ratio "
                f"{record.keep_ratio:g}"
            )
    return list(records.values())


def read_costs(folder: Path) -> list[dict[str, Any]]:
    """The costs in a results folder with all its shards; ``InputError`` if a field is missing."""
    costs = []
    for file, line in _lines(folder, "costs"):
        _check_fields(line, _COST_FIELDS, f"{file} has a line that is not a cost")
        costs.append(line)
    return costs


def read_events(folder: Path) -> list[dict[str, Any]]:
    """The command, versions, hardware and duration of every run that wrote to a results folder."""
    return [line for _, line in _lines(folder, "provenance")]


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration of a results folder; the metrics of its evaluation are loaded.

    Raises:
        InputError: it is not a results folder, it is damaged, or its evaluation is unknown.
    """
    file = folder / "config.json"
    if not file.is_file():
        inside = sorted({path.parent for path in folder.glob("*/records*.jsonl")})
        remedy = f"; name those in it: {' '.join(map(str, inside))}" if inside else ""
        raise InputError(f"{folder} is not a results folder: it has no config.json{remedy}")
    config = read_json(file)
    _check_fields(config, _CONFIG_FIELDS, f"{file} is damaged or belongs to no evaluation")
    try:
        find_evaluation(config["evaluation"])
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
    for method in config["methods"]:
        _check_fields(method, _METHOD_FIELDS, f"{file} is damaged, a method")
    return config


def _lines(folder: Path, name: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The lines of a log and of its shards, each with its file."""
    shards = folder.glob(f"{name}-*-of-*.jsonl")
    for file in sorted([*folder.glob(f"{name}.jsonl"), *shards]):
        for line in read_jsonl(file):
            yield file, line


def _check_fields(line: Any, fields: Iterable[str], what: str) -> None:
    for field in fields:
        if not isinstance(line, dict) or field not in line:
            raise InputError(f"{what}: it has no {field}")
