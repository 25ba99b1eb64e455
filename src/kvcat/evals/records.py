"""Results on disk: one JSON line per example, model, method, keep ratio, step and seed, appended and never changed."""

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from kvcat.errors import InputError
from kvcat.locking import FolderLock

_PARTIAL = "config.partial"
_RECORDS = re.compile(r"records(-\d+-of-\d+)?\.jsonl")
Key = tuple[str, str, str, str, str, float, int | None, int | None, str, str, str]
Shard = tuple[int, int]


@dataclass(frozen=True)
class Record:
    """What one example gave under one model, method, keep ratio, step and seed.

    Args:
        model: label of the model.
        fingerprint: of the model's weights.
        dtype: of the model's weights, e.g. ``float32``.
        method: name of the compressor, or of a baseline.
        options: its options that differ from the defaults, as canonical JSON (sorted keys).
        keep_ratio: fraction of slots kept, in (0, 1]; of a baseline the fraction of the context that it sees.
        step: gradient steps taken, or None for a method without steps.
        seed: of a method that draws, or None.
        dataset: name of the data set.
        stratum: group of the example that is reported apart, may be empty.
        document: name of the document, the unit that the intervals resample.
        example: name of the example in its document.
        values: metric name to value; nats per token where a unit applies, 0 or 1 for what is right or wrong.
    """

    model: str
    fingerprint: str
    dtype: str
    method: str
    options: str
    keep_ratio: float
    step: int | None
    seed: int | None
    dataset: str
    stratum: str
    document: str
    example: str
    values: dict[str, float]

    @property
    def key(self) -> Key:
        """What makes the record unique."""
        return (
            self.model, self.fingerprint, self.dtype, self.method, self.options, self.keep_ratio, self.step, self.seed,
            self.dataset, self.document, self.example,
        )  # fmt: skip

    @property
    def method_label(self) -> str:
        """The method's name with its options, e.g. ``attention-matching preset=paper``."""
        return method_label(self.method, json.loads(self.options))


def method_label(name: str, options: Mapping[str, Any]) -> str:
    """A method's name with its options, e.g. ``attention-matching preset=paper``."""
    return " ".join([name, *(f"{key}={value}" for key, value in sorted(options.items()))])


