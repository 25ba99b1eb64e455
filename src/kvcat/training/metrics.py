"""The run's record: one JSON object a line, appended and flushed as it happens."""

import json
from pathlib import Path
from typing import Any

from kvcat.training.monitors import Monitor

METRICS_FILE = "metrics.jsonl"


class MetricsLog:
    """``metrics.jsonl`` of a run: records ``{"kind": ..., "step": ..., ...}``.

    Opened at a step, it first drops what lies beyond it, so that a resumed run has neither gaps nor doubles.

    Args:
        path: the file.
        step: steps already done; later records are dropped.
        enabled: whether this process writes the file; the others only remember the newest records.
        monitor: gets a copy of every record that is written.
    """

    def __init__(self, path: Path, step: int, *, enabled: bool = True, monitor: Monitor | None = None) -> None:
        self._monitor = monitor
        self._last: dict[str, dict[str, Any]] = {}
        self._file = None
        if not enabled:
            return
        kept = [r for r in read_metrics(path) if r["step"] <= step] if step else []
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(record) + "\n" for record in kept))
        partial.rename(path)
        self._file = path.open("a")
        self._last = {record["kind"]: record for record in kept}

    def write(self, record: dict[str, Any]) -> None:
        """Append one record."""
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
            if self._monitor is not None:
                self._monitor.write(record)
        self._last[record["kind"]] = record

    def last(self, kind: str) -> dict[str, Any]:
        """The newest record of a kind, or an empty one."""
        return self._last.get(kind, {})

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file is not None:
            self._file.close()
        if self._monitor is not None:
            self._monitor.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Records of a run; a last line torn by a kill is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records
