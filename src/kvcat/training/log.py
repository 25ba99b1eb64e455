"""The record of a run: ``metrics.jsonl``, its copies in monitors, and the progress on standard error."""

import dataclasses
import hashlib
import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from kvcat.files import append_jsonl, atomic_write, read_jsonl
from kvcat.training.config import TrainConfig
from kvcat.training.distributed import World
from kvcat.training.objective import Record

METRICS_FILE = "metrics.jsonl"
_LINE_EVERY = 60.0  # seconds between lines where there is no terminal
_LINES = 20  # lines of a short run


class MetricsLog:
    """``metrics.jsonl`` of a run: records ``{"kind": ..., "step": ..., ...}``.

    Opened at a step, it first drops later records, so that a resumed run has neither gaps nor duplicates. The run's
    monitor gets a copy of every record. A process where it is not enabled only remembers the newest records.
    """

    def __init__(self, config: TrainConfig, step: int, *, enabled: bool = True) -> None:
        self._path = Path(config.output) / METRICS_FILE
        self._enabled = enabled
        self._last: dict[str, dict[str, Any]] = {}
        self._show: Callable[[dict[str, Any]], None] | None = None
        self.close: Callable[[], None] = lambda: None
        if enabled:
            kept = [record for record in read_jsonl(self._path) if record["step"] <= step] if step else []
            with atomic_write(self._path) as partial:
                partial.write_text("".join(json.dumps(record) + "\n" for record in kept))
            self._last = {record["kind"]: record for record in kept}
            self._show, self.close = _open_monitor(config)

    def write(self, record: dict[str, Any]) -> None:
        """Append one record."""
        self._last[record["kind"]] = record
        if self._enabled:
            append_jsonl(self._path, record)
        if self._show is not None:
            self._show(record)

    def last(self, kind: str) -> dict[str, Any]:
        """The newest record of a kind, or an empty one."""
        return self._last.get(kind, {})


def _open_monitor(config: TrainConfig) -> tuple[Callable[[dict[str, Any]], None] | None, Callable[[], None]]:
    """How a record is shown in the run's monitor, and how the monitor is closed; a resumed run continues in it."""
    folder = Path(config.output).resolve()
    if config.monitor == "tensorboard":
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder / "tensorboard"))

        def show(record: dict[str, Any]) -> None:
            for name, value in _numbers(record).items():
                writer.add_scalar(name, value, record["step"])

        return show, writer.close
    if config.monitor == "wandb":
        name = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
        run = importlib.import_module("wandb").init(
            project="kvcat", name=folder.name, id=name, resume="allow", dir=folder, config=dataclasses.asdict(config)
        )
        return lambda record: run.log(_numbers(record), step=record["step"]), run.finish
    return None, lambda: None


def _numbers(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a record by ``kind/name`` or ``kind/name/group``."""
    return {
        "/".join([record["kind"], name, *group]): float(value)
        for name, *group, value in _flat(record)
        if isinstance(value, int | float) and name != "step"
    }


def mean_record(records: Sequence[Record], weights: Sequence[float], world: World) -> dict[str, Any]:
    """The weighted average of all processes' records of the same names as plain numbers; devices are read once."""
    rows = torch.stack([torch.stack([value for *_, value in _flat(record)]).double() for record in records])
    weight = torch.tensor(weights, dtype=rows.dtype, device=rows.device)
    sums = world.mean(torch.cat([weight @ rows, weight.sum()[None]]))
    mean: dict[str, Any] = {}
    for (name, *group, _), value in zip(_flat(records[0]), (sums[:-1] / sums[-1]).tolist(), strict=True):
        if group:
            mean.setdefault(name, {})[group[0]] = value
        else:
            mean[name] = value
    return mean


def _flat(record: Record) -> list[tuple[Any, ...]]:
    """(name, value) and (name, group, value) of a record."""
    flat: list[tuple[Any, ...]] = []
    for name, value in record.items():
        flat += [(name, group, part) for group, part in value.items()] if isinstance(value, dict) else [(name, value)]
    return flat


class Progress:
    """A bar on standard error with losses and kept fractions; without a terminal a line every now and then."""

    def __init__(self, total: int, done: int, *, enabled: bool = True) -> None:
        self._total, self._done, self._enabled = total, done, enabled
        self._live = enabled and sys.stderr.isatty()
        self._bar = tqdm(total=total, initial=done, unit="step", disable=not self._live, dynamic_ncols=True)
        self._started = self._line_at = time.monotonic()
        self._steps_at_line = max(1, total // _LINES)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def note(self, *lines: str) -> None:
        """Print lines, above the bar where there is one."""
        for line in lines if self._enabled else ():
            self._bar.write(line, file=sys.stderr)
            sys.stderr.flush()

    def update(self, step: int, record: dict[str, Any]) -> None:
        """Show a step's losses, speed and the time left."""
        if self._live:
            self._bar.set_postfix_str(_losses(record), refresh=False)
            self._bar.update(step - self._bar.n)
            return
        now = time.monotonic()
        if step % self._steps_at_line == 0 or step == self._total or now > self._line_at + _LINE_EVERY:
            self._line_at = now
            left = (now - self._started) / max(1, step - self._done) * (self._total - step)
            speed = f"{record['tokens_per_s']:,.0f} tokens/s  {tqdm.format_interval(left)} left"
            self.note(f"step {step}/{self._total}  {_losses(record)}  {speed}")

    def validated(self, record: dict[str, Any]) -> None:
        """Print a validation's losses."""
        self.note(f"validation at step {record['step']}: {_losses(record)}")


def _losses(record: dict[str, Any]) -> str:
    parts = [f"dense {record['dense_loss']:.3f}"]
    if "masked_loss" in record:
        kept = " ".join(f"{value:.2f}" for value in record["kept"].values())
        parts += [f"masked {record['masked_loss']:.3f}", f"kl {record['kl']:.4f}", f"kept {kept}"]
    return "  ".join(parts)
