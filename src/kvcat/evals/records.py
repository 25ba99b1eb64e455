"""Results on disk: one JSON line per window, model, method, keep ratio and step, appended and never changed."""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from kvcat.errors import InputError
from kvcat.locking import FolderLock

_PARTIAL = "config.partial"
Key = tuple[str, str, str, str, str, float, int | None, str, str, str]


@dataclass(frozen=True)
class Record:
    """What one window gave under one model, method, keep ratio and step.

    Args:
        model: label of the model.
        fingerprint: of the model's weights.
        dtype: of the model's weights, e.g. ``float32``.
        method: name of the compressor.
        options: its options that differ from the defaults, as canonical JSON (sorted keys).
        keep_ratio: fraction of slots kept, in (0, 1].
        step: gradient steps taken, or None for a method without steps.
        dataset: name of the data set.
        document: name of the document, the unit that the intervals resample.
        window: name of the window in its document.
        suffix_len: tokens scored.
        values: metric name to value; nats per token where a unit applies.
    """

    model: str
    fingerprint: str
    dtype: str
    method: str
    options: str
    keep_ratio: float
    step: int | None
    dataset: str
    document: str
    window: str
    suffix_len: int
    values: dict[str, float]

    @property
    def key(self) -> Key:
        """What makes the record unique."""
        return (
            self.model, self.fingerprint, self.dtype, self.method, self.options, self.keep_ratio, self.step,
            self.dataset, self.document, self.window,
        )  # fmt: skip

    @property
    def method_label(self) -> str:
        """The method's name with its options, e.g. ``attention-matching preset=paper``."""
        return method_label(self.method, json.loads(self.options))


def method_label(name: str, options: dict[str, Any]) -> str:
    """A method's name with its options, e.g. ``attention-matching preset=paper``."""
    return " ".join([name, *(f"{key}={value}" for key, value in sorted(options.items()))])


class ResultsFolder:
    """A folder of results of one configuration, ``config.json`` and ``records.jsonl``, open to one writer at a time.

    Every append reaches the disk before it returns. A line torn by a kill is cut off when the folder is opened again.
    Models may be added; every other field of the configuration stays as it was. Close it, or use it in a ``with``
    block: until then nobody else can open it.

    Args:
        path: the folder; made if absent.
        config: what the results depend on, JSON values only, models excepted.

    Raises:
        InputError: the folder holds results of another configuration, or something that is no result; another process
            is writing to it; it cannot be written to.
    """

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self.path = path
        _make_folder(path)
        self._lock = FolderLock(path)
        try:
            self._config = _merge_config(path, config)
            self._file = self._open()
        except BaseException:
            self._lock.release()
            raise

    def _open(self) -> TextIO:
        file = self.path / "records.jsonl"
        try:
            _write_atomically(self.path / "config.json", self._config)
            _cut_torn_line(file)
            self.records = read_records(self.path)
            self._keys = {record.key for record in self.records}
            return file.open("a", encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write to results folder {self.path}: {error.strerror}") from error

    def close(self) -> None:
        """Ends the writing and lets others open the folder."""
        self._file.close()
        self._lock.release()

    def add_model(self, label: str, fingerprint: str, dtype: str) -> None:
        """Note a model, so that the label stands for these weights in this folder.

        Raises:
            InputError: the label already stands for other weights or another dtype.
        """
        models = self._config["models"]
        new = {"fingerprint": fingerprint, "dtype": dtype}
        old = models.get(label, new)
        for field, value in new.items():
            if old[field] != value:
                raise InputError(
                    f"{self.path} holds results of another model {label!r}: {field} is {old[field]} there, {value} here"
                )
        models[label] = new
        _write_atomically(self.path / "config.json", self._config)

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

    def __enter__(self) -> "ResultsFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_records(path: Path) -> list[Record]:
    """Records of a results folder in the order they were written; a torn last line is left out.

    Raises:
        InputError: a line that is no record.
    """
    file = path / "records.jsonl"
    if not file.exists():
        return []
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
        return [Record(**json.loads(line)) for line in lines[:-1]]
    except (ValueError, TypeError) as error:  # ValueError: not JSON, or not UTF-8
        raise InputError(f"{file} has a line that is no record: {error}") from None


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


def _merge_config(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    wanted = {**json.loads(json.dumps(config)), "models": {}}
    if {file.name for file in path.iterdir()} <= {_PARTIAL}:  # empty, but for what a kill at the very start leaves
        return wanted
    there = read_config(path)
    for field in [*wanted, *there]:
        if field != "models" and wanted.get(field) != there.get(field):
            raise InputError(
                f"{path} holds results of another configuration: "
                f"{field} is {there.get(field)} there, {wanted.get(field)} here; choose another folder"
            )
    return there


def _write_atomically(file: Path, content: dict[str, Any]) -> None:
    partial = file.with_name(_PARTIAL)
    try:
        with partial.open("w", encoding="utf-8") as stream:
            stream.write(json.dumps(content, indent=2) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(file)
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