class ResultsFolder:
    """A folder of results of one configuration: ``config.json``, ``records.jsonl``, ``costs.jsonl``.

    Every append reaches the disk before it returns. A line torn by a kill is cut off when the folder is opened again.
    The configuration never changes; models may be added. A whole run is the folder's only writer; shards share it,
    each the only writer of ``records-INDEX-of-COUNT.jsonl``, and all read what the others have done. Close it, or use
    it in a ``with`` block: until then nobody else can open it.

    Args:
        path: the folder; made if absent.
        config: what the results depend on, JSON values only, models excepted.
        shard: (index, count) of this writer, index in [0, count).

    Raises:
        InputError: the folder holds results of another configuration, or something that is no result; another process
            is writing to it; it cannot be written to.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], *, shard: Shard = (0, 1)) -> None:
        self.path = path
        index, count = shard
        self._suffix = "" if count == 1 else f"-{index}-of-{count}"
        _make_folder(path)
        self._locks = [FolderLock(path, shared=count > 1)]
        try:
            _claim(path, json.loads(json.dumps(config)))
            self._file = self._open()
        except BaseException:
            self._release()
            raise

    def _open(self) -> TextIO:
        file = self.path / f"records{self._suffix}.jsonl"
        try:
            if self._suffix:
                file.touch()
                self._locks.append(FolderLock(file))
            _cut_torn_line(file)
            _cut_torn_line(self._costs)
            self.records = read_records(self.path)
            self._keys = {record.key for record in self.records}
            return file.open("a", encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write to results folder {self.path}: {error.strerror}") from error

    @property
    def _costs(self) -> Path:
        return self.path / f"costs{self._suffix}.jsonl"

    def _release(self) -> None:
        for lock in self._locks:
            lock.release()

    def close(self) -> None:
        """Ends the writing and lets others open the folder."""
        self._file.close()
        self._release()

    def check_model(self, label: str, fingerprint: str, dtype: str) -> None:
        """Nothing where the label stands for these weights in this folder, or for none yet.

        Raises:
            InputError: it stands for other weights or another dtype.
        """
        for name, known in models_of(self.records).items():
            for field, value in (("fingerprint", fingerprint), ("dtype", dtype)):
                if name == label and known[field] != value:
                    raise InputError(
                        f"{self.path} holds results of another model {label!r}: {field} is {known[field]} there, "
                        f"{value} here"
                    )

    def done(self, key: Key) -> bool:
        """Whether a record of this key is on disk."""
        return key in self._keys

    def append(self, records: Iterable[Record]) -> None:
        """Write records that are not there yet and wait until they are on disk."""
        new = [record for record in records if record.key not in self._keys]
        self._file.write("".join(json.dumps(asdict(record)) + "\n" for record in new))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.records.extend(new)
        self._keys.update(record.key for record in new)

    def append_cost(self, cost: Mapping[str, Any]) -> None:
        """Write what a batch took, apart from the records, which a repetition must give again to the last bit."""
        with self._costs.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(cost) + "\n")

    def __enter__(self) -> "ResultsFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_records(path: Path) -> list[Record]:
    """Records of a results folder, of all its shards, each once; torn last lines are left out.

    Raises:
        InputError: a line that is no record.
    """
    found: dict[Key, Record] = {}
    for file in sorted(file for file in path.iterdir() if _RECORDS.fullmatch(file.name)) if path.is_dir() else []:
        try:
            lines = file.read_text(encoding="utf-8").split("\n")
            for line in lines[:-1]:
                record = Record(**json.loads(line))
                if not isinstance(record.values, dict):
                    raise ValueError(f"its values are {record.values!r}")
                found.setdefault(record.key, record)
        except (ValueError, TypeError) as error:  # ValueError: not JSON, or not UTF-8
            raise InputError(f"{file} has a line that is no record: {error}") from None
    return list(found.values())


def read_costs(path: Path) -> list[dict[str, Any]]:
    """What the batches of a results folder took, of all its shards; torn last lines are left out.

    Raises:
        InputError: a line that is no cost.
    """
    found = []
    for file in sorted(path.glob("costs*.jsonl")):
        try:
            found += [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n")[:-1]]
        except ValueError as error:
            raise InputError(f"{file} has a line that is no cost: {error}") from None
    return found


def models_of(records: Iterable[Record]) -> dict[str, dict[str, str]]:
    """Label of each model to the fingerprint and dtype of its weights, in the order of the records.

    Raises:
        InputError: one label for two sets of weights.
    """
    models: dict[str, dict[str, str]] = {}
    for record in records:
        new = {"fingerprint": record.fingerprint, "dtype": record.dtype}
        if models.setdefault(record.model, new) != new:
            raise InputError(f"the records of model {record.model!r} come from two different models")
    return models


def read_config(path: Path) -> dict[str, Any]:
    """Configuration of a results folder.

    Raises:
        InputError: no such folder, or no results in it.
    """
    file = path / "config.json"
    if not file.is_file():
        raise InputError(f"{path} is no results folder: it has no config.json")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{file} is damaged: {error}") from None
    if not isinstance(config, dict) or config.get("evaluation") is None:
        raise InputError(f"{path} is no results folder: its config.json names no evaluation")
    return config


def _make_folder(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise InputError(f"{path} is a file, not a results folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make results folder {path}: {error.strerror}") from error


def _claim(path: Path, config: dict[str, Any]) -> None:
    """The folder's configuration is this one from now on, or was already."""
    if all(file.name.startswith(_PARTIAL) for file in path.iterdir()):  # a kill at the very start leaves such a file
        try:
            _create(path / "config.json", config)
            return
        except FileExistsError:  # another shard was faster
            pass
        except OSError as error:
            raise InputError(f"cannot write to results folder {path}: {error.strerror}") from error
    there = read_config(path)
    for field in [*config, *there]:
        if config.get(field) != there.get(field):
            raise InputError(
                f"{path} holds results of another configuration: "
                f"{field} is {there.get(field)} there, {config.get(field)} here; choose another folder"
            )


def _create(file: Path, content: dict[str, Any]) -> None:
    """Write a file that is whole as soon as it is there, and never replace one."""
    partial = file.with_name(f"{_PARTIAL}.{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8") as stream:
            stream.write(json.dumps(content, indent=2) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        os.link(partial, file)
    finally:
        partial.unlink(missing_ok=True)


def _cut_torn_line(file: Path) -> None:
    if not file.exists():
        return
    content = file.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with file.open("r+b") as stream:
            stream.truncate(whole)
